"""The minimal work of an attention step, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, Phase
from server.engine.runner.explain.model_work import Work, attention_work, roofline


def problem(phase=Phase.PREFILL, dtype="bfloat16", **more):
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16} | more
    return AttentionProblem(phase=phase, dtype=dtype, softmax_scale=0.1, **fields)


def test_a_causal_prefill_computes_half_of_the_square_and_its_diagonal():
    work = attention_work(problem(), 4, 4096, 4096)

    assert work.flops == 4 * (4 * 32 * 128 * 4096 * 4097 // 2)
    assert work.bytes_moved == 4 * (2 * 32 * 4096 + 2 * 8 * 4096) * 128 * 2


def test_a_decode_reads_the_history_once_for_all_heads_that_share_it():
    work = attention_work(problem(Phase.DECODE), 8, 1, 1024)

    assert work.flops == 8 * 4 * 32 * 128 * 1024
    assert work.bytes_moved == 8 * (2 * 32 + 2 * 8 * 1024) * 128 * 2
    assert work.intensity == pytest.approx(work.flops / work.bytes_moved)


def test_a_chunk_after_a_history_sees_all_of_it():
    work = attention_work(problem(), 1, 2, 10)

    assert work.flops == 4 * 32 * 128 * (9 + 10)


def test_a_window_excludes_the_keys_below_it():
    decode = attention_work(problem(Phase.DECODE, sliding_window=100), 1, 1, 1000)
    prefill = attention_work(problem(sliding_window=3), 1, 4, 10)

    assert decode.flops == 4 * 32 * 128 * 100
    assert decode.bytes_moved == (2 * 32 + 2 * 8 * 100) * 128 * 2
    assert prefill.flops == 4 * 32 * 128 * 4 * 3
    assert prefill.bytes_moved == (2 * 32 * 4 + 2 * 8 * 6) * 128 * 2


def test_without_causality_every_query_sees_every_key():
    work = attention_work(problem(causal=False), 1, 5, 5)

    assert work.flops == 4 * 32 * 128 * 25


def test_float32_moves_twice_the_bytes():
    half = attention_work(problem(), 1, 7, 7)
    full = attention_work(problem(dtype="float32"), 1, 7, 7)

    assert full.bytes_moved == 2 * half.bytes_moved
    assert full.flops == half.flops


def test_the_slower_of_memory_and_arithmetic_is_the_bound():
    h100 = CATALOGUE["h100"]

    moving = roofline(Work(3352 * 10**6, 1), "bfloat16", h100)
    computing = roofline(Work(1, 9894 * 10**11), "bfloat16", h100)

    assert (moving.bound, computing.bound) == ("memory", "compute")
    assert moving.seconds == pytest.approx(1e-3)
    assert computing.seconds == pytest.approx(1.0)


def test_a_float8_cache_moves_one_byte_per_number_and_four_per_scale():
    half = attention_work(problem(Phase.DECODE), 1, 1, 1000)
    fp8 = attention_work(problem(Phase.DECODE, kv_dtype="float8_e4m3fn"), 1, 1, 1000)

    assert half.bytes_moved - fp8.bytes_moved == 2 * 8 * 1000 * (2 * 128 - 128 - 4)
    assert fp8.flops == half.flops


def test_the_roofline_of_float8_uses_the_peak_of_float8():
    work = Work(1, 9894 * 10**11)

    assert roofline(work, "float8_e4m3fn", CATALOGUE["h100"]).seconds == pytest.approx(
        0.5, rel=1e-3
    )
    assert roofline(work, "float8_e4m3fn", CATALOGUE["a100"]) is None


def test_the_roofline_of_float32_uses_the_peak_of_float32():
    assert roofline(Work(1, 669 * 10**11), "float32", CATALOGUE["h100"]).seconds == pytest.approx(1)


@pytest.mark.parametrize(
    "arch",
    [
        CATALOGUE["cpu"],
        dataclasses.replace(CATALOGUE["h100"], memory_bandwidth_gbs=0),
        dataclasses.replace(CATALOGUE["h100"], half_tflops=0.0),
        CATALOGUE["t4"],
    ],
    ids=["cpu", "unknown bandwidth", "unknown peak", "emulated bfloat16"],
)
def test_the_roofline_is_none_if_a_peak_is_not_known(arch):
    assert roofline(Work(1000, 1000), "bfloat16", arch) is None
