"""Writes the parts of the documents that come from the code or from measurements: `make docs`.

A test runs the same functions and compares, so that what the documents say stays true.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server.settings import Settings, environment_variable, flag

ROOT = Path(__file__).parent.parent


def settings_page() -> str:
    """Every setting with its flag, environment variable, default and meaning."""
    lines = [
        "# Settings",
        "",
        "Generated from `server/settings.py` by `make docs`. A flag of `tessera serve` wins over its environment",
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


def readme() -> str:
    """README.md with its table up to date."""
    text = (ROOT / "README.md").read_text()
    before, _, rest = text.partition("<!-- cpu-table")
    marker, _, rest = rest.partition("-->\n")
    _, _, after = rest.partition("<!-- end -->")
    return f"{before}<!-- cpu-table{marker}-->\n{cpu_table()}\n<!-- end -->{after}"


def main() -> None:
    """Write all generated parts."""
    (ROOT / "docs" / "settings.md").write_text(settings_page())
    (ROOT / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
