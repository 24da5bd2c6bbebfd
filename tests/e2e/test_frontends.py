"""`--frontends 2`: two processes answer on one port; one engine process computes a fake model."""

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import httpx
import pytest

from tests.e2e.logged_process import start_logged
from tests.waiting import GIVE_UP, until

pytestmark = pytest.mark.e2e

SCRIPT = """
import sys
from server.cli.serve import serve
from server.cli.command_settings import read_settings
command = (sys.executable, "-m", "tests.engine.link.fake_engine", sys.argv[1])
serve(read_settings(sys.argv[2:]), command)
"""


class FrontEndService:
    """A service of two front ends, and clients whose connections reach a known one of them."""

    def __init__(self, behaviour="slow", *arguments):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-c", SCRIPT, behaviour, "--frontends=2", f"--port={self.port}"]
        self.process, self._log = start_logged([*command, *arguments])
        weakref.finalize(self, self._log.unlink)
        self._clients = []

    def wait_until_healthy(self, seconds=90.0):
        until(lambda: self.health() == 200)

    def health(self):
        assert self.process.poll() is None, self.log()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health").status_code
        return None

    def children(self, module):
        files = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        return sorted(p for p in pids if module in Path(f"/proc/{p}/cmdline").read_text())

    def one_client_each(self):
        """Return a client for each front end, by its process id.

        A client keeps its connection and so its front end, but a request beside another one of the same client has a
        connection of its own, to either front end. Clients are closed with the service at the latest.
        """
        clients = {}
        while len(clients) < 2:
            client = httpx.Client(base_url=self.url, timeout=GIVE_UP)
            self._clients.append(client)
            assert client.get("/health").status_code == 200
            port = client._transport._pool.connections[
                0
            ]._connection._network_stream.get_extra_info("client_addr")[1]
            owner = self.owner(port)
            clients.setdefault(owner, client)
            if clients[owner] is not client:
                client.close()
        return clients

    def owner(self, client_port):
        """Return the process id of the front end that accepted the connection from a port."""
        theirs = f":{self.port:04X} 0100007F:{client_port:04X} 01"
        (inode,) = {
            line.split()[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()
            if theirs in line
        }
        for pid in self.children("server.cli.front_end.process"):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(file.readlink()) == f"socket:[{inode}]":
                        return pid
        raise AssertionError(f"no front end has the connection from port {client_port}")

    def metric(self, name, client=httpx):
        url = "/metrics" if client is not httpx else f"{self.url}/metrics"
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in client.get(url).text.splitlines()
            if line.split("{")[0].split(" ")[0] == name
        ]
        return sum(found)

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=GIVE_UP)
            return self.log()
        finally:
            self.process.kill()
            for client in self._clients:
                client.close()

    def log(self):
        """Return what the service has written to standard error so far."""
        return self._log.read_text()


def body(tokens, prompt="x"):
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}}


def events(client, tokens, prompt="x"):
    found = []
    with client.stream("POST", "/generate_stream", json=body(tokens, prompt)) as reply:
        assert reply.status_code == 200
        found.extend(
            json.loads(line.removeprefix("data:"))
            for line in reply.iter_lines()
            if line.startswith("data:")
        )
    return found


@pytest.fixture(scope="module")
def service():
    service = FrontEndService()
    service.wait_until_healthy()
    yield service
    service.stop()


@pytest.fixture
def clients(service):
    return list(service.one_client_each().values())


@pytest.mark.slow
def test_both_front_ends_answer_with_one_engine_without_mixing_requests(service, clients):
    assert len(service.children("fake_engine")) == 1
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(events, clients, (20, 20), ("x", "y")))
    alone = [events(client, 20, p) for client, p in zip(clients[::-1], ("x", "y"), strict=True)]

    for together, by_itself in zip(answers, alone, strict=True):
        assert [e["token"]["id"] for e in together] == [e["token"]["id"] for e in by_itself]
    assert answers[0] != answers[1]


