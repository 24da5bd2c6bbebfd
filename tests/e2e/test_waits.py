"""No wait of the service is without an end: stopped processes, logs that nobody reads, and the signals that end it."""

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import CLIENT
from tests.reliability.processes import Role, process_tree

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ENDLESS = {"max_new_tokens": 2000, "ignore_eos": True}
DIGITS = {"grammar": {"type": "regex", "value": "[0-9]+"}}
REQUESTS = {
    "plain": ("/generate", {"inputs": "x", "parameters": ENDLESS}),
    "grammar": ("/generate", {"inputs": "x", "parameters": ENDLESS | DIGITS}),
    "stream": ("/generate_stream", {"inputs": "x", "parameters": ENDLESS}),
    "long": (
        "/generate",
        {"inputs": "x = 1\n" * 2000, "parameters": {"max_new_tokens": 9, "truncate": 900}},
    ),
    "completion": ("/v1/completions", {"prompt": "x", "max_tokens": 2000}),
}


@pytest.fixture
def launch():
    """Start services whose standard streams the test chooses, each in a process group of its own."""
    processes = []

    def start(*arguments, **options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "server.cli.main", "serve", f"--port={port}"]
        process = subprocess.Popen(
            [*command, "--device=cpu", *arguments], start_new_session=True, **options
        )
        processes.append(process)
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, url)
        return process, url

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in filter(None, (process.stderr, process.stdout)):
            stream.close()


def wait_until_healthy(process, url):
    while True:
        with contextlib.suppress(httpx.TransportError):
            if CLIENT.get(f"{url}/health").status_code == 200:
                return
        assert process.poll() is None
        time.sleep(0.05)


def metric(url, name):
    (line,) = (it for it in CLIENT.get(f"{url}/metrics").text.splitlines() if it.startswith(name))
    return float(line.rsplit(" ", 1)[1])


def assert_ended(pids):
    ending = time.monotonic() + 60
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < ending, left
        time.sleep(0.05)


def post(url, path, body, timeout_ms=None):
    """Return the status of an answer, or of the error in its stream."""
    if timeout_ms is not None:
        parameters = body["parameters"] | {"timeout_ms": timeout_ms} if "parameters" in body else {}
        body = body | ({"parameters": parameters} if parameters else {"timeout_ms": timeout_ms})
    response = httpx.post(f"{url}{path}", json=body, timeout=100)
    return 504 if '"error_type":"timeout"' in response.text else response.status_code


@pytest.mark.parametrize(
    ("front_ends", "role"),
    [
        (1, Role.ENGINE),
        (1, Role.GRAMMAR_WORKER),
        (2, Role.FRONT_END),
    ],
)
def test_a_stopped_process_keeps_no_request_and_no_service_alive(start_service, front_ends, role):
    service = start_service(f"--frontends={front_ends}", "--drain-timeout=60", "--device=cpu")
    service.wait_until_healthy()
    assert post(service.url, *REQUESTS["grammar"], timeout_ms=60_000) == 200
    processes = process_tree(service.process.pid)
    stopped = [it.pid for it in processes if it.role is role]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        if role is not Role.FRONT_END:
            waiting = [pool.submit(post, service.url, *it, 1000) for it in REQUESTS.values()]
            statuses = {it.result(60) for it in waiting}
            assert statuses <= ({504} if role is Role.ENGINE else {200, 504})
        left = [pool.submit(post, service.url, *it) for it in REQUESTS.values()]
        time.sleep(1)

        service.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        service.process.send_signal(signal.SIGTERM)

        assert service.process.wait(60) == 0, service.log()
        for request in left:
            assert request.exception(60) is None or role is Role.FRONT_END
    assert_ended([it.pid for it in processes])
    assert "still runs" not in service.log()  # it ended by itself within the last bound
    assert "Traceback" not in service.log()


def test_children_that_are_stopped_end_with_their_killed_parent(start_service):
    service = start_service("--frontends=2", "--device=cpu")
    service.wait_until_healthy()
    assert post(service.url, *REQUESTS["grammar"], timeout_ms=60_000) == 200
    pids = [it.pid for it in process_tree(service.process.pid)]
    for pid in pids[1:]:
        os.kill(pid, signal.SIGSTOP)

    service.process.kill()
    service.process.wait()

    assert_ended(pids)


