"""A step with k drafted tokens of a sequence samples what k + 1 steps sample, on every executor."""

import contextlib
import dataclasses
import random

import pytest

from model.executors.single_launch import SingleLaunch
from server.engine.core.sequence import Sequence
from server.engine.core.step import DecodeRows, ScheduledSequence, SchedulerOutput
from tests.engine.runner.drafts import WAYS, check, requests
from tests.engine.runner.single_launches import replace_single_launch
from tests.engine.runner.step.test_recordings import Again
from tests.engine.runner.test_engine_model import make_engine
from tests.faults.engine import inject
from tests.tiny_checkpoint import write_tiny_checkpoint

FAMILIES = {
    "llama": {},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 12},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_checkpoint(folder, model_type=request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of the shapes that the C library takes."""
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("small"), intermediate_size=128, head_dim=32
    )


@pytest.mark.parametrize("block_size", [3, 8])
def test_layers_in_pytorch(checkpoint, block_size):
    rng = random.Random(block_size)

    def engine():
        # So few tokens of a step that chunks of prompts are computed with decode rows.
        limits = {"max_num_seqs": 5, "max_num_batched_tokens": 24}
        return make_engine(checkpoint, block_size=block_size, **limits)

    steps = check(engine, requests(rng), rng)

    assert any(step.prefill for step in steps)
    assert max(max(map(len, step.decode.drafts)) for step in steps) == 7


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_c_library_computes_the_same_bits(small, quantization, threads):
    rng = random.Random(threads)

    def engine():
        return make_engine(small, dtype="auto", quantization=quantization, cpu_threads=threads)

    check(engine, requests(rng, most_prompt=70), rng, exact=True)


def test_recorded_steps(tmp_path):
    rng = random.Random(9)
    folder = write_tiny_checkpoint(tmp_path)
    runners, recorder = [], Again()

    def engine():
        made = make_engine(folder, max_num_seqs=4)
        runners.append(made.engine._runner)
        limits = dataclasses.replace(made.engine._scheduler.config, max_queries=8)
        runners[-1].record_steps(limits, recorder)
        while runners[-1].use_idle_time():
            pass
        return made

    check(engine, requests(rng, WAYS[2:6]), rng)
    check(engine, requests(rng, WAYS[:2], max_new_tokens=150), rng)

    recorded = [it for it in runners[-1].recorded.recorded if it.queries > 1]
    # None ahead; a bucket is recorded once steps have needed it.
    assert {4, 8} <= {it.queries for it in recorded} <= {2, 4, 8}
    assert all(it.num_logits == it.rows * it.queries for it in recorded)


@pytest.mark.slow
def test_ranks_that_share_a_model(tmp_path):
    rng = random.Random(10)
    folder = write_tiny_checkpoint(tmp_path, num_key_value_heads=4)
    open_engines = contextlib.ExitStack()

    def engine():
        open_engines.close()  # a process has one group of ranks
        made = make_engine(folder, tensor_parallel=2)
        open_engines.callback(made.close)
        return made

    with open_engines:
        check(engine, requests(rng), rng)


def test_a_failed_step_with_drafts_is_computed_again(tmp_path):
    rng = random.Random(12)
    folder = write_tiny_checkpoint(tmp_path)
    runners = []

    def engine():
        made = make_engine(folder)
        if runners:
            # Rows fail together, so that each is computed in a step of its own, or only once more.
            inject(made.engine, "raise@step=4:times=5", "raise@step=7")
        runners.append(made.engine._runner)
        return made

    steps = check(engine, requests(rng), rng)

    assert {4, 7} <= {step.step + 1 for step in steps}


def test_each_row_of_logits_of_a_chunk_is_sampled_at_its_own_position(tmp_path):
    rng = random.Random(13)
    folder = write_tiny_checkpoint(tmp_path)
    asked = requests(rng)
    runner = make_engine(folder).engine._runner
    chunks = []
    for i, (request, events) in enumerate(
        zip(asked, make_engine(folder).generate(asked), strict=True)
    ):
        sequence = Sequence(request)
        sequence.token_ids += [event.token_id for event in events[:i]]
        sequence.block_table = list(range(10 * i, 10 * i + 10))
        chunks.append((ScheduledSequence(sequence, 0, sequence.num_tokens, i + 1), events))

    rows = [row for row, _ in chunks]
    result = runner.execute(step_of([], rows)).sampled

    assert [[it.token_id for it in row] for row in result.prefill] == [
        [event.token_id for event in events[: row.num_logits]] for row, events in chunks
    ]


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2]], ids=["greedy", "sampled"])
def test_the_next_step_waits_for_the_tokens_that_are_kept(tmp_path, way):
    runner = make_engine(write_tiny_checkpoint(tmp_path)).engine._runner
    sequence = Sequence(requests(random.Random(1), [way])[0])
    sequence.block_table = [0, 1, 2, 3, 4]
    start = sequence.num_tokens - 1
    runner.execute(step_of([], [ScheduledSequence(sequence, 0, sequence.num_tokens, 1)]))

    feeds = [
        runner.launch(
            step_of([ScheduledSequence(sequence, start, 1 + n, 1 + n, (5,) * n)])
        ).feeds_next
        for n in range(3)
    ]

    assert feeds == [True, False, False]


def step_of(decode, prefill=()):
    return SchedulerOutput(
        step=0,
        decode=DecodeRows.of(decode),
        prefill=tuple(prefill),
        num_tokens=sum(row.num_tokens for row in (*decode, *prefill)),
        first_scheduled=(),
        preempted=(),
    )


def test_a_step_of_few_tokens_with_drafts_is_a_single_launch_of_as_many_rows(tmp_path, monkeypatch):
    rng = random.Random(11)
    folder = write_tiny_checkpoint(tmp_path)
    launched, one_step = [], SingleLaunch.step

    def step(self, given, *rest):
        launched.append(given.bucket)
        return one_step(self, given, *rest)

    monkeypatch.setattr(SingleLaunch, "step", step)
    replace_single_launch(monkeypatch, lambda kernel, *given: kernel(*given), (1, 2, 4))
    steps = check(lambda: make_engine(folder), requests(rng, WAYS[:2]), rng)

    assert {len(step.decode) for step in steps} == {1, 2}
    assert {(it.rows, it.queries, it.num_logits) for it in launched} == {
        (rows, 1, rows) for rows in (1, 2, 4)
    }
    assert {it.chained for it in launched if it.rows == 4} == {True}
    for step in steps:
        if step.decode.num_tokens <= 4:
            assert step.decode.num_logits == step.decode.num_tokens