@pytest.mark.slow
def test_either_front_end_reports_the_metrics_of_both(service, clients):
    names = (
        "tessera_requests_total",
        "tessera_time_to_first_token_seconds_count",
        "tessera_inter_token_latency_seconds_count",
        "tessera_generation_tokens_total",
    )
    before = [service.metric(name) for name in names]
    for client, requests in zip(clients, (1, 3), strict=True):
        for _ in range(requests):
            assert client.post("/generate", json=body(5)).status_code == 200

    for client in clients:
        # A request is counted after its last byte was sent.
        until(
            lambda client=client: (
                [
                    service.metric(name, client) - was
                    for name, was in zip(names, before, strict=True)
                ]
                == [4, 4, 16, 20]
            )
        )
        assert service.metric("tessera_requests_in_flight", client) == 0
        assert service.metric("process_resident_memory_bytes", client) > 100e6


@pytest.mark.slow
def test_an_abort_on_one_front_end_does_not_affect_the_other(service, clients):
    leaving, staying = clients
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        # Long enough that the service is seen with this request alone, also on a busy machine.
        other = pool.submit(events, staying, 150)
        with leaving.stream("POST", "/generate_stream", json=body(400)) as reply:
            lines = reply.iter_lines()  # keep a reference: deleting it would close the connection
            next(lines)
            until(lambda: service.metric("tessera_requests_running", staying) == 2)
            assert service.metric("tessera_requests_in_flight") == 2
        until(lambda: service.metric("tessera_requests_running") == 1)

        assert len(other.result()) == 150
    until(lambda: service.metric("tessera_kv_blocks_free") == service.metric("tessera_kv_blocks"))
    assert service.metric("tessera_requests_in_flight") == 0


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_requests_on_either_front_end_can_be_aborted_through_the_other(service, clients, route):
    def run(client, request_id):
        reply = client.post(route, json=body(400), headers={"X-Request-Id": request_id})
        return reply.text.rstrip().split("data:")[-1]

    asking, other = (httpx.Client(base_url=service.url) for _ in range(2))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first, second, third = (
            pool.submit(run, client, request_id)
            for client, request_id in ((clients[0], "a"), (clients[1], "b"), (other, "c"))
        )
        until(lambda: service.metric("tessera_requests_running") == 3)
        reply = asking.post("/abort", json={"request_ids": ["a", "b", "nobody"]}).json()
        assert reply == {"aborted": ["a", "b"], "not_found": ["nobody"]}
        ends = [json.loads(task.result()) for task in (first, second)]
        assert [end["error_type"] for end in ends] == ["aborted", "aborted"]
        assert not third.done()
        # A front end removes a request from its table a moment after the client has received the end of the reply.
        until(lambda: service.metric("tessera_requests_in_flight") == 1)

        assert asking.post("/abort", json={"all": True}).json()["aborted"] == ["c"]
        assert json.loads(third.result())["error_type"] == "aborted"
    until(lambda: service.metric("tessera_requests_running") == 0)
    until(lambda: service.metric("tessera_kv_blocks_free") == service.metric("tessera_kv_blocks"))
    assert asking.post("/abort", json={"request_id": "a"}).json()["not_found"] == ["a"]
    asking.close()
    other.close()


@pytest.mark.slow
def test_both_front_ends_log_requests_check_keys_and_pass_options_on():
    service = FrontEndService(
        "slow", "--api-key=sesame", "--log-format=json", "--cors-allow-origin=https://a.example"
    )
    try:
        service.wait_until_healthy()
        for i, client in enumerate(service.one_client_each().values()):
            assert client.post("/generate", json=body(3)).status_code == 401
            request = body(200) | {"parameters": {"max_new_tokens": 200, "timeout_ms": 400}}
            headers = {
                "X-API-Key": "sesame",
                "X-Request-Id": f"job {i}",
                "Origin": "https://a.example",
            }
            reply = client.post("/generate", json=request, headers=headers)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == "https://a.example"
            client.close()
    finally:
        log = service.stop()
    entries = [json.loads(line) for line in log.splitlines()]
    lines = [entry for entry in entries if entry["logger"] == "tessera.access"]
    answered = {line["request_id"]: line for line in lines if line["status"] == 200}
    assert set(answered) == {"job 0", "job 1"}
    for line in answered.values():
        assert line["outcome"] == "timeout"
        assert 1 <= line["output_tokens"] <= 9
    assert [line["status"] for line in lines].count(401) == 2
    assert "sesame" not in log


