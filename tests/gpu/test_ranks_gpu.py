"""Two GPUs: sums have the same bits on both, one model over both answers as on one, ring attention equals one GPU's.

A rank or an engine that is killed is replaced; the streams of another engine go on.
"""

import concurrent.futures
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import benchmarks.all_reduce
import benchmarks.ring_attention
from benchmarks.rank_processes import run_ranks
from tests.e2e.conftest import CLIENT, Service
from tests.e2e.test_tensor_parallel import BODY as SHORT
from tests.e2e.test_tensor_parallel import children, kill_a_rank

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_memory(None), pytest.mark.timeout(240)]

BODY = {"inputs": "def add(a, b):", "parameters": {"max_new_tokens": 60}}
LONG = BODY | {"inputs": "\n".join(f"x{i} = {i}" for i in range(900))}
"""Sums of this prompt's tokens exceed what one launch adds, so they are gathered."""


@pytest.fixture(autouse=True)
def _needs_two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, not {torch.cuda.device_count()}")


def test_sums_in_one_launch_have_the_bits_of_the_sum_in_the_order_of_the_ranks_with_a_norm_too():
    assert run_ranks(benchmarks.all_reduce.measure, 2, [8192, 65536, 2 << 20])


def test_ring_attention_computes_what_one_gpu_computes():
    assert run_ranks(benchmarks.ring_attention.measure, 2, [8192])


def answers(*options):
    service = Service(["--device=cuda", "--dtype=float32", *options])
    try:
        service.wait_until_healthy()
        return [
            CLIENT.post(f"{service.url}/generate", json=it, timeout=60).json()
            for it in (BODY, LONG)
        ]
    finally:
        service.stop()


def test_a_model_over_two_gpus_answers_as_on_one():
    assert answers("--tensor-parallel=2") == answers()


def test_a_killed_rank_is_replaced_and_the_replies_are_as_before():
    service = Service(["--device=cuda", "--dtype=float32", "--tensor-parallel=2"])
    try:
        service.wait_until_healthy()
        reply = CLIENT.post(f"{service.url}/generate", json=SHORT, timeout=60).json()
        kill_a_rank(service, expected=reply["generated_text"])
    finally:
        service.stop()


def stream(url, number):
    """Return the tokens of a greedy stream, and the type of the error that ended it, or None."""
    body = {"inputs": f"x{number} = ", "parameters": {"max_new_tokens": 400, "stop": []}}
    ids = []
    with CLIENT.stream("POST", f"{url}/generate_stream", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data:"):
                event = json.loads(line.removeprefix("data:"))
                if "error" in event:
                    return ids, event["error_type"]
                ids.append(event["token"]["id"])
    return ids, None


def engines_up(service):
    lines = CLIENT.get(f"{service.url}/metrics").text.splitlines()
    name = "tessera_engine_process_up{"
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]


def test_a_killed_engine_ends_only_its_own_streams_and_is_replaced():
    service = Service(["--device=cuda", "--data-parallel=2"])
    try:
        service.wait_until_healthy()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            expected = list(pool.map(lambda it: stream(service.url, it), range(16)))
            assert all(error is None for _, error in expected)
            engines = [
                pid
                for pid in children(service.process.pid)
                if b"server.engine.link.engine_process.process"
                in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            assert len(engines) == 2
            replies = [pool.submit(stream, service.url, it % 16) for it in range(320)]
            while sum(it.done() for it in replies) < 64:
                time.sleep(0.005)
            os.kill(engines[1], signal.SIGKILL)
            found = [it.result() for it in replies]
        ended = [it for it in found if it[1] is not None]
        assert len(ended) <= 16
        for i, (ids, error) in enumerate(found):
            if error is None:
                assert len(ids) == len(expected[i % 16][0])
        deadline = time.monotonic() + 60
        while engines_up(service) != [1, 1]:
            assert time.monotonic() < deadline, service.log()
            time.sleep(0.1)
        assert stream(service.url, 3)[1] is None
    finally:
        service.stop()
