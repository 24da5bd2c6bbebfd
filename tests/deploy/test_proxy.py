"""The configuration for nginx, in a real nginx in front of scripted services."""

import contextlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from server.cli.settings import Settings
from tests.deploy.nginx import CONFIG, needs_nginx, run_nginx

SECONDS = 20


class Services:
    """Two HTTP servers that count requests; `script` answers the handler of request number n, counted from 0."""

    def __init__(self):
        self.script = lambda handler, n: answer(handler, 200)
        self.bodies = []
        self.reached = []
        self._lock = threading.Lock()
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler()) for _ in range(2)]
        self.ports = [server.server_address[1] for server in self.servers]
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

    def _handler(self):
        services = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                with services._lock:
                    services.bodies.append(body)
                    services.reached.append(self.server.server_address[1])
                    number = len(services.bodies) - 1
                services.script(self, number)

            def do_GET(self):
                services.script(self, 0)

            def log_message(self, *_):
                pass

        return Handler

    def close(self):
        for server in self.servers:
            server.shutdown()
            server.server_close()


def answer(handler, status, body=b"ok"):
    handler.send_response(status)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture
def services():
    servers = Services()
    yield servers
    servers.close()


@pytest.fixture
def proxy(services, tmp_path):
    with (
        run_nginx(tmp_path, services.ports) as url,
        httpx.Client(base_url=url, verify=False, timeout=SECONDS) as client,  # noqa: S501 - its own
    ):
        yield client


@needs_nginx
def test_tokens_are_sent_on_when_they_arrive(services, proxy):
    received = threading.Event()

    def stream(handler, _):
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"5\r\nfirst\r\n")
        arrived = received.wait(SECONDS / 2)
        handler.wfile.write(b"4\r\nlast\r\n0\r\n\r\n" if arrived else b"4\r\nlate\r\n0\r\n\r\n")

    services.script = stream
    with proxy.stream("POST", "/generate_stream", content=b"{}") as response:
        parts = response.iter_raw()
        assert next(parts) == b"first"
        received.set()
        assert b"".join(parts) == b"last"


@needs_nginx
def test_a_request_that_gets_503_is_sent_to_the_other_service(services, proxy):
    services.script = lambda handler, n: answer(handler, 503 if n == 0 else 200)

    response = proxy.post("/generate", content=b"x" * 300_000)

    assert response.status_code == 200
    assert services.bodies == [b"x" * 300_000] * 2
    assert len(set(services.reached)) == 2


@needs_nginx
def test_a_request_whose_connection_breaks_is_sent_to_the_other_service(services, proxy):
    def break_first(handler, n):
        if n:
            answer(handler, 200)
        else:
            handler.close_connection = True

    services.script = break_first

    assert proxy.post("/generate", content=b"{}").status_code == 200
    assert len(set(services.reached)) == 2


@needs_nginx
@pytest.mark.parametrize("status", [400, 422, 424, 429, 500])
def test_other_errors_reach_the_client_at_once(services, proxy, status):
    services.script = lambda handler, _: answer(handler, status)

    assert proxy.post("/generate", content=b"{}").status_code == status
    assert len(services.bodies) == 1


@needs_nginx
def test_a_stream_that_breaks_is_not_repeated(services, proxy):
    def begin(handler, _):
        handler.send_response(200)
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"5\r\nfirst\r\n")
        handler.close_connection = True

    services.script = begin
    with contextlib.suppress(httpx.RemoteProtocolError):
        proxy.post("/generate_stream", content=b"{}")

    assert len(services.bodies) == 1


@needs_nginx
def test_the_proxy_is_healthy_while_one_service_is_ready(services, proxy):
    ready = services.ports[1]
    services.script = lambda handler, _: answer(
        handler, 200 if handler.server.server_address[1] == ready else 503
    )

    assert [proxy.get("/health").status_code for _ in range(8)] == [200] * 8
    services.script = lambda handler, _: answer(handler, 503)
    assert proxy.get("/health").status_code in (502, 503)


@needs_nginx
def test_metrics_are_not_published(services, proxy):
    assert proxy.get("/metrics").status_code == 404


def test_the_limits_of_the_proxy_fit_those_of_the_service():
    text = CONFIG.read_text()
    upstream, _, server = text.partition("\nserver {")
    megabytes = int(re.search(r"client_max_body_size (\d+)m;", server)[1])
    seconds = int(re.search(r"keepalive_timeout (\d+)s;", upstream)[1])

    assert megabytes * 2**20 >= Settings.model_fields["max_body_bytes"].default
    assert seconds < Settings.model_fields["keep_alive_timeout"].default
