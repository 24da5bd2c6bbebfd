"""Writes the parts of the documents that come from the code or from measurements: `make docs`.

A test runs the same functions and compares, so that what the documents say stays true.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs.attention_table import attention_table
from kernels.arch import CATALOGUE
from kernels.explain.text import render
from server.cli.plan import explain_settings
from server.cli.settings import Settings, environment_variable, flag

ROOT = Path(__file__).parent.parent

# Whatever the environment says: the documents show the service as it comes.
_DEFAULTS = {name: field.default for name, field in Settings.model_fields.items()}


def settings_page() -> str:
    """Every setting with its flag, environment variable, default and meaning."""
    lines = [
        "# Settings",
        "",
        "Generated from `server/cli/settings.py` by `make docs`. A flag of `tessera serve` wins over its environment",
        "variable.",
        "",
        "| flag | environment | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        meaning = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{flag(name)}` | `{environment_variable(name)}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def latest_result(topic: str) -> dict[str, Any] | None:
    """The newest committed result of a topic by its date and time; None without any."""
    found = [
        json.loads(path.read_text())
        for path in (ROOT / "benchmarks" / "results").glob(f"*-{topic}-*.json")
    ]
    results: list[dict[str, Any]] = [result for result in found if result["topic"] == topic]
    return max(results, key=lambda result: str(result["date"]), default=None)


def cpu_table() -> str:
    """The README's table of the bundled model's speed on a CPU."""
    result = latest_result("cpu")
    if result is None:
        return ""
    rows = [row for row in result["rows"] if row["metric"] == "decode_tok_s"]
    lines = ["| | streams | tokens/s | ms per token and stream |", "|---|---|---|---|"]
    lines += [
        f"| {row['contender'].rpartition(' ')[0]} | {row['batch']} | {row['value']:.0f} | {row['ms_per_token']:.2f} |"
        for row in rows
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines.append(
        f"\n{result['machine']}; {versions}; commit {result['commit']}; `{result['command']}`."
    )
    return "\n".join(lines)


def plans() -> str:
    """The attention plan of the bundled model on every known processor."""
    settings = Settings(_cli_parse_args=False, **_DEFAULTS)
    return "\n".join(
        f"`tessera plan --arch {key}`\n\n```text\n{render(explain_settings(settings, arch), settings.model)}\n```\n"
        for key, arch in CATALOGUE.items()
    )


def fill(text: str, marker: str, content: str) -> str:
    """Put content between a document's `<!-- marker: ... -->` and the next `<!-- end -->`."""
    before, found, rest = text.partition(f"<!-- {marker}:")
    comment, closed, rest = rest.partition("-->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (found and closed and end):
        raise ValueError(f"no marker {marker} with an end")
    return f"{before}<!-- {marker}:{comment}-->\n{content.strip()}\n{end}{after}"


def readme() -> str:
    """README.md with its table up to date."""
    return fill((ROOT / "README.md").read_text(), "cpu-table", cpu_table())


def kernels_page() -> str:
    """docs/kernels.md with its measurements and plans up to date."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    return fill(fill(text, "attention-table", attention_table()), "plans", plans())


def main() -> None:
    """Write all generated parts."""
    (ROOT / "docs" / "settings.md").write_text(settings_page())
    (ROOT / "docs" / "kernels.md").write_text(kernels_page())
    (ROOT / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
