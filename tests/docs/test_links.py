"""Every page of the documents is in the navigation, and every relative link leads to a file and a heading."""

from pathlib import Path

import pytest

from tests.docs.markdown import anchors, links

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAVIGATION = DOCS / "SUMMARY.md"
PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *(ROOT / "model").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    }
)


def matched(pattern):
    """Return the files of an entry of the navigation, which may be a pattern such as `decisions/*`."""
    found = {it for it in DOCS.glob(pattern) if it.suffix == ".md"}
    assert found, f"{NAVIGATION.name}: {pattern} is no page"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for link in links(page.read_text()):
        file, _, anchor = link.partition("#")
        if page == NAVIGATION and "*" in file:
            continue
        target = (page.parent / file) if file else page
        assert target.exists(), link
        assert not Path(file).is_absolute(), link
        if anchor:
            assert target.suffix == ".md", link
            assert anchors(target.read_text()).count(anchor) == 1, link


def test_every_page_of_the_documents_is_in_the_navigation_once():
    entries = [line.strip() for line in NAVIGATION.read_text().splitlines()]
    patterns = [entry.removeprefix("- ") for entry in entries if entry.endswith("*")]
    listed = links(NAVIGATION.read_text()) + patterns
    pages = [page for entry in listed for page in matched(entry)]

    assert len(pages) == len(set(pages))
    assert set(pages) == set(DOCS.rglob("*.md")) - {NAVIGATION}


def test_the_readme_leads_to_every_part_of_the_documents():
    """Every page that is no decision can be reached from the README by links alone."""
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page == NAVIGATION:
            continue
        seen.add(page)
        found = [
            (page.parent / link.partition("#")[0]).resolve() for link in links(page.read_text())
        ]
        todo += [it for it in found if it.suffix == ".md" and it.is_file()]
    pages = {page for page in DOCS.rglob("*.md") if page.parent.name != "decisions"}

    assert pages - {NAVIGATION} <= seen


def test_links_in_code_are_no_links():
    text = "a [b](c.md#d)\n\n    [e](f.md)\n\n```\n[g](h.md)\n```\n`[i](j.md)` [k `l`](m.md) [n](https://o)\n"

    assert links(text) == ["c.md#d", "m.md"]


def test_anchors_are_those_of_a_forge():
    assert anchors("# A, `b` / c_d\n\n## [Link](x.md) here\n") == ["a-b--c_d", "link-here"]
