"""A stand-in for the Hugging Face Hub, as slow and as unreliable as a test wants."""

import contextlib
import dataclasses
import hashlib
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_PIECE = 16_384


@dataclasses.dataclass
class Faults:
    """What goes wrong.

    Attributes:
        bytes_per_second: of each answer with content; None for as fast as possible.
        breaks: how many answers with content end early, and after how many bytes.
        refuses: status and `X-Error-Code` of each answer about a file.
        refuses_info: the same for the description of the repository.
        ignores_ranges: whether each answer has the whole file.
        etag: of each file instead of its own.
        commit: of each revision instead of its own.
    """

    bytes_per_second: float | None = None
    breaks: list[int] = dataclasses.field(default_factory=list)
    refuses: tuple[int, str] | None = None
    refuses_info: tuple[int, str] | None = None
    ignores_ranges: bool = False
    etag: str | None = None
    commit: str = COMMIT


class StandIn:
    """A hub with one repository.

    Attributes:
        url: for HF_ENDPOINT.
        faults: may be changed at any time.
        requests: (method, path, Range header) of every request.
    """

    def __init__(self, repository, files):
        self.repository, self.files = repository, dict(files)
        self.faults = Faults()
        self.requests = []
        stand_in = self

        class Handler(_Handler):
            hub = stand_in

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def fetched(self, name):
        """Return the ranges that were asked for of a file's content; "" for all of it."""
        return [
            range_ for method, path, range_ in self.requests if method == "GET" and name in path
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub = None

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, *, with_body):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if path.startswith(f"/api/models/{hub.repository}"):
                self._describe(path)
            elif path.startswith(f"/{hub.repository}/resolve/"):
                self._file(path.split("/resolve/")[1].partition("/")[2], with_body=with_body)
            elif path.startswith("/content/"):
                self._content(hub.files[path.removeprefix("/content/")])
            else:
                self._refuse((404, "RepoNotFound"))

    def _describe(self, path):
        hub = self.hub
        if hub.faults.refuses_info is not None:
            self._refuse(hub.faults.refuses_info)
        elif "/tree/" in path:
            self._json([_entry(name, content) for name, content in hub.files.items()])
        elif re.search(rf"/revision/(?!main|v1|{COMMIT})", path):
            self._refuse((404, "RevisionNotFound"))
        else:
            siblings = [{"rfilename": name} for name in hub.files]
            self._json({"id": hub.repository, "sha": hub.faults.commit, "siblings": siblings})

    def _file(self, name, *, with_body):
        if self.hub.faults.refuses is not None:
            self._refuse(self.hub.faults.refuses)
            return
        content = self.hub.files[name]
        large = name.endswith(".safetensors")
        if with_body and not large:
            self._content(content)
            return
        self.send_response(302 if large else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        etag = self.hub.faults.etag or _etag(name, content)
        self.send_header("ETag", f'"{etag}"')
        if large:  # as the Hub: the content is on another host
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header(
                "Location", self.hub.url.replace("127.0.0.1", "localhost") + f"/content/{name}"
            )
        self.send_header("Content-Length", "0" if large else str(len(content)))
        self.end_headers()

    def _content(self, content):
        faults, begin = self.hub.faults, 0
        if not faults.ignores_ranges and (range_ := self.headers.get("Range")):
            begin = int(range_.removeprefix("bytes=").rstrip("-"))
            if begin >= len(content):
                self._refuse((416, ""))
                return
        end = min(len(content), begin + faults.breaks.pop(0)) if faults.breaks else len(content)
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        for start in range(begin, end, _PIECE):
            piece = content[start : min(end, start + _PIECE)]
            self.wfile.write(piece)
            if faults.bytes_per_second:
                time.sleep(len(piece) / faults.bytes_per_second)
        self.close_connection = end < len(content)

    def _json(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, reason):
        status, code = reason
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entry(name, content):
    entry = {"type": "file", "path": name, "size": len(content), "oid": _etag("", content)}
    if name.endswith(".safetensors"):
        sha256 = _etag(name, content)
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def _etag(name, content):
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324 - git's name of a file
