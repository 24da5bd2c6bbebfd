"""The documentation page works without another host."""

import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.http.serving import Server

pytestmark = pytest.mark.anyio

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []
        self.inline = False

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.found += [values[name] for name in ("src", "href") if name in values]
        self.inline |= tag == "style" or (tag == "script" and "src" not in values)
        self.inline |= any(name.startswith("on") or name == "style" for name in values)


async def test_every_file_of_the_page_comes_from_the_service(client):
    links = Links()
    links.feed((await client.get("/docs")).text)
    files = [link for link in links.found if not link.startswith("data:")]

    assert len(files) == 4
    for link in files:
        response = await client.get(f"/{link}")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(TYPES[link.rsplit(".")[-1]])
        assert (await client.head(f"/{link}")).status_code == 200


async def test_the_page_forbids_other_hosts_and_has_no_inline_code(client):
    response = await client.get("/docs")
    links = Links()
    links.feed(response.text)

    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in policy
    assert not links.inline


async def test_the_page_s_own_script_names_no_other_host(client):
    script = (await client.get("/docs/start.js")).text

    assert not re.search(r"https?:", script)
    assert "validatorUrl: null" in script


async def test_the_files_are_answered_from_the_browser_s_cache_if_unchanged(client):
    first = await client.get("/docs/start.js")

    assert first.headers["etag"]
    assert first.headers["x-content-type-options"] == "nosniff"


async def test_the_script_of_swagger_ui_is_the_real_one(client):
    script = (await client.get("/docs/swagger-ui-bundle.js")).text

    assert "SwaggerUIBundle" in script[:1000]
    assert len(script) > 500_000


def open_files():
    return [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]


async def test_a_slow_reader_of_a_file_holds_no_descriptor_and_no_copy(make_app):
    async with Server(make_app()) as server:
        reader, writer = await server.connect()
        # More than the kernel's buffers take.
        writer.write(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: test\r\n\r\n" * 8)
        await reader.readline()
        await asyncio.sleep(0.2)

        opened = open_files()
        unsent = [c.transport.get_write_buffer_size() for c in server.connections]
        writer.close()

    assert not [path for path in opened if "swagger" in path]
    assert unsent
    assert max(unsent) <= 1 << 18
