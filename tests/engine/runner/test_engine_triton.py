"""The engine on the Triton kernels, with Triton's interpreter on the CPU."""

import dataclasses
import random
from collections import Counter

import msgspec
import pytest

import kernels.rope.pytorch
import server.engine.runner.step.model_runner
from benchmarks.local_engine import LocalEngine
from kernels.arch import CATALOGUE
from kernels.attention import functional
from server.engine.core.limits import SchedulerConfig
from server.engine.core.messages import EngineConfig
from server.engine.runner.start import warm_up
from server.engine.runner.start.dummy_steps import crowds
from tests.engine.runner.drafts import WAYS, check, requests
from tests.engine.runner.test_engine_model import greedy, random_prompt, tokens
from tests.kernels.triton_interpreter import interpreted, is_loaded
from tests.tiny_checkpoint import write_tiny_checkpoint

pytestmark = interpreted

LIMITS = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Select and launch the kernels of a GPU, with tensors on the CPU."""
    assert is_loaded()
    from kernels.attention.portable.write_kv import write_kv

    gpu = dataclasses.replace(CATALOGUE["h100"], num_sms=8)  # also the number of splits of a decode
    monkeypatch.setattr(functional, "detect", lambda _device=None: gpu)
    monkeypatch.setattr(server.engine.runner.step.model_runner, "detect", lambda _device=None: gpu)
    monkeypatch.setattr(warm_up, "detect", lambda _device=None: gpu)
    monkeypatch.setattr(kernels.rope.pytorch, "write_kv", write_kv)


def config(folder):
    return EngineConfig(
        model_path=str(folder),
        model_id="tiny",
        device="cpu",
        dtype="float32",
        kv_cache_tokens=256,
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=LIMITS.max_model_len,
    )


@pytest.fixture
def prefixes(monkeypatch):
    """Record the shared tokens of every launch that reads them once."""
    from kernels.attention.portable.launch import PortablePrefix

    seen = []
    call = PortablePrefix.__call__

    def counted(self, *arguments):
        seen.append(self._arguments["num_keys"])
        call(self, *arguments)

    monkeypatch.setattr(PortablePrefix, "__call__", counted)
    return seen


def test_chunked_prompts_with_decode_rows_give_the_tokens_of_pytorch_attention(request, tmp_path):
    folder = write_tiny_checkpoint(tmp_path, head_dim=32)
    rng = random.Random(1)
    asked = [greedy(i, random_prompt(rng, 10, 40), 4) for i in range(3)]
    expected = [tokens(events) for events in LocalEngine(config(folder)).generate(asked)]
    request.getfixturevalue("as_on_a_gpu")
    engine = LocalEngine(config(folder))

    assert [tokens(events) for events in engine.generate(asked)] == expected

    runner = engine.engine._runner
    assert warm_up._distinct_lengths(runner, 128)[-1] == 128
    for output in crowds(128, LIMITS, 16):
        warm_up._plan(runner, output)
    warm_up.compute_largest_step(runner, LIMITS)


def test_a_shared_prefix_read_once_gives_the_tokens_of_pytorch_attention(
    request, monkeypatch, prefixes, tmp_path
):
    folder = write_tiny_checkpoint(tmp_path, head_dim=32)
    prompt = [3 + index for index in range(70)]
    asked = [greedy(i, [*prompt, *range(20 * i, 23 * i)], 4) for i in range(1, 4)]

    def answers():
        engine = LocalEngine(config(folder))
        first = tokens(engine.generate([greedy(0, prompt, 2)])[0])
        return [first, *(tokens(events) for events in engine.generate(asked))]

    expected = answers()
    request.getfixturevalue("as_on_a_gpu")
    monkeypatch.setattr(
        server.engine.runner.step.model_runner, "shared_prefix_is_faster", lambda *_: True
    )

    assert answers() == expected
    assert len(prefixes) > 4
    assert set(prefixes) == {64}


def test_the_warm_up_uses_the_kernels_for_a_shared_prefix(
    monkeypatch, as_on_a_gpu, prefixes, tmp_path
):
    engine = LocalEngine(config(write_tiny_checkpoint(tmp_path, head_dim=32)))

    # Twice, once per layer, for the single length at which the tiles of a decode change.
    assert prefixes == [64, 64]
    assert engine.engine._runner.sharing_rule is not None


@pytest.mark.slow
def test_a_step_with_drafts_samples_what_as_many_steps_sample(
    monkeypatch, as_on_a_gpu, prefixes, tmp_path
):
    from kernels.attention.portable.launch import PortableDecode

    monkeypatch.setattr("server.engine.runner.start.runner_start.warm_up", lambda *_: None)
    monkeypatch.setattr(
        server.engine.runner.step.model_runner, "shared_prefix_is_faster", lambda *_: True
    )
    queries = Counter()
    make = PortableDecode.__init__

    def counted(self, problem, batch, selection):
        queries[problem.max_query_tokens, batch.max_seqlen_q] += 1
        make(self, problem, batch, selection)

    monkeypatch.setattr(PortableDecode, "__init__", counted)
    folder = write_tiny_checkpoint(tmp_path, head_dim=32, num_hidden_layers=1)
    rng = random.Random(2)
    asked = requests(rng, WAYS[:3], most_prompt=9, max_new_tokens=10)
    common = random_prompt(rng, 64, 64)
    asked = [
        msgspec.structs.replace(it, prompt_token_ids=common + it.prompt_token_ids) for it in asked
    ]

    check(lambda: LocalEngine(config(folder)), asked, rng)

    assert {most for most, _ in queries} > {1, 2}
    assert all(most == found for most, found in queries)
    assert set(prefixes) == {64}
