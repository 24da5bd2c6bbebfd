"""The pages in docs/decisions/ have unique numbers, and every reference to a page names an existing one."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "decisions").glob("*.md"))
SOURCES = ("kernels", "model", "server", "docs", "benchmarks", "tests", "deploy")


def test_every_decision_has_a_unique_number_that_its_title_repeats():
    numbers = [int(page.name[:4]) for page in PAGES]

    assert numbers == list(range(1, len(PAGES) + 1))
    for number, page in zip(numbers, PAGES, strict=True):
        assert page.read_text().startswith(f"# {number}. "), page.name


def test_every_referenced_decision_exists():
    files = [path for path in ROOT.glob("*") if path.is_file() and path.suffix in {"", ".md"}]
    for folder in SOURCES:
        files += [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]
    named = {
        name
        for file in files
        for name in re.findall(r"decisions/(\d{4}-[\w-]+\.md)", file.read_text(errors="ignore"))
    }

    assert named
    assert named <= {page.name for page in PAGES}
