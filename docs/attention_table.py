"""The measured tables of docs/kernels.md, each made from the newest committed result that has rows of it.

Knows the result files of `benchmarks.attention` and nothing else.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.attention_report import best_prefill, fa2, prefill_pairs, size

Row: TypeAlias = dict[str, Any]
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
_NOTHING = "Nothing has been measured on a GPU yet: `python -m benchmarks.attention`."


def attention_table(folder: Path = RESULTS) -> str:
    """Markdown: prefill and decode beside their peers, each table with where it was measured.

    Args:
        folder: of the result files.
    """
    results = [json.loads(path.read_text()) for path in folder.glob("*-attention-*.json")]
    results = [it for it in results if it["topic"] == "attention" and "ceilings" in it]
    results.sort(key=lambda result: str(result["date"]), reverse=True)
    tables = []
    for belongs, table in _TABLES:
        rows = ([row for row in result["rows"] if belongs(row)] for result in results)
        found = next(((it, some) for it, some in zip(results, rows, strict=True) if some), None)
        if found is not None:
            tables.append((found[0], table(found[1])))
    lines: list[str] = []
    for result, group in itertools.groupby(tables, key=lambda pair: pair[0]):
        for _, table_lines in group:
            lines += [*table_lines, ""]
        lines += _source(result)
    return "\n".join(lines) if lines else _NOTHING


def _prefill(rows: list[Row]) -> list[str]:
    lines = [
        "Prefill, causal, TFLOP/s. cuDNN and FA2 are PyTorch's SDPA in the same run; FA3, FlashInfer and the best of",
        "all were measured elsewhere.",
        "",
        "| heads H/K/D | batch x tokens | packed | paged | of a GEMM | cuDNN | FA2 | FA3 | FlashInfer | best "
        "| packed / best | paged / best | packed / FA2 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for packed, paged in prefill_pairs(rows):
        here, elsewhere, best = (
            packed["peer_tflops"],
            packed["peer_tflops_elsewhere"],
            best_prefill(packed),
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
            f"{ours[0] / fa2(packed):.2f}" if fa2(packed) else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _more_prefill(rows: list[Row]) -> list[str]:
    """Rows that the peers' tables lack."""
    lines = [
        "More prefill, TFLOP/s: `96x(4-2000)` is a mix of lengths as chats have them, `512+8192` are new tokens",
        "after a history, `full` is not causal, `w1024` a sliding window. cuDNN and FA2 in the same run, where they",
        "take the problem.",
        "",
        "| heads H/K/D | batch x tokens | packed | paged | of a GEMM | cuDNN | FA2 | packed / better |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for packed, paged in prefill_pairs(rows):
        here = packed["peer_tflops"]
        better = max(here.values(), default=None)
        cells = [
            _heads(packed),
            size(packed),
            *(f"**{row['tflops']:.0f}**" for row in (packed, paged)),
            f"{packed['share_of_ceiling']:.0%}",
            *(_figure(here.get(name), 0) for name in ("cudnn", "fa2")),
            f"{packed['tflops'] / better:.2f}" if better else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _fp8_prefill(rows: list[Row]) -> list[str]:
    """Rows that were measured in FP8 too."""
    lines = [
        "Prefill where FP8 is allowed, packed, causal, TFLOP/s: with the quantising of queries, keys and values, and",
        "the attention alone; FA3 on operands that were quantised before. Errors are root mean squares against float64",
        "over a sequence of that length with outliers: in half precision, in FP8 with one scale per tensor, and ours.",
        "",
        "| heads H/K/D | batch x tokens | half | FP8 | FP8 / half | attention | FA3 FP8 | error, half | per tensor "
        "| ours | per tensor / ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        fp8, rmse = row["fp8"], row["fp8"]["rmse"]
        cells = [
            _heads(row),
            f"{row['batch']} x {row['seqlen']}",
            f"{row['tflops']:.0f}",
            f"**{fp8['tflops']:.0f}**",
            f"{fp8['gain']:.2f}",
            f"{fp8['attention_tflops']:.0f}",
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


def _more_decode(rows: list[Row]) -> list[str]:
    """Rows whose sequences have unlike lengths."""
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
    """Rows that were measured over a cache in FP8 too."""
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
    """Rows whose sequences begin with the same blocks."""
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


def _source(result: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    ceilings = result["ceilings"]
    return [
        f"{result['machine']}; {versions}; commit {result['commit']}, {result['date'][:10]}; "
        f"`{result['command']}`. Ceilings in the same run: {ceilings['gemm_tflops']:.0f} TFLOP/s of a bf16 GEMM, "
        f"{ceilings['copy_gbs']:.0f} GB/s of a copy. Elsewhere: {result['peers_elsewhere']}.",
        "",
    ]


def _has_peers(row: Row) -> bool:
    return bool(row.get("peer_tflops_elsewhere"))


def _heads(row: Row) -> str:
    return f"{row['hq']}/{row['hkv']}/{row['d']}"


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


_TABLES: tuple[tuple[Callable[[Row], bool], Callable[[list[Row]], list[str]]], ...] = (
    (lambda row: row["phase"] == "prefill" and _has_peers(row), _prefill),
    (lambda row: row["phase"] == "prefill" and not _has_peers(row), _more_prefill),
    (lambda row: "fp8" in row, _fp8_prefill),
    (lambda row: row["phase"] == "decode" and not {"gain", "size"} & row.keys(), _decode),
    (lambda row: row["phase"] == "decode" and "size" in row and "gain" not in row, _more_decode),
    (lambda row: "fp8_cache" in row, _fp8_decode),
    (lambda row: row["phase"] == "decode" and "gain" in row, _shared_decode),
)
"""Which rows are those of a table, and what writes it."""
