"""Generates the parts of the documents that come from the code or from measurements: `make docs`.

A test runs the same functions and compares the results with the documents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.attention_table import attention_table
from docs.model_tables import families_table, formats_table, newest_parity
from docs.parameter_table import parameter_tables
from docs.peer_names import peer_names_page
from docs.peer_tables import metrics_table, routes_table, settings_table
from docs.shapes_table import shapes_table
from docs.training_attention import memory_plot, newest_result, speed_plot, training_table
from kernels import AttentionProblem, Phase, select
from kernels.arch import CATALOGUE
from kernels.attention.registry import INVARIANT_REGISTRY, PREFIX_REGISTRY, REGISTRY
from server.cli.parsing.setting_flags import allowed_values
from server.cli.settings import environment_variable, flag, listed_settings, meanings

ROOT = Path(__file__).parent.parent


def settings_page() -> str:
    """Return docs/settings.md: the flag, environment variable, default and meaning of every setting."""
    lines = [
        "# Settings",
        "",
        "Generated from `server/cli/settings.py` by `make docs`. A flag of `tessera serve` overrides its environment",
        "variable, and that overrides a `--config` file (`docs/command-line.md`).",
        "",
        "| flag | environment | values | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, field in listed_settings().items():
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        meaning = meanings()[name].replace("|", "\\|")
        cells = (
            f"`{flag(name)}`",
            f"`{environment_variable(name)}`",
            allowed_values(field),
            default,
            meaning,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cpu_results(files: str = "checkpoint") -> list[dict[str, Any]]:
    """Return the newest committed results of `benchmarks.cpu_peers`, one for each instruction set and model.

    Args:
        files: what Tessera reads, as `--files`.
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    found = [
        {**json.loads(path.read_text()), "file": path.name}
        for path in (ROOT / "benchmarks" / "results").glob("cpu-peers-*.json")
    ]
    for result in sorted(found, key=lambda result: str(result["date"])):
        if result.get("files", "checkpoint") != files:
            continue
        for model in dict.fromkeys(row["model"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["model"] == model]
            newest[result["isa"]["name"], model] = {**result, "model": model, "rows": rows}
    return sorted(newest.values(), key=lambda it: (it["isa"]["name"], _MODELS.index(it["model"])))


_MODELS = ("bundled", "smollm2", "smollm2-135m", "qwen3-0.6b", "llama-3.2-1b")
_ISA_TITLES = {"native": "AVX-512 VNNI", "avx2": "AVX2"}
_SPEEDS = {
    "one sequence": ("decode_1", "engine", "llama-bench"),
    "one stream, HTTP": ("http_1", "service", "llama-server"),
    "eight streams, HTTP": ("http_8", "service", "llama-server"),
    "prompt of 512 tokens": ("prefill_512", "engine", "llama-bench"),
}


def cpu_table(isa: str) -> str:
    """Return the table of the speeds on a CPU beside llama.cpp.

    Args:
        isa: name of the instruction set, as for `benchmarks.cpu_peers --isa`.
    """
    lines = [
        "| | tokens/s | Tessera int8 | llama.cpp Q8_0 | Tessera int4 | llama.cpp Q4_0 |",
        "|---|---|---|---|---|---|",
    ]
    notes: list[str] = []
    chosen = [result for result in cpu_results() if result["isa"]["name"] == isa]
    for result in chosen:
        values = {
            (row["contender"], row["weights"], row["metric"]): row["value"]
            for row in result["rows"]
            if "contender" in row
        }
        name = result["model"]
        if peer := values.get(("transformers", "float32", "decode_1")):
            notes.append(
                f"`transformers` makes {peer:.0f} tokens/s of {name} in float32, one sequence."
            )
        for what, (metric, ours, theirs) in _SPEEDS.items():
            cells = [
                values.get((contender, weights, metric))
                for contender, weights in (
                    (ours, "int8"), (theirs, "Q8_0"), (ours, "int4"), (theirs, "Q4_0"),
                )
            ]  # fmt: skip
            shown = " | ".join("" if cell is None else f"{cell:.0f}" for cell in cells)
            lines.append(f"| {name} | {what} | {shown} |")
            name = ""
    lines.append("\n" + " ".join([*notes, _sources(chosen)]))
    return "\n".join(lines)


def files_table() -> str:
    """Return the table of the speeds on a CPU beside llama.cpp where both read the same GGUF file."""
    results = cpu_results("gguf")
    if not results:
        return "No result is committed yet."
    lines = [
        "| | file | instructions | " + " | ".join(_SPEEDS) + " |",
        "|---|---|---|" + "---|" * len(_SPEEDS),
    ]
    for result in results:
        values = {
            (row["contender"], row["weights"], row["metric"]): row["value"]
            for row in result["rows"]
            if "contender" in row
        }
        name = result["model"]
        for form in dict.fromkeys(weights for _, weights, _ in values):
            cells = [name, form, _ISA_TITLES[result["isa"]["name"]]]
            for metric, ours, theirs in _SPEEDS.values():
                pair = values.get((ours, form, metric)), values.get((theirs, form, metric))
                cells.append("" if None in pair else _compared(*pair))
            lines.append(f"| {' | '.join(cells)} |")
            name = ""
    return "\n".join([*lines, "", _sources(results)])


def perplexity_table() -> str:
    """Return the table of the newest perplexities beside llama.cpp's, of each model and instruction set."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    found = [
        {**json.loads(path.read_text()), "file": path.name}
        for path in (ROOT / "benchmarks" / "results").glob("cpu-perplexity-gguf-*.json")
    ]
    for result in sorted(found, key=lambda result: str(result["date"])):
        newest[result["isa"], result["rows"][0]["model"]] = result
    if not newest:
        return "No result is committed yet."
    lines = ["| | file | text | Tessera | llama.cpp | difference |", "|---|---|---|---|---|---|"]
    for (isa, model), result in sorted(newest.items()):
        name = f"{model}, {_ISA_TITLES[isa]}"
        for row in result["rows"]:
            cells = [
                name,
                row["weights"],
                row["text"],
                f"{row['value']:.3f}",
                f"{row['llama']:.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} | {row['worse_percent']:+.2f} % |")
            name = ""
    return "\n".join([*lines, "", _sources(list(newest.values()))])


def _compared(ours: float, theirs: float) -> str:
    return f"{ours:.0f}, {theirs:.0f} ({ours / theirs:.2f})"


def _sources(results: list[dict[str, Any]]) -> str:
    """Return the machines and names of result files."""
    files = ", ".join(dict.fromkeys(f"`{result['file']}`" for result in results))
    machines = ", ".join(dict.fromkeys(result["machine"] for result in results))
    return f"{machines}; {files}."


def rows_table() -> str:
    """Return the table of the attention registries' rows and the processors that they run on."""
    lines = [
        "| row | algorithm | runs on | dtypes | head dims |",
        "|---|---|---|---|---|",
    ]
    for spec in (*REGISTRY, *PREFIX_REGISTRY, *INVARIANT_REGISTRY):
        cells = (
            f"`{spec.name}`",
            "PyTorch" if spec.flash_attention is None else f"FlashAttention-{spec.flash_attention}",
            f"sm_{_listed(spec.sm)}" if spec.sm else "CPU" + ", every GPU" * (spec.sm is None),
            ", ".join(sorted(spec.dtypes)),
            _listed(spec.head_dims) if spec.head_dims else "any",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _listed(numbers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def processors_table() -> str:
    """Return the table of the rows chosen on each known processor for a common shape, and whether they ran there."""
    lines = ["| `--arch` | processor | prefill | decode | ran |", "|---|---|---|---|---|"]
    for key, arch in CATALOGUE.items():
        dtype = "bfloat16" if arch.has_bfloat16 else "float16"
        problems = (AttentionProblem(phase, dtype, 32, 8, 128, 16, 1.0) for phase in Phase)
        chosen = " | ".join(f"`{select(problem, arch).spec.name}`" for problem in problems)
        lines.append(f"| `{key}` | {arch} | {chosen} | {'yes' if arch.is_tested else 'never'} |")
    return "\n".join(lines)


def fill(text: str, marker: str, content: str) -> str:
    """Replace what is between a document's `<!-- marker: ... -->` and the next `<!-- end -->`.

    Raises:
        ValueError: the document has no such marker, or no end after it.
    """
    before, found, rest = text.partition(f"<!-- {marker}:")
    comment, closed, rest = rest.partition("-->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (found and closed and end):
        raise ValueError(f"no marker {marker} with an end")
    return f"{before}<!-- {marker}:{comment}-->\n{content.strip()}\n{end}{after}"


def benchmarks_page() -> str:
    """Return docs/benchmarks.md with its tables up to date."""
    tables = [f"**{title}**\n\n{cpu_table(isa)}" for isa, title in _ISA_TITLES.items()]
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    text = fill(text, "cpu-tables", "\n\n".join(tables))
    text = fill(text, "cpu-files-table", files_table())
    text = fill(text, "perplexity-table", perplexity_table())
    return fill(text, "shapes-table", shapes_table())


def kernels_page() -> str:
    """Return docs/kernels.md with its tables up to date."""
    text = fill((ROOT / "docs" / "kernels.md").read_text(), "rows", rows_table())
    text = fill(text, "processors", processors_table())
    return fill(text, "attention-table", attention_table())


def http_page() -> str:
    """Return docs/http.md with the tables of other servers' parameters up to date."""
    text = (ROOT / "docs" / "http.md").read_text()
    for marker, table in parameter_tables().items():
        text = fill(text, marker, table)
    return text


def models_page() -> str:
    """Return docs/models.md with its tables up to date."""
    result = newest_parity()
    text = fill((ROOT / "docs" / "models.md").read_text(), "formats", formats_table(result))
    return fill(text, "families", families_table(result))


def coming_from_page() -> str:
    """Return docs/coming-from.md with its tables up to date."""
    text = fill((ROOT / "docs" / "coming-from.md").read_text(), "settings", settings_table())
    text = fill(text, "routes", routes_table())
    return fill(text, "metrics", metrics_table())


def flash_attention_page() -> str:
    """Return docs/flash-attention.md with its table up to date."""
    text = (ROOT / "docs" / "flash-attention.md").read_text()
    return fill(text, "training-table", training_table(newest_result()))


def plots() -> dict[str, str]:
    """Return the plots of docs/flash-attention.md by the names of their files in docs/."""
    result = newest_result()
    return {"attention-speed.svg": speed_plot(result), "attention-memory.svg": memory_plot(result)}


def main() -> None:
    """Write all generated parts into the documents."""
    (ROOT / "docs" / "settings.md").write_text(settings_page())
    (ROOT / "docs" / "peer-names.md").write_text(peer_names_page())
    (ROOT / "docs" / "kernels.md").write_text(kernels_page())
    (ROOT / "docs" / "models.md").write_text(models_page())
    (ROOT / "docs" / "http.md").write_text(http_page())
    (ROOT / "docs" / "benchmarks.md").write_text(benchmarks_page())
    (ROOT / "docs" / "flash-attention.md").write_text(flash_attention_page())
    (ROOT / "docs" / "coming-from.md").write_text(coming_from_page())
    for name, plot in plots().items():
        (ROOT / "docs" / name).write_text(plot)


if __name__ == "__main__":
    main()
