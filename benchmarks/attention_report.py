"""The attention benchmark's rows as text: short tables for a terminal, markdown for the documents.

Pure: rows as in the result file in, lines out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    Row = dict[str, Any]

AHEAD = 1.05
"""How many times the best peer's TFLOP/s a prefill should reach."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the same GPU reached in the same run on work that has nothing else to do.

    Attributes:
        gemm_tflops: bf16 matrix product of 8192 x 8192 x 8192, TFLOP/s.
        copy_gbs: copy of 4 GiB, read plus written, GB/s.
    """

    gemm_tflops: float
    copy_gbs: float


def prefill_table(rows: Iterable[Row], ceilings: Ceilings) -> list[str]:
    """TFLOP/s of the prefill rows, then how they stand to the limits; nothing without rows."""
    pairs = prefill_pairs(rows)
    if not pairs:
        return []
    lines = [
        f"prefill, TFLOP/s; a matrix product here reaches {ceilings.gemm_tflops:.0f}; "
        "here: cudnn, fa2; elsewhere: best",
        f"{'heads':>10} {'batch':>18} {'packed':>7} {'paged':>7} {'cudnn':>7} {'fa2':>7} "
        f"{'best':>7} {'packed/best':>11} {'paged/best':>10}",
    ]
    for packed, paged in pairs:
        here, best = packed["peer_tflops"], best_prefill(packed)
        lines.append(
            f"{_heads(packed):>10} {size(packed):>18} {packed['tflops']:7.0f} {paged['tflops']:7.0f} "
            f"{here.get('cudnn', 0):7.0f} {here.get('fa2', 0):7.0f} {best:7.0f} "
            f"{packed['tflops'] / best:11.2f} {paged['tflops'] / best:10.2f}"
        )
    known = [pair for pair in pairs if pair[0]["peer_tflops_elsewhere"]]
    for name, index in (("packed", 0), ("paged", 1)):
        shares = [pair[index]["tflops"] / best_prefill(pair[0]) for pair in known]
        beside_fa2 = [pair[index]["tflops"] > fa2(pair[0]) for pair in pairs if fa2(pair[0])]
        lines.append(
            f"{name}: at or above the best in {sum(share >= 1 for share in shares)} of {len(shares)} "
            f"rows of the peers' tables, {AHEAD} times in {sum(share >= AHEAD for share in shares)}; "
            f"above FA2 in {sum(beside_fa2)} of {len(beside_fa2)}"
        )
    return lines


def fp8_table(rows: Iterable[Row]) -> list[str]:
    """The prefill rows that were measured in FP8 too; nothing without any."""
    mine = [row for row in rows if "fp8" in row]
    if not mine:
        return []
    lines = [
        "prefill in FP8, TFLOP/s, packed; `attention` without the quantising; elsewhere: FA3 without it",
        f"{'heads':>10} {'batch':>18} {'half':>6} {'fp8':>6} {'gain':>5} {'attention':>9} {'gain':>5} "
        f"{'fa3':>5} {'rmse: half':>10} {'per tensor':>10} {'ours':>9} {'ratio':>6}",
    ]
    for row in mine:
        fp8, rmse = row["fp8"], row["fp8"]["rmse"]
        lines.append(
            f"{_heads(row):>10} {size(row):>18} {row['tflops']:6.0f} {fp8['tflops']:6.0f} "
            f"{fp8['gain']:5.2f} {fp8['attention_tflops']:9.0f} {fp8['attention_gain']:5.2f} "
            f"{fp8['fa3_tflops_elsewhere'] or 0:5.0f} {rmse['half']:10.2e} {rmse['per_tensor']:10.2e} "
            f"{rmse['fp8']:9.2e} {rmse['per_tensor_over_fp8']:6.2f}"
        )
    return lines


def decode_table(rows: Iterable[Row], ceilings: Ceilings) -> list[str]:
    """Microseconds of the decode rows, then how they stand to the limits; nothing without rows."""
    mine = [row for row in rows if row["phase"] == "decode"]
    if not mine:
        return []
    lines = [
        f"decode, us; a copy here reaches {ceilings.copy_gbs:.0f} GB/s; elsewhere: fa3, flashinfer",
        f"{'heads':>10} {'batch':>18} {'us':>8} {'GB/s':>6} {'share':>6} {'fa3':>7} {'flashi.':>7} "
        f"{'ratio':>6}",
    ]
    for row in (row for row in mine if "gain" not in row):
        peers = row["peer_us_elsewhere"]
        lines.append(
            f"{_heads(row):>10} {size(row):>18} {row['us']:8.1f} {row['gbs']:6.0f} "
            f"{row['share_of_ceiling']:6.0%} {peers.get('fa3', 0):7.1f} "
            f"{peers.get('flashinfer', 0):7.1f} {row.get('ratio_to_best_peer', 0):6.2f}"
        )
    lines += [
        f"{_heads(row):>10} {size(row)}: {row['us']:.1f} us with the prefix read once, "
        f"{row['us_without_sharing']:.1f} us without, {row['gain']:.2f} times"
        for row in mine
        if "gain" in row
    ]
    lines += [
        f"{_heads(row):>10} {size(row)}: {row['fp8_cache']['us']:.1f} us over a cache in FP8, "
        f"{row['fp8_cache']['gain']:.2f} times as fast"
        for row in mine
        if "fp8_cache" in row
    ]
    ratios = [row["ratio_to_best_peer"] for row in mine if "ratio_to_best_peer" in row]
    lines.append(
        f"at most what the better peer takes in {sum(r <= 1 for r in ratios)} of {len(ratios)} rows"
    )
    return lines


def prefill_pairs(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """The prefill rows by shape, packed and paged; one stands for both where the other is missing."""
    found: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in rows:
        if row["phase"] == "prefill":
            found.setdefault((_heads(row), size(row)), {})[row["paged"]] = row
    return [
        (pair[min(pair)], pair[max(pair)])  # False, packed, comes before True
        for pair in found.values()
    ]


def best_prefill(row: Row) -> float:
    """The highest TFLOP/s of any peer elsewhere; of those here where no table has the shape."""
    peers = row["peer_tflops_elsewhere"] or row["peer_tflops"] or {"none": row["tflops"]}
    return float(max(peers.values()))


def fa2(row: Row) -> float:
    """FA2's TFLOP/s, the higher of here and elsewhere."""
    return float(max(row["peer_tflops"].get("fa2", 0), row["peer_tflops_elsewhere"].get("fa2", 0)))


def _heads(row: Row) -> str:
    return f"{row['hq']}/{row['hkv']}/{row['d']}"


def size(row: Row) -> str:
    """As in `8x1024`; what else sets a row apart is part of it."""
    return str(row.get("size", f"{row['batch']}x{row.get('seqlen', row.get('context'))}"))
