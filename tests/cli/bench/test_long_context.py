"""Long prompts: time to the first token, prefix hits, and decoding after them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.arch import CATALOGUE
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from server.cli.bench.engine.measures import EngineMeasures
from server.cli.bench.engine.run import EngineRun
from server.cli.bench.engine.workloads import Plan, Workload
from server.cli.bench.workload import Lengths
from server.engine.core.messages import EngineConfig
from server.engine.runner.explain.model_work import ModelWork, Rows
from tests.tiny_checkpoint import write_tiny_checkpoint

BLOCK = 8
LIMIT = 200
STEPS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def measures(checkpoint, said, **changes):
    settings = {"max_model_len": LIMIT, "max_num_seqs": 1, "kv_cache_tokens": 2 * LIMIT}
    engine = EngineRun(
        EngineConfig(
            model_path=str(checkpoint),
            model_id="tiny",
            device="cpu",
            quantization="none",
            block_size=BLOCK,
            **settings | changes,
        )
    )
    model = DecoderLM(ModelConfig.from_folder(checkpoint), torch.float32, "meta")
    work = ModelWork(model, BLOCK, CATALOGUE["h100"])
    plan = Plan((), 16, STEPS, Lengths(1, 2))
    return EngineMeasures(engine, work, plan, np.random.default_rng(0), said.append), work


def test_a_hit_computes_only_the_end_of_the_prompt(checkpoint):
    said = []
    measured, work = measures(checkpoint, said)

    whole = measured.measure(Workload("ttft", 100))
    hit = measured.measure(Workload("hit", 100))

    assert (whole["metric"], hit["metric"]) == ("ttft_ms", "hit_ttft_ms")
    assert (hit["prompt_tokens"], hit["cached_tokens"], hit["repeats"]) == (100, 96, 5)
    least = work.limit(work.step([Rows(1, 4, 100)])).seconds
    assert hit["roofline"] == pytest.approx(1e3 * least / hit["value"], rel=1e-2)
    assert not said


def test_a_prompt_that_the_cache_holds_to_its_last_block_is_a_hit_too(checkpoint):
    measured, _ = measures(checkpoint, [])

    assert 0 < 96 - measured.measure(Workload("hit", 96))["cached_tokens"] <= BLOCK


def test_decoding_after_a_long_prompt_has_the_context_of_the_prompt(checkpoint):
    measured, work = measures(checkpoint, [])

    row = measured.measure(Workload("context", 100))

    assert (row["metric"], row["prompt_tokens"], row["steps"]) == ("context_ms", 100, STEPS)
    seconds = 1e-3 * row["value"] * STEPS
    assert row["roofline"] == pytest.approx(work.decode_seconds(1, 102, STEPS) / seconds, rel=1e-2)


@pytest.mark.parametrize(("kind", "outputs"), [("ttft", 1), ("hit", 1), ("context", STEPS + 1)])
def test_a_prompt_as_long_as_the_context_leaves_room_for_the_output(checkpoint, kind, outputs):
    said = []
    measured, _ = measures(checkpoint, said)

    assert measured.measure(Workload(kind, LIMIT))["prompt_tokens"] == LIMIT - outputs
    assert not said


@pytest.mark.parametrize("kind", ["ttft", "hit", "context"])
def test_a_prompt_longer_than_the_context_is_skipped_with_both_numbers(checkpoint, kind):
    said = []
    measured, _ = measures(checkpoint, said)

    assert measured.measure(Workload(kind, LIMIT + 1)) is None
    (message,) = said
    assert str(LIMIT) in message
    assert str(LIMIT + 1) in message


def test_without_a_prefix_cache_a_hit_is_skipped(checkpoint):
    said = []
    measured, _ = measures(checkpoint, said, enable_prefix_caching=False)

    assert measured.measure(Workload("hit", 100)) is None
    assert said == ["skipped: a prompt of 100 tokens is not in the prefix cache"]
