"""The site is complete, has the anchors of a forge, and its pages name no other host."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.conftest import build_site
from tests.docs.markdown import anchors

DOCS = Path(__file__).parents[2] / "docs"


class Page(HTMLParser):
    """What a page loads, where it leads and the ids that it has."""

    LOADED = ("script", "img", "iframe", "source", "video", "audio", "embed", "object", "input")

    def __init__(self, text):
        super().__init__()
        self.loads, self.ids = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag in self.LOADED:
            self.loads += [values[name] for name in ("src", "data", "srcset") if name in values]
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(values.get("href", ""))


def test_every_page_is_built_with_the_anchors_of_a_forge(site):
    for page in DOCS.rglob("*.md"):
        if page.name == "SUMMARY.md":
            continue
        built = Page((site / page.relative_to(DOCS).with_suffix(".html")).read_text())
        assert set(anchors(page.read_text())) <= built.ids, page


def test_pages_load_nothing_from_another_host(site):
    for page in site.rglob("*.html"):
        loads = Page(page.read_text()).loads
        assert loads
        assert not [it for it in loads if re.match(r"([a-z]+:)?//", it)], page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", style.read_text()), style


def test_nothing_but_documents_is_published(site):
    assets = site / "assets"
    kinds = {it.suffix for it in site.rglob("*") if it.is_file() and assets not in it.parents}

    assert kinds <= {".html", ".json", ".xml", ".svg", ".png"}
    assert not (site / "SUMMARY.html").exists()


@pytest.mark.parametrize("link", ["nowhere.md", "http.md#nowhere", "../README.md"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path, link):
    def change(docs):
        page = docs / "models.md"
        page.write_text(page.read_text() + f"\n[x]({link})\n")

    built = build_site(tmp_path, change)

    assert built.returncode
    assert "does not exist" in built.stdout + built.stderr
