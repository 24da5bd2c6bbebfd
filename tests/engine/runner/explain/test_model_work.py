"""The minimum work of a step, compared with counts by hand for a small model."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.weight_format import FP8_ROWS
from model.decoder import DecoderLM
from server.engine.runner.explain.model_work import ModelWork, Rows, Work
from tests.model.configs import model_config

HEADS, KV_HEADS, DIM, LAYERS, HIDDEN, INNER, VOCAB = 4, 2, 8, 3, 16, 24, 50
ARCH = dataclasses.replace(CATALOGUE["h100"], memory_bandwidth_gbs=1, half_tflops=1e-3)
"""A billion bytes and a billion operations per second."""


def config(**changes):
    return model_config(
        **{
            "architecture": "LlamaForCausalLM",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "num_kv_heads": KV_HEADS,
            "head_dim": DIM,
            "max_position_embeddings": 512,
        }
        | changes
    )


def work(arch=ARCH, kv_dtype=None, weight_format=None, **changes):
    model = DecoderLM(config(**changes), torch.bfloat16, "meta", weight_format)
    return ModelWork(model, 16, arch, kv_dtype)


LAYER = HIDDEN * 2 * (HEADS + KV_HEADS) * DIM + 3 * HIDDEN * INNER + 2 * HIDDEN
WEIGHTS = (
    LAYERS * LAYER + VOCAB * HIDDEN + HIDDEN
)  # of one of the two embeddings, only single rows are read


def test_a_decode_step_reads_the_weights_and_every_key_and_value_once():
    step = work().step([Rows(5, 1, 100)])

    cache = 5 * 2 * KV_HEADS * DIM * 100
    in_and_out = 5 * 2 * HEADS * DIM
    assert step.bytes_moved == 2 * (WEIGHTS + LAYERS * (cache + in_and_out))


def test_a_cache_in_float8_is_read_as_bytes_and_scales():
    exact, rounded = (
        work(kv_dtype=kv_dtype).step([Rows(5, 1, 100)]).bytes_moved
        for kv_dtype in (None, "float8_e4m3fn")
    )

    assert exact - rounded == LAYERS * 5 * 2 * KV_HEADS * 100 * (2 * DIM - (DIM + 4))


def test_float8_weights_are_read_as_bytes_and_scales():
    exact, rounded = (
        work(weight_format=form).step([Rows(5, 1, 100)]).bytes_moved for form in (None, FP8_ROWS)
    )

    outputs = (HEADS + 2 * KV_HEADS) * DIM + HIDDEN + 2 * INNER + HIDDEN
    assert exact - rounded == LAYERS * (LAYER - 2 * HIDDEN - 4 * outputs)


def test_a_decode_step_multiplies_every_token_with_every_weight_and_with_its_context():
    step = work().step([Rows(5, 1, 100)])

    assert step.flops == 2 * 5 * WEIGHTS + LAYERS * 5 * 4 * HEADS * DIM * 100


def test_a_prompt_has_logits_only_for_its_last_token():
    step = work().step([Rows(1, 10, 10)])

    attention = LAYERS * 4 * HEADS * DIM * (10 * 11 // 2)
    assert step.flops == 2 * 10 * (WEIGHTS - VOCAB * HIDDEN) + 2 * VOCAB * HIDDEN + attention


def test_a_tied_embedding_is_read_in_full():
    assert work(tie_word_embeddings=True).step([Rows(1, 1, 1)]) == work().step([Rows(1, 1, 1)])


def test_layers_with_a_window_read_at_most_the_window():
    layers = ("full_attention", "sliding_attention", "sliding_attention")
    step = work(sliding_window=20, layer_types=layers).step([Rows(1, 1, 100)])

    seen = 100 + 2 * 20
    assert step.flops == 2 * WEIGHTS + 4 * HEADS * DIM * seen


def test_decode_seconds_sums_steps_with_growing_context():
    one = work()
    steps = [one.step([Rows(4, 1, context)]) for context in (30, 31, 32)]

    least = sum(one.limit(step).seconds for step in steps)
    assert one.decode_seconds(4, 30, 3) == pytest.approx(least)


def test_requests_read_the_weights_once_per_token_of_the_longest_output():
    alone = work().requests_seconds([10], [1])
    step = work().step([Rows(1, 10, 10)])

    assert alone == work().limit(step).seconds
    memory_bound = dataclasses.replace(ARCH, half_tflops=1e6)
    both = work(memory_bound).requests_seconds([1, 1], [50, 3])
    assert both > 50 * 2 * WEIGHTS / 1e9


def test_shares_are_relative_to_the_peaks():
    assert work().shares(Work(10**9, 5 * 10**8), 2.0) == (0.5, 0.25)


def test_without_peaks_there_is_no_roofline():
    unknown = work(CATALOGUE["cpu"])

    assert unknown.decode_seconds(1, 10, 3) is None
    assert unknown.requests_seconds([3], [3]) is None
    assert unknown.shares(Work(1, 1), 1.0) == (None, None)
