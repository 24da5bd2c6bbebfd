"""Formats the rows of the attention benchmark as Markdown tables, and counts the rows that reach the peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]
"""A row of the result file."""

AHEAD = 1.05
"""Target for the TFLOP/s of a prefill, as a multiple of the best peer's."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Throughput that the same GPU reached in the same run with a single operation.

    Attributes:
        gemm_tflops: bf16 matrix product of 8192 x 8192 x 8192, TFLOP/s.
        copy_gbs: copy of 4 GiB, read plus written, GB/s.
    """

    gemm_tflops: float
    copy_gbs: float


def summary(rows: Iterable[Row]) -> list[str]:
    """Count the rows that reach the best of their peers."""
    rows = list(rows)
    lines = []
    pairs = _prefill_pairs(rows)
    known = [pair for pair in pairs if pair[0]["peer_tflops_elsewhere"]]
    for name, index in (("packed", 0), ("paged", 1)) if pairs else ():
        shares = [pair[index]["tflops"] / _best_prefill(pair[0]) for pair in known]
        beside_fa2 = [pair[index]["tflops"] > _fa2(pair[0]) for pair in pairs if _fa2(pair[0])]
        lines.append(
            f"{name}: at or above the best in {sum(share >= 1 for share in shares)} of {len(shares)} "
            f"rows of the peers' tables, {AHEAD} times in {sum(share >= AHEAD for share in shares)}; "
            f"above FA2 in {sum(beside_fa2)} of {len(beside_fa2)}"
        )
    ratios = [
        row["ratio_to_best_peer"]
        for row in rows
        if row["phase"] == "decode" and "ratio_to_best_peer" in row
    ]
    if ratios:
        reached = sum(ratio <= 1 for ratio in ratios)
        lines.append(
            f"decode: at most the time of the better peer in {reached} of {len(ratios)} rows"
        )
    return lines


def _prefill(rows: list[Row]) -> list[str]:
    lines = [
        "Prefill, causal, TFLOP/s. cuDNN and FA2 are PyTorch's SDPA in the same run; FA3, FlashInfer and the best of",
        "all were measured elsewhere.",
        "",
        "| heads H/K/D | batch x tokens | packed | paged | of a GEMM | cuDNN | FA2 | FA3 | FlashInfer | best "
        "| packed / best | paged / best | packed / FA2 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for packed, paged in _prefill_pairs(rows):
        here, elsewhere, best = (
            packed["peer_tflops"],
            packed["peer_tflops_elsewhere"],
            _best_prefill(packed),
        )
        ours = (packed["tflops"], paged["tflops"])
        cells = [
            _heads(packed),
            f"{packed['batch']} x {packed['seqlen']}",
            *(f"**{value:.0f}**" for value in ours),
            f"{packed['share_of_ceiling']:.0%}",
            *(_figure(here.get(name), 0) for name in ("cudnn", "fa2")),
            *(_figure(elsewhere.get(name), 0) for name in ("fa3", "flashinfer")),
            f"{best:.0f}",
            *(f"{value / best:.2f}" for value in ours),
            f"{ours[0] / _fa2(packed):.2f}" if _fa2(packed) else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _more_prefill(rows: list[Row]) -> list[str]:
    """Format rows that are not in the peers' tables."""
    lines = [
        "More prefill, TFLOP/s: `96x(10-2505)` is 96 sequences of 10 to 2505 tokens, as in chats, `512+8192` are new",
        "tokens after a history, `full` is not causal, `w1024` a sliding window. cuDNN and FA2 in the same run, where",
        "they take the problem.",
        "",
        "| heads H/K/D | batch x tokens | packed | paged | of a GEMM | cuDNN | FA2 | packed / better |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for packed, paged in _prefill_pairs(rows):
        here = packed["peer_tflops"]
        better = max(here.values(), default=None)
        cells = [
            _heads(packed),
            _size(packed),
            *(f"**{row['tflops']:.0f}**" for row in (packed, paged)),
            f"{packed['share_of_ceiling']:.0%}",
            *(_figure(here.get(name), 0) for name in ("cudnn", "fa2")),
            f"{packed['tflops'] / better:.2f}" if better else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _by_length(rows: list[Row]) -> list[str]:
    """Format rows of a series of lengths."""
    lines = [
        "Prefill by length, causal, TFLOP/s; math is standard attention, with all scores in memory. Memory is what a",
        "call allocates with its output; moved are the bytes that the tiles read and write if nothing is found in a",
        "cache, beside those of every input and output once and of standard attention.",
        "",
        "| batch x tokens | ours | cuDNN | FA2 | math | MiB: ours | cuDNN | FA2 | math | moved by tiles, MiB | least "
        "| standard |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peaks, moved = row["peer_peak_mib"], row["moved_mib"]
        too_large = row.get("peers_out_of_memory", ())
        cells = [
            f"{row['batch']} x {row['seqlen']}",
            f"**{row['tflops']:.0f}**",
            *(
                "does not fit" if name in too_large else _figure(row["peer_tflops"].get(name), 0)
                for name in ("cudnn", "fa2", "math")
            ),
            _figure(row["peak_mib"], 0),
            *(_figure(peaks.get(name), 0) for name in ("cudnn", "fa2", "math")),
            *(_figure(moved.get(name), 0) for name in ("tiles", "least", "standard")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _fp8_prefill(rows: list[Row]) -> list[str]:
    """Format rows that were also measured in FP8."""
    lines = [
        "Prefill over an FP8 cache, causal, TFLOP/s, beside packed keys in half precision; FA3 on operands that were",
        "quantized before. Errors are root mean squares against float64 over a sequence of that length with outliers:",
        "in half precision, in FP8 with one scale per tensor, and ours.",
        "",
        "| heads H/K/D | batch x tokens | half | FP8 | FP8 / half | FA3 FP8 | error, half | per tensor | ours "
        "| per tensor / ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fp8, rmse = row["fp8_prefill"], row["fp8_prefill"]["rmse"]
        cells = [
            _heads(row),
            f"{row['batch']} x {row['seqlen']}",
            f"{row['tflops']:.0f}",
            f"**{fp8['tflops']:.0f}**",
            f"{fp8['gain']:.2f}",
            _figure(fp8["fa3_tflops_elsewhere"], 0),
            *(f"{rmse[name]:.1e}" for name in ("half", "per_tensor", "fp8")),
            f"{rmse['per_tensor_over_fp8']:.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _decode(rows: list[Row]) -> list[str]:
    lines = [
        "Decode over the paged cache, microseconds. The share is that of the bandwidth that a copy reaches on the same",
        "GPU, for reading every key and value once; FA3 and FlashInfer were measured elsewhere.",
        "",
        "| heads H/K/D | batch x context | us | GB/s | share | FA3 | FlashInfer | ours / better |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peers = row["peer_us_elsewhere"]
        cells = [
            _heads(row),
            f"{row['batch']} x {row['context']}",
            f"**{row['us']:.1f}**",
            f"{row['gbs']:.0f}",
            f"{row['share_of_ceiling']:.0%}",
            *(_figure(peers.get(name), 1) for name in ("fa3", "flashinfer")),
            _figure(row.get("ratio_to_best_peer"), 2),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _decode_beside(rows: list[Row]) -> list[str]:
    """Format rows of shapes that several kernels computed, one line for each shape."""
    names = list(dict.fromkeys(row["beside"] for row in rows))
    lines = [
        "Decode by several kernels, microseconds and the share of a copy's bandwidth; times faster than the first.",
        "",
        "| heads H/K/D | batch x context | " + " | ".join(f"{name} | share" for name in names) + " | times faster |",
        "|---|---|" + "---|" * (2 * len(names) + 1),
    ]  # fmt: skip
    shapes: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        shapes.setdefault((_heads(row), _size(row)), {})[row["beside"]] = row
    for (heads, size), found in shapes.items():
        cells = [
            f"{found[name]['us']:.1f} | {found[name]['share_of_ceiling']:.0%}" for name in names
        ]
        first, *others = (found[name]["us"] for name in names)
        faster = ", ".join(f"{first / us:.2f}" for us in others)
        lines.append(f"| {heads} | {size} | {' | '.join(cells)} | {faster} |")
    return lines


def _more_decode(rows: list[Row]) -> list[str]:
    """Format rows whose sequences have different lengths."""
    lines = [
        "Decode of sequences of unlike lengths, microseconds.",
        "",
        "| heads H/K/D | batch x context | us | GB/s | share |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {_heads(row)} | {row['size']} | **{row['us']:.1f}** | {row['gbs']:.0f} | {row['share_of_ceiling']:.0%} |"
        for row in rows
    ]
    return lines


def _fp8_decode(rows: list[Row]) -> list[str]:
    """Format rows that were also measured over an FP8 cache."""
    lines = [
        "Decode over a cache in FP8, microseconds, and how far the output is from that over the same cache in half",
        "precision, relative.",
        "",
        "| heads H/K/D | batch x context | half | FP8 | times faster | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        fp8 = row["fp8_cache"]
        cells = [
            _heads(row),
            f"{row['batch']} x {row['context']}",
            f"{row['us']:.1f}",
            f"**{fp8['us']:.1f}**",
            f"**{fp8['gain']:.2f}**",
            f"{fp8['difference']:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _shared_decode(rows: list[Row]) -> list[str]:
    """Format rows whose sequences begin with the same blocks."""
    lines = [
        "Decode of sequences that begin with the same blocks, microseconds, with the prefix read once for all of them",
        "and by each.",
        "",
        "| heads H/K/D | batch x context | once | by each | times faster | share |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            _heads(row),
            row["size"],
            f"**{row['us']:.1f}**",
            f"{row['us_without_sharing']:.1f}",
            f"**{row['gain']:.1f}**",
            f"{row['share_of_ceiling']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _prefill_pairs(rows: Iterable[Row]) -> list[tuple[Row, Row]]:
    """Return pairs of packed and paged prefill rows of a shape; if one is missing, the other is used for both."""
    found: dict[tuple[str, str], dict[bool, Row]] = {}
    for row in rows:
        if row["phase"] == "prefill":
            found.setdefault((_heads(row), _size(row)), {})[row["paged"]] = row
    return [
        (pair[min(pair)], pair[max(pair)])  # False, packed, comes before True
        for pair in found.values()
    ]


def _best_prefill(row: Row) -> float:
    """Return the highest TFLOP/s of the peers measured elsewhere; if there are none, of those in the same run."""
    peers = row["peer_tflops_elsewhere"] or row["peer_tflops"] or {"none": row["tflops"]}
    return float(max(peers.values()))


def _fa2(row: Row) -> float:
    """Return the higher of FA2's TFLOP/s in this run and elsewhere."""
    return float(max(row["peer_tflops"].get("fa2", 0), row["peer_tflops_elsewhere"].get("fa2", 0)))


def _heads(row: Row) -> str:
    """Format as in `32/8/128`: query heads, key-value heads, head dim."""
    return f"{row['hq']}/{row['hkv']}/{row['d']}"


def _size(row: Row) -> str:
    """Format as in `8x1024`, with all other properties of the shape."""
    return str(row.get("size", f"{row['batch']}x{row.get('seqlen', row.get('context'))}"))


def _has_peers(row: Row) -> bool:
    return bool(row.get("peer_tflops_elsewhere"))


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


TABLES: tuple[tuple[Callable[[Row], bool], Callable[[list[Row]], list[str]]], ...] = (
    (lambda row: row.get("series") == "lengths", _by_length),
    (lambda row: row["phase"] == "prefill" and _has_peers(row), _prefill),
    (
        lambda row: row["phase"] == "prefill" and not _has_peers(row) and "series" not in row,
        _more_prefill,
    ),
    (lambda row: "fp8_prefill" in row, _fp8_prefill),
    (lambda row: row["phase"] == "decode" and "beside" in row, _decode_beside),
    (
        lambda row: row["phase"] == "decode" and not {"gain", "size", "beside"} & row.keys(),
        _decode,
    ),
    (
        lambda row: (
            row["phase"] == "decode" and "size" in row and not {"gain", "beside"} & row.keys()
        ),
        _more_decode,
    ),
    (lambda row: "fp8_cache" in row, _fp8_decode),
    (lambda row: row["phase"] == "decode" and "gain" in row, _shared_decode),
)
"""For each table, a predicate that selects its rows and a function that formats them."""
