"""No document installs the package of PyPI that is called tessera, which is another project's."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BY_NAME = re.compile(r"\b(?:pip|pipx|uv tool|uv pip) install\b.*[\s'\"]tessera(?![\w/.:-])")


def test_no_document_installs_tessera_by_its_name():
    found = [
        f"{page.relative_to(ROOT)}: {line.strip()}"
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for line in page.read_text().splitlines()
        if BY_NAME.search(line)
    ]

    assert not found


@pytest.mark.parametrize(
    ("line", "by_name"),
    [
        ("pip install tessera", True),
        ("pip install 'tessera[gpu]' torch", True),
        ("uv tool install -q tessera==0.2", True),
        ("pip install ./tessera-*.whl", False),
        ("/opt/tessera/bin/pip install .", False),
    ],
)
def test_names_and_files_are_told_apart(line, by_name):
    assert bool(BY_NAME.search(line)) == by_name
