"""The routes of the page for browsers, and what its files refer to."""

import hashlib
import json
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from server.engine.link.protocol import EngineState
from server.http.page.routes import INDEX, load_assets, prefers_html

pytestmark = pytest.mark.anyio

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
ASSETS = load_assets()
TEXTS = {name: asset.content.decode() for name, asset in ASSETS.items()}
SCRIPTS = [name for name in ASSETS if name.endswith(".js") and not name.startswith("vendor/")]
MANIFEST = json.loads(TEXTS["vendor/manifest.json"])


class Markup(HTMLParser):
    """Collects the elements of a document: tag, attributes, text directly inside."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2].append(data)

    def ids(self):
        return [attributes["id"] for _, attributes, _ in self.elements if "id" in attributes]


PAGE = Markup(TEXTS[INDEX])


async def test_a_browser_gets_the_page(client):
    response = await client.get("/", headers=BROWSER)

    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["vary"] == "accept"
    assert response.content == ASSETS[INDEX].content


@pytest.mark.parametrize(
    "accept", ["*/*", "application/json", "", "application/json, text/html;q=0.5"]
)
async def test_a_program_gets_the_health(client, accept):
    response = await client.get("/", headers={"accept": accept})

    assert response.json() == {"state": "ready", "phase": "ready"}
    assert response.headers["vary"] == "accept"


async def test_the_page_is_there_while_the_engine_starts(client, engine):
    engine.state, engine.info = EngineState.STARTING, None

    assert (await client.get("/", headers=BROWSER)).status_code == 200
    assert (await client.get("/")).status_code == 503


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER["accept"], True),
        ("TEXT/HTML", True),
        ("application/xhtml+xml", True),
        ("text/html;q=0.9, application/json;q=0.8", True),
        ("text/html;q=0", False),
        ("text/html;q=x", False),
        ("text/*", False),
        ("*/*", False),
        ("", False),
        ("application/json, text/plain, */*", False),
    ],
)
def test_only_a_client_that_names_html_prefers_it(accept, html):
    assert prefers_html(accept) is html


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in ASSETS)])
async def test_every_file_has_headers_that_restrict_it_to_this_service(client, path):
    response = await client.get(path, headers=BROWSER)

    assert response.status_code == 200
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert set(policy.values()) == {"'self'", "'none'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ["/", "/page/style.css"])
async def test_a_file_that_the_browser_has_is_not_sent_again(client, path):
    etag = (await client.get(path, headers=BROWSER)).headers["etag"]

    for known in (etag, f'"other", W/{etag}'):
        response = await client.get(path, headers=BROWSER | {"if-none-match": known})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == etag
    changed = await client.get(path, headers=BROWSER | {"if-none-match": '"other"'})
    assert changed.status_code == 200


@pytest.mark.parametrize("path", ["/", "/page/page.js"])
async def test_head_has_the_headers_of_get(client, path):
    get = await client.get(path, headers=BROWSER)
    head = await client.head(path, headers=BROWSER)

    assert head.status_code == 200
    ids = {get.headers.pop("x-request-id"), head.headers.pop("x-request-id")}
    assert len(ids) == 2
    assert head.headers == get.headers


@pytest.mark.parametrize(
    "name",
    [
        "routes.py",
        "..%2froutes.py",
        "%2e%2e/routes.py",
        "",
        "none.js",
        "vendor",
        "vendor/",
        "vendor%2f..%2f..%2froutes.py",
        "/page.js",
        "message/../../routes.py",
    ],
)
async def test_nothing_but_the_files_of_the_page_is_served(client, name):
    response = await client.get(f"/page/{name}")

    assert response.status_code == 404
    assert response.json()["error_type"] == "not_found"


async def test_the_page_is_not_part_of_the_api_document(client):
    paths = (await client.get("/openapi.json")).json()["paths"]

    assert not [path for path in paths if path.startswith("/page")]
    assert set(paths["/"]["get"]["responses"]["200"]["content"]) == {
        "application/json",
        "text/html",
    }


def test_every_file_is_reached_from_the_page_and_every_reference_exists():
    reached, open_names = set(), [INDEX]
    while open_names:
        name = open_names.pop()
        if name not in reached:
            reached.add(name)
            open_names += references(name)
    # People read these, not browsers.
    assert set(ASSETS) - reached == {"vendor/LICENSES.txt", "vendor/manifest.json"}
    assert reached <= set(ASSETS)


def test_the_page_asks_at_once_for_every_module_that_its_script_imports():
    waited, names = set(), ["page.js"]
    for name in names:
        folder = posixpath.dirname(name)
        for path in re.findall(r'^(?:import|export)\b[^;]*?from "(.+?)";', TEXTS[name], re.M):
            module = posixpath.normpath(f"{folder}/{path}").lstrip("/")
            if module not in waited:
                waited.add(module)
                names.append(module)

    preloaded = [
        a["href"] for tag, a, _ in PAGE.elements if tag == "link" and a["rel"] == "modulepreload"
    ]
    assert sorted(preloaded) == sorted(f"page/{name}" for name in waited)


def references(name):
    text = TEXTS[name]
    if name == INDEX:
        links = [
            a.get("src") or a.get("href")
            for tag, a, _ in PAGE.elements
            if tag in ("script", "link", "img")
        ]
        assert all(link.startswith("page/") for link in links), links
        return [link.removeprefix("page/") for link in links]
    if name.endswith(".js"):
        if name.startswith("vendor/"):
            return []
        paths = re.findall(
            r'^(?:import|export)\b[^;]*?from "(.+?)";|\bimport\("(.+?)"\)', text, re.M
        )
        folder = posixpath.dirname(name)
        return [posixpath.normpath(f"{folder}/{''.join(path)}").lstrip("/") for path in paths]
    return re.findall(r"url\(|@import", text)


@pytest.mark.parametrize("name", [INDEX, *SCRIPTS, *(n for n in ASSETS if n.endswith(".css"))])
def test_no_file_names_another_host(name):
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", TEXTS[name]))

    assert addresses <= {"http://www.w3.org/2000/svg"}  # a namespace


def test_the_page_has_neither_inline_scripts_nor_inline_styles():
    for tag, attributes, _ in PAGE.elements:
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_do_not_make_markup_from_text(name):
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", TEXTS[name]
    )


def test_the_libraries_are_those_of_the_manifest():
    files = {name.removeprefix("vendor/") for name in ASSETS if name.startswith("vendor/")}
    assert files == {*MANIFEST["files"], "manifest.json"}
    for name, entry in MANIFEST["files"].items():
        content = ASSETS[f"vendor/{name}"].content
        assert len(content) == entry["bytes"], name
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], name


def test_the_libraries_have_the_versions_of_the_lock_file_and_their_licences():
    folder = Path(__file__).parents[3] / "deploy/page_libraries"
    lock = json.loads((folder / "package-lock.json").read_text())["packages"]
    titles = re.findall(r"^(\S+)\n=+$", TEXTS["vendor/LICENSES.txt"], re.M)

    assert titles == list(MANIFEST["packages"])
    for name, package in MANIFEST["packages"].items():
        assert package.items() <= lock[f"node_modules/{name}"].items()
        assert package["integrity"].startswith("sha512-")
    assert not [entry for entry in lock.values() if "resolved" in entry]


def test_every_control_has_a_label():
    labels = {attributes.get("for") for tag, attributes, _ in PAGE.elements if tag == "label"}
    for tag, attributes, _ in PAGE.elements:
        if tag in ("input", "select", "textarea"):
            assert attributes["id"] in labels


def test_scripts_use_ids_that_the_page_has():
    ids = PAGE.ids()
    assert len(ids) == len(set(ids))
    for name in SCRIPTS:
        used = re.findall(r'(?:getElementById|byId|control)\("([\w-]+)"\)', TEXTS[name])
        assert set(used) <= set(ids), name
