"""Two GPUs: sums have the same bits on both, one model over both answers as on one, ring attention equals one GPU's."""

import pytest
import torch

import benchmarks.all_reduce
import benchmarks.ring_attention
from benchmarks.rank_processes import run_ranks
from tests.e2e.conftest import CLIENT, Service

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
