"""The site in headless Chromium: what it asks for, and its search."""

import contextlib
import functools
import http.server
import shutil
import threading

import pytest

from tests.http.page.conftest import NAMES

pytestmark = pytest.mark.slow

VISITED = ("index.html", "quickstart/laptop.html", "http.html", "benchmarks.html", "404.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def served(folder):
    handler = functools.partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def visit():
    """A page in a new browser, and the addresses that it asks for."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs Chromium: none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path)
        page = browser.new_page()
        asked, complaints = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page, asked, complaints
        browser.close()


def test_pages_and_the_search_ask_no_other_host(site, visit):
    page, asked, complaints = visit
    with served(site) as url:
        for name in VISITED:
            page.goto(url + name, wait_until="networkidle")
        page.goto(url + "index.html", wait_until="networkidle")
        page.get_by_role("button", name="Search").first.click()
        page.get_by_role("combobox").or_(page.locator("input[type=text]")).first.fill("preemption")
        found = page.locator("a[href*='h=preemption'], a[href*='.html']:has-text('reemption')")
        found.first.wait_for(timeout=20_000)

    assert len(asked) > len(VISITED)
    assert not [it for it in asked if not it.startswith((url, "data:", "blob:"))]
    assert not complaints


def test_pages_open_from_a_folder(site, visit):
    page, asked, _ = visit
    page.goto((site / "index.html").as_uri(), wait_until="load")
    page.get_by_role("link", name="HTTP interface").first.click()

    page.get_by_role("heading", name="The HTTP interface").wait_for()
    assert not [it for it in asked if not it.startswith(("file:", "data:", "blob:"))]
