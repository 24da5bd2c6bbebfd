"""The commands of tests.reliability for a short time; `docs/reliability.md` has the long runs."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest
import uvloop

from tests.e2e.conftest import CLIENT
from tests.reliability.chaos import is_idle
from tests.reliability.exchange import encode_post
from tests.reliability.fast_client import ClientRun
from tests.reliability.managed_service import ManagedService
from tests.reliability.processes import Role, process_tree, reachable_sockets
from tests.waiting import until

pytestmark = pytest.mark.e2e


CHOICE = {"prompt": "x", "max_tokens": 8, "structured_outputs": {"choice": ["yes"]}}


def assert_only_http_is_reachable(root, port):
    pids = [process.pid for process in process_tree(root)]
    assert len(pids) > 1
    assert reachable_sockets(pids) == {f"tcp {port}"}


def test_only_the_http_port_can_be_reached_also_with_a_compiler_of_grammars(bundled_service):
    reply = CLIENT.post(f"{bundled_service.url}/v1/completions", json=CHOICE, timeout=60)
    assert reply.status_code == 200

    assert_only_http_is_reachable(bundled_service.process.pid, bundled_service.port)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "processes"),
    [(["--tensor-parallel=2", "--dtype=float32"], 3), (["--data-parallel=2", "--frontends=2"], 5)],
)
def test_only_the_http_port_can_be_reached_with_several_processes(
    start_service, options, processes
):
    service = start_service("--device=cpu", *options)
    service.wait_until_healthy(120)
    reply = CLIENT.post(f"{service.url}/v1/completions", json=CHOICE, timeout=60)
    assert reply.status_code == 200

    assert len(process_tree(service.process.pid)) > processes
    assert_only_http_is_reachable(service.process.pid, service.port)


def test_the_probe_finds_every_kind_of_socket_that_can_be_reached(tmp_path):
    path, abstract = str(tmp_path / "s"), f"\0probe-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, path),
            (socket.AF_UNIX, socket.SOCK_DGRAM, abstract),
        ):
            before = reachable_sockets([os.getpid()])
            it = stack.enter_context(socket.socket(family, kind))
            it.bind(address)
            if kind == socket.SOCK_STREAM:
                it.listen()
            (found,) = reachable_sockets([os.getpid()]) - before
            name = it.getsockname()
            expected = name[1] if family == socket.AF_INET else name
            if isinstance(expected, bytes):
                expected = "@" + expected[1:].decode()
            assert found.split()[1] == str(expected)
        pair = socket.socketpair()
        stack.enter_context(pair[0])
        stack.enter_context(pair[1])
        assert reachable_sockets([os.getpid()]) == before | {found}


@pytest.fixture
def fake_service(tmp_path):
    service = ManagedService(
        ["--frontends=2", "--device=cpu"],
        program=("-m", "tests.reliability.counted_service", "{folder}/counts", "fake"),
        folder=tmp_path,
    )
    service.start()
    service.wait_until_ready()
    yield service
    service.close()


@pytest.mark.slow
def test_only_the_http_port_listens_with_several_front_ends(fake_service):
    assert len(fake_service.processes(Role.FRONT_END)) == 2
    pids = [process.pid for process in process_tree(fake_service.process.pid)]
    # The second one is the test's, which counts objects.
    counts = fake_service.folder / "counts"
    assert reachable_sockets(pids) == {f"tcp {fake_service.port}", f"unix {counts}"}


@pytest.mark.slow
def test_1000_disconnects_at_random_moments_leave_all_blocks_free(start_service):
    service = start_service("--device=cpu", "--max-num-seqs=16", "--max-concurrent-requests=64")
    service.wait_until_healthy()
    parameters = {"max_new_tokens": 300, "ignore_eos": True}
    texts = ["x = 1\n" * n for n in (1, 20, 200)]  # the last one has several chunks of prefill
    requests = [
        encode_post(path, {"inputs": text, "parameters": parameters})
        for path in ("/generate", "/generate_stream")
        for text in texts
    ]
    run = ClientRun(service.port, requests, 32, 1000, disconnects=1.0, leave_seconds=1.0)

    uvloop.run(asyncio.wait_for(run.run(), 100))

    assert run.done == 1000
    assert set(run.statuses) <= {-1, 200}
    assert run.statuses[-1] > 700
    managed = ManagedServiceMetrics(service)
    until(lambda: is_idle(managed()))
    assert service.metric("tessera_kv_blocks_free") == service.metric("tessera_kv_blocks")


class ManagedServiceMetrics:
    """Reads the metrics that `is_idle` needs."""

    NAMES = (
        "tessera_requests_in_flight", "tessera_requests_running", "tessera_requests_waiting", "tessera_kv_blocks_free",
        "tessera_kv_blocks",
    )  # fmt: skip

    def __init__(self, service):
        self._service = service

    def __call__(self):
        return {name: self._service.metric(name) for name in self.NAMES}


def run(module, *arguments, timeout):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, timeout=timeout, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_chaos_gives_every_client_a_status(tmp_path):
    events = ["kill-engine", "kill-front-end", "pause-engine", "pause-front-end", "kill-parent"]
    events += ["malformed-traffic", "slow-clients", "full-disk"]
    ended = run(
        "tests.reliability.chaos", "--minutes=1", f"--out={tmp_path / 'chaos.json'}", "--events", *events, timeout=380
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    summary, *rows = json.loads((tmp_path / "chaos.json").read_text())["rows"]
    assert summary["passed"]
    assert summary["violations"] == 0
    assert len(rows) >= 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_does_not_grow_over_60000_requests_to_a_fake_engine(tmp_path):
    ended = run(
        "tests.reliability.soak", "--engine=fake", "--requests=60000", f"--out={tmp_path / 'soak.json'}", timeout=280
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    report = json.loads((tmp_path / "soak.json").read_text())
    assert {row["quantity"] for row in report["rows"]} == {
        "memory",
        "descriptors",
        "tasks",
        "objects",
    }
    assert report["summary"]["requests"] == 60_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("front_ends", [1, 2])
def test_no_request_of_a_client_is_refused_while_another_one_floods_the_service(
    tmp_path, front_ends
):
    run(
        "tests.reliability.two_tenants", "--clients=50", "--rounds=1", "--flood-seconds=5",
        f"--front-ends={front_ends}", f"--out={tmp_path / 'tenants.json'}", timeout=580,
    )  # fmt: skip

    rows = json.loads((tmp_path / "tenants.json").read_text())["rows"]
    assert [row["clients"] for row in rows] == ["by key"] * 2 + ["by address"] * 2
    # How long they take depends on what else the machine does, so only the command judges that.
    assert [row["statuses"] for row in rows] == [{"200": 12}] * 4
    assert all(any(kind.get("429") for kind in row["flood"].values()) for row in rows)