@pytest.mark.parametrize(("number", "front_ends"), [(signal.SIGHUP, 1), (signal.SIGQUIT, 2)])
def test_a_signal_to_the_group_lets_requests_end(launch, number, front_ends):
    process, url = launch(f"--frontends={front_ends}", stderr=subprocess.DEVNULL)
    pids = [it.pid for it in process_tree(process.pid)]
    with ThreadPoolExecutor() as pool:
        request = pool.submit(post, url, *REQUESTS["plain"])
        while not metric(url, "tessera_requests_in_flight"):
            time.sleep(0.01)
        os.killpg(process.pid, number)

        assert request.result(60) == 200
    assert process.wait(60) == 0
    assert_ended(pids)


def test_other_signals_and_an_ignored_hangup_end_nothing(launch):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process, url = launch("--frontends=2", stderr=subprocess.PIPE, preexec_fn=ignore)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE):
        os.killpg(process.pid, number)
    process.send_signal(signal.SIGUSR2)

    assert post(url, *REQUESTS["plain"]) == 200
    process.terminate()
    assert process.wait(60) == 0
    assert b"most recent call first" in process.stderr.read()


@pytest.mark.parametrize(("front_ends", "log_format"), [(1, "text"), (2, "json")])
def test_a_log_that_nobody_reads_delays_no_request_and_no_end(launch, front_ends, log_format):
    reading, writing = os.pipe()
    fcntl.fcntl(writing, 1031, 4096)  # F_SETPIPE_SZ
    process, url = launch(f"--frontends={front_ends}", f"--log-format={log_format}", stderr=writing)
    os.close(writing)
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: CLIENT.get(f"{url}/info").status_code, range(400)))
    assert set(statuses) == {200}
    process.send_signal(signal.SIGUSR1)  # a dump of stacks does not wait either
    assert post(url, *REQUESTS["grammar"], timeout_ms=30_000) == 200

    process.terminate()
    assert process.wait(60) == 0
    os.close(reading)


def test_dropped_lines_are_counted_and_reported_when_the_log_is_read_again(launch):
    process, url = launch(stderr=subprocess.PIPE)
    host, port = url.removeprefix("http://").split(":")
    requests = 8 * f"GET /{'x' * 190} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    with socket.create_connection((host, port)) as connection:
        while not (dropped := metric(url, "tessera_log_lines_dropped_total")):
            for _ in range(100):
                connection.sendall(requests)
                answers = b""
                while answers.count(b"HTTP/1.1 404") < 8:
                    answers += connection.recv(1 << 16)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr))
    reader.start()
    process.terminate()
    assert process.wait(60) == 0
    reader.join()

    (notice,) = (line for line in lines if b"lines of the log were dropped here" in line)
    assert float(notice.split(b" lines of")[0].rsplit(b" ", 1)[1]) >= dropped


def close_all():
    for descriptor in range(3):
        os.close(descriptor)


_LARGEST_FILE = 64 << 20


def forbid_files():
    """Leave room for 20 kB behind the end of the log, but for as much as it needs in memory with a size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))


def tcp_inodes():
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {fields[9] for fields in lines}


@pytest.mark.parametrize("kind", ["closed", "limited file", "no terminal"])
def test_a_standard_error_that_takes_nothing_makes_nothing_fail(launch, kind, tmp_path):
    ends, options = [], {}
    if kind == "closed":
        options["preexec_fn"] = close_all
    elif kind == "limited file":
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.lseek(log, _LARGEST_FILE - 20_000, os.SEEK_SET)
        options |= {"preexec_fn": forbid_files, "stderr": log}
    else:
        ends = list(os.openpty())
        options["stderr"] = ends.pop()
    process, url = launch("--frontends=2", **options)
    for descriptor in (*ends, options.get("stderr", -1)):
        with contextlib.suppress(OSError):
            os.close(descriptor)

    assert {CLIENT.get(f"{url}/info").status_code for _ in range(200)} == {200}
    assert post(url, *REQUESTS["grammar"], timeout_ms=30_000) == 200
    assert (metric(url, "tessera_log_lines_dropped_total") > 0) == (kind != "closed")
    # Helper processes have links without names there, but none a connection of a client.
    connections = {f"socket:[{inode}]" for inode in tcp_inodes()}
    assert connections
    for pid in [it.pid for it in process_tree(process.pid)]:
        for descriptor in range(3):
            assert str(Path(f"/proc/{pid}/fd/{descriptor}").readlink()) not in connections
    process.terminate()
    assert process.wait(60) == 0
