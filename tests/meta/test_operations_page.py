"""docs/operations.md names every setting in its table by purpose, and its links lead somewhere."""

import re
from pathlib import Path

import pytest

from server.cli.settings import Settings, flag

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "operations.md").read_text()


def section(title):
    return re.search(rf"^## {title}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)[1]


def anchors(text):
    """Return the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_setting_has_one_purpose():
    named = re.findall(r"`(--[\w-]+)`", section("Settings by purpose"))

    assert sorted(named) == sorted(map(flag, Settings.model_fields))


@pytest.mark.parametrize("title", ["Sizing", "Troubleshooting", "Alerts", "Security checklist"])
def test_a_section_names_only_existing_flags(title):
    flags = {*map(flag, Settings.model_fields), "--gpu", "--gpus", "--input-len", "--output-len", "--rate"}  # fmt: skip

    assert set(re.findall(r"(?<![\w-])(--[a-z][\w-]+)", section(title))) <= flags


def test_links_lead_to_existing_headings():
    for file, anchor in re.findall(r"\]\(([\w.-]*)#([\w-]+)\)", PAGE):
        target = DOCS / file if file else DOCS / "operations.md"
        assert anchor in anchors(target.read_text()), (file, anchor)
