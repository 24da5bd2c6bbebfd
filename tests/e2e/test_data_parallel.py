"""`--data-parallel`: several engine processes behind one port, with the bundled model and with fake ones."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_frontends import FrontEndService, body, events
from tests.waiting import GIVE_UP, until

pytestmark = pytest.mark.e2e

PROMPTS = ["def add(a, b):", "import os\n", "class Point:\n    def", "for i in range("]


def answers(url):
    """Return the greedy and the sampled replies to all prompts."""
    parameters = [
        {"max_new_tokens": 16, "details": True},
        {"max_new_tokens": 16, "do_sample": True, "seed": 5, "temperature": 0.8, "details": True},
    ]
    requests = [{"inputs": p, "parameters": it} for p in PROMPTS for it in parameters]

    def ask(request):
        reply = httpx.post(f"{url}/generate", json=request, timeout=GIVE_UP)
        assert reply.status_code == 200, reply.text
        return reply.json()["generated_text"]

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


@pytest.mark.parametrize("engines", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_engines_give_the_replies_of_one(bundled_service, start_service, engines):
    service = start_service("--device=cpu", f"--data-parallel={engines}")
    service.wait_until_healthy()

    assert answers(service.url) == answers(bundled_service.url)
    info, alone = (httpx.get(f"{s.url}/info").json() for s in (service, bundled_service))
    assert (info["num_engines"], info["num_engines_ready"]) == (engines, engines)
    assert info["max_concurrent_requests"] == engines * alone["max_concurrent_requests"]
    assert httpx.get(f"{service.url}/plan").json()["num_engines"] == engines
    blocks = service.metric("tessera_kv_blocks")
    assert info["num_blocks"] == blocks == service.metric("tessera_kv_blocks_free")


def per_engine(service, name, client=httpx):
    """Return the values of a metric by the number of the engine."""
    url = "/metrics" if client is not httpx else f"{service.url}/metrics"
    lines = client.get(url).text.splitlines()
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{engine=")]


@pytest.fixture(scope="module", params=[1, 2], ids=["one front end", "two front ends"])
def service(request):
    service = FrontEndService(
        "slow", "--data-parallel=2", f"--frontends={request.param}", "--device=cpu"
    )
    service.wait_until_healthy()
    yield service
    service.stop()


@pytest.fixture
def clients(service):
    """Clients on both front ends if there are two."""
    with contextlib.ExitStack() as stack:
        if service.children("server.cli.front_end.process"):
            found = list(service.one_client_each().values())
        else:
            found = [httpx.Client(base_url=service.url, timeout=GIVE_UP) for _ in range(2)]
        for client in found:
            stack.callback(client.close)
        yield found


@pytest.mark.slow
def test_requests_with_a_prefix_go_to_the_engine_that_has_it(service, clients):
    names = [
        f"tessera_engine_process_{name}_tokens_total"
        for name in ("generation", "prefix_cache_query", "prefix_cache_hit")
    ]
    before = [per_engine(service, name) for name in names]
    prompts = [f"{i} " * 100 for i in range(6)]
    for round_ in range(4):
        for i, prompt in enumerate(prompts):
            reply = clients[(i + round_) % 2].post("/generate", json=body(2, prompt))
            assert reply.status_code == 200

    def added():
        after = [per_engine(service, name) for name in names]
        return [
            [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        ]

    until(lambda: sum(added()[0]) == 24 * 2)
    _, queries, hits = added()
    assert min(queries) > 0.3 * sum(queries)
    # All but the first request of each prompt, less the part of a block at a prompt's end.
    assert 0.9 * 18 / 24 < sum(hits) / sum(queries) < 18 / 24


def test_a_killed_engine_ends_only_its_streams_while_requests_keep_being_served(service, clients):
    until(lambda: per_engine(service, "tessera_engine_process_up") == [1, 1])
    restarts = service.metric("tessera_engine_restarts_total")
    stop, statuses = threading.Event(), []

    def ask():
        with httpx.Client(base_url=service.url, timeout=GIVE_UP) as client:
            while not stop.is_set():
                statuses.append(client.post("/generate", json=body(2)).status_code)
                statuses.append(client.get("/health").status_code)

    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(events, client, 60, str(i)) for i in range(4) for client in clients]
        until(lambda: per_engine(service, "tessera_engine_process_requests_running") == [4, 4])
        asking = pool.submit(ask)
        os.kill(service.children("fake_engine")[1], signal.SIGKILL)
        replies = [stream.result() for stream in streams]
        until(lambda: per_engine(service, "tessera_engine_process_up") == [1, 1])
        time.sleep(0.2)
        stop.set()
        asking.result()

    ended = [reply for reply in replies if "error_type" in reply[-1]]
    assert len(ended) == 4
    assert {reply[-1]["error_type"] for reply in ended} == {"generation"}
    assert all(len(reply) == 60 for reply in replies if reply not in ended)
    assert set(statuses) == {200}
    assert service.metric("tessera_engine_restarts_total") == restarts + 1
    for client in clients:
        until(
            lambda client=client: per_engine(service, "tessera_engine_process_up", client) == [1, 1]
        )


def test_a_disconnect_frees_the_request_of_either_engine(service, clients):
    with contextlib.ExitStack() as stack:
        for i in range(4):
            stream = clients[i % 2].stream("POST", "/generate_stream", json=body(400, str(i)))
            lines = stack.enter_context(stream).iter_lines()
            next(lines)
            stack.callback(lines.close)
        until(lambda: per_engine(service, "tessera_engine_process_requests_running") == [2, 2])
    until(lambda: per_engine(service, "tessera_engine_process_requests_running") == [0, 0])
    until(lambda: service.metric("tessera_kv_blocks_free") == service.metric("tessera_kv_blocks"))


@pytest.mark.slow
def test_a_signal_lets_the_requests_of_all_engines_finish_and_ends_all_processes():
    service = FrontEndService("slow", "--data-parallel=2", "--device=cpu")
    service.wait_until_healthy()
    children = service.children("server.cli.front_end.process") + service.children("fake_engine")
    assert len(children) == 4
    with (
        httpx.Client(base_url=service.url, timeout=GIVE_UP) as client,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        streams = [pool.submit(events, client, 40, str(i)) for i in range(4)]
        until(lambda: service.metric("tessera_requests_running") == 4)
        log = service.stop()
        assert [len(stream.result()) for stream in streams] == [40] * 4

    assert service.process.returncode == 0
    assert "Traceback" not in log
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data-parallel=0"], "must be a whole number from 1 to 64, or auto"),
        (["--data-parallel=2", "--device=cpu", "--kv-cache-gib=1000000"], "GiB"),
    ],
)
def test_a_refused_setting_is_named(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "serve", "--port=0", *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
