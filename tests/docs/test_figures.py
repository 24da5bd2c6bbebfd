"""Figures of speed in the documents have a source that exists."""

import fnmatch
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
# The help texts of settings have no links; docs/operations.md has the same figures with theirs.
DOCUMENTS = [
    ROOT / "README.md",
    *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/settings.md"}),
]
DECISIONS = sorted((ROOT / "docs/decisions").glob("*.md"))
CLAIMS_OF_OTHERS = (
    (ROOT / "docs/flash-attention.md").read_text().partition("## Numbers in circulation")[2]
)
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
    text = path.read_text().replace(CLAIMS_OF_OTHERS, "")
    for section in HEADING.split(text):
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
        for part, paragraph in blocks(path)
        if (found := FIGURE.search(part) or TABLE.search(part))
        and not any(map(exists, result_names(paragraph)))
        and not DECISION.search(paragraph)
    ]

    assert not without


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *DECISIONS, ROOT / "CHANGELOG.md"], ids=lambda it: it.name
)
def test_every_result_file_that_a_document_names_exists(path):
    named = re.findall(
        r"`(?:benchmarks/results/)?((?:cpu|h100|h200)-[\w.*-]+)\.json`", path.read_text()
    )

    assert not [it for it in named if not exists(it)]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda it: it.stem)
def test_a_result_file_has_the_commit_of_its_name_and_the_command_that_wrote_it(path):
    result = json.loads(path.read_text())
    commits = result.get("commits") or [result["commit"]]

    named = re.search(r"-([0-9a-f]{7,40})(?:-[a-z]+)?$", path.stem)[1]
    assert named in [it[: len(named)] for it in commits]
    assert result["command"]


def test_the_commits_of_result_files_are_in_the_history():
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("the checkout has no history")
    found = [json.loads(it.read_text()) for it in RESULTS.glob("*.json")]
    # A plus stands for changes that were not committed.
    commits = {commit.rstrip("+") for it in found for commit in it.get("commits") or [it["commit"]]}

    assert not [
        it for it in sorted(commits) if git("cat-file", "-t", f"{it}^{{commit}}") != "commit"
    ]


def git(*words):
    """Return the output of git; empty if it fails, or where this is no checkout."""
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()
