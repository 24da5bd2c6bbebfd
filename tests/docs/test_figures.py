"""Figures of speed in the documents have a source that exists."""

import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
# A number and what only measurements have. A limit or a delay in seconds is none.
FIGURE = re.compile(
    r"\d[\d,. \u00a0]*k?\s*(?:TFLOP/s|tokens/s|tokens per second|GB/s|ms a token|us a token|requests/s"
    r"|times (?:as fast|faster|the speed))",
)
TABLE = re.compile(
    r"^\|.*(?:tokens/s|ms a token|TFLOP/s|GB/s).*\|\n\|(?:[-: ]+\|)+\n", re.MULTILINE
)
SOURCE = re.compile(r"((?:cpu|h100|h200)-[a-z][\w.*{},/-]*?)(?:\.json)?(?=[`)\s,;:]|\.\s|$)")
DECISION = re.compile(
    r"decisions/\d{4}-[\w-]+\.md|docs/benchmarks\.md|\(benchmarks\.md|\(kernels\.md"
)


def blocks(path):
    """Return the paragraphs, lists and tables of a document, each with its neighbours of the same section."""
    found = []
    for section in HEADING.split(path.read_text()):
        parts = re.split(r"\n\s*\n", section.strip())
        found += [
            (part, "\n".join(parts[max(0, place - 1) : place + 2]))
            for place, part in enumerate(parts)
        ]
    return found


def result_names(text):
    """Return the names of result files in a text, without folder and ending; `*` stands for any part."""
    return [it.removeprefix("benchmarks/results/") for it in SOURCE.findall(text)]


def exists(pattern):
    return any(fnmatch.fnmatch(it.stem, pattern.rstrip(".")) for it in RESULTS.glob("*.json"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda it: it.name)
def test_a_figure_of_speed_stands_beside_its_result_file_or_a_page_that_names_it(path):
    without = [
        found[0].strip()
        for part, around in blocks(path)
        if (found := FIGURE.search(part) or TABLE.search(part))
        and not any(map(exists, result_names(around)))
        and not DECISION.search(around)
    ]

    assert not without