def test_a_killed_engine_ends_the_requests_of_both_and_restarts(service, clients):
    tokens = service.metric("tessera_generation_tokens_total")
    restarts = service.metric("tessera_engine_restarts_total")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(events, client, 400) for client in clients]
        until(lambda: service.metric("tessera_requests_running") == 2)
        os.kill(service.children("fake_engine")[0], signal.SIGKILL)
        ends = [stream.result()[-1] for stream in streams]

    assert {end["error_type"] for end in ends} == {"generation"}
    for client in clients:
        until(lambda client=client: client.get("/health").status_code == 200)
        assert len(events(client, 3)) == 3
        assert service.metric("tessera_engine_restarts_total", client) == restarts + 1

    def counted(client):
        return service.metric("tessera_generation_tokens_total", client)

    until(lambda: counted(clients[0]) == counted(clients[1]))
    assert counted(clients[0]) > tokens + 6


def test_a_killed_front_end_frees_its_requests_and_restarts(service, clients):
    requests = service.metric("tessera_requests_total")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        owners = service.one_client_each()
        (victim, doomed), (_, other) = owners.items()
        stream = pool.submit(events, doomed, 400)
        until(lambda: service.metric("tessera_requests_running", other) == 1)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            stream.result()

    until(lambda: service.metric("tessera_requests_running", other) == 0)
    until(lambda: len(set(service.children("server.cli.front_end.process")) - {victim}) == 2)
    for client in service.one_client_each().values():
        assert len(events(client, 3)) == 3
        client.close()
    until(lambda: service.metric("tessera_requests_in_flight", other) == 0)
    assert service.metric("tessera_requests_total", other) == requests + 2
    doomed.close()
    other.close()


@pytest.mark.slow
def test_either_front_end_refuses_requests_beyond_the_services_limit():
    service = FrontEndService("slow", "--max-concurrent-requests=2")
    try:
        service.wait_until_healthy()
        clients = list(service.one_client_each().values())
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            streams = [pool.submit(events, client, 60) for client in clients]
            until(lambda: service.metric("tessera_requests_in_flight") == 2)
            assert httpx.post(f"{service.url}/generate", json=body(1)).status_code == 429
            assert [len(stream.result()) for stream in streams] == [60, 60]
        for client in clients:
            client.close()
    finally:
        service.stop()


@pytest.mark.slow
def test_a_signal_lets_requests_finish_and_ends_all_processes():
    service = FrontEndService("slow")
    service.wait_until_healthy()
    children = service.children("server.cli.front_end.process") + service.children("fake_engine")
    clients = list(service.one_client_each().values())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(events, client, 40) for client in clients]
        until(lambda: service.metric("tessera_requests_running") == 2)
        log = service.stop()

        assert [len(stream.result()) for stream in streams] == [40, 40]
    for client in clients:
        client.close()
    assert service.process.returncode == 0
    assert "Traceback" not in log
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def test_all_processes_end_when_the_service_is_killed():
    service = FrontEndService("slow")
    service.wait_until_healthy()
    children = service.children("server.cli.front_end.process") + service.children("fake_engine")

    service.process.kill()
    service.process.wait()

    assert len(children) == 3
    until(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()])


@pytest.mark.slow
def test_an_engine_that_cannot_start_ends_the_service():
    service = FrontEndService("fail")

    service.process.wait(timeout=GIVE_UP)

    assert service.process.returncode == 1
    assert "shard 2 is truncated" in service.log()


def test_a_port_in_use_is_refused_even_if_it_could_be_shared():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "server.cli.main", "serve", "--frontends=2", f"--port={port}"],
            capture_output=True, text=True, timeout=GIVE_UP, check=False,
        )  # fmt: skip

    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
