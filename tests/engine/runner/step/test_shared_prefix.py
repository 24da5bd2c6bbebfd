"""A shared prefix is found from the block tables; reading it once changes no token."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import server.engine.runner.step.model_runner
from kernels.arch import CATALOGUE
from server.engine.core.step import DecodeRows
from server.engine.runner.start.dummy_steps import sharing
from server.engine.runner.step.model_runner import ModelRunner
from server.engine.runner.step.shared_prefix import common_blocks, shared_blocks
from server.engine.runner.step.step_input import exact_bucket
from tests.engine.runner.start.test_dummy_steps import S, assert_sound, limits
from tests.engine.runner.test_engine_model import assert_all_free, greedy, make_engine, tokens
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint


def always(_num_seqs, _num_tokens):
    return True


def rows(num_computed, *tables):
    """Return decode rows with these block tables and starts."""
    batch = SimpleNamespace(sequences=[SimpleNamespace(block_table=table) for table in tables])
    return DecodeRows(batch, [num_computed] * len(tables), len(tables))


# Counting


@given(
    st.integers(1, 9),
    st.integers(0, 70),
    st.lists(st.integers(0, 70), max_size=3),
    st.integers(0, 70),
)
def test_common_blocks_counts_the_equal_leading_entries_of_all_tables(rows, width, changed, most):
    tables = [list(range(width)) for _ in range(rows)]
    for index, column in enumerate(changed):
        if column < width:
            tables[(index + 1) % rows][column] += 1000
    expected = 0
    while expected < min(most, width) and len({table[expected] for table in tables}) == 1:
        expected += 1

    assert common_blocks(tables, most) == expected


def test_blocks_that_are_equal_again_after_a_difference_are_not_shared():
    assert common_blocks([[1, 2, 3, 4], [1, 9, 3, 4]], 4) == 1


def test_common_blocks_stops_at_the_end_of_the_shortest_table():
    assert common_blocks([[1, 2, 3, 4], [1, 2]], 4) == 2


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(0, 0), (31, 0), (32, 4), (63, 4), (64, 8), (80, 8)]
)
def test_shared_blocks_end_before_every_query_and_are_multiples_of_four(num_computed, expected):
    same = list(range(10))

    assert shared_blocks(rows(num_computed, same, same, same), 8, always) == expected


def test_one_sequence_shares_nothing():
    assert shared_blocks(rows(40, [1, 2, 3, 4, 5]), 8, always) == 0


def test_the_rule_is_called_once_with_the_shared_tokens():
    asked = []

    def never(num_seqs, num_tokens):
        asked.append((num_seqs, num_tokens))
        return False

    assert shared_blocks(rows(40, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]), 8, never) == 0
    assert shared_blocks(rows(40, [1, 2, 3, 4, 5], [1, 2, 3, 9, 5]), 8, never) == 0
    assert asked == [(2, 32)]


# The engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def steps(monkeypatch):
    """Always read shared prefixes once, and record every step with its input and its block tables."""
    seen = []
    pack = ModelRunner.pack

    def packed(self, output, sharing_rule, **scored):
        assert sharing_rule is None
        step = pack(self, output, always, **scored)
        seen.append((output, step.input, [tuple(s.sequence.block_table) for s in output.decode]))
        return step

    monkeypatch.setattr(ModelRunner, "pack", packed)
    return seen


def requests_behind(prompt, lengths):
    rng = random.Random(5)
    prompts = [[*prompt, *(rng.randrange(VOCAB_SIZE) for _ in range(n))] for n in lengths]
    return [greedy(100 + index, prompt, 12) for index, prompt in enumerate(prompts)]


def run(checkpoint, prompt, requests, **changes):
    """Return the tokens of requests that arrive together after the prompt is in the prefix cache."""
    engine = make_engine(checkpoint, **changes)
    first = tokens(engine.generate([greedy(1, prompt, 3)])[0])
    rest = [tokens(events) for events in engine.generate(requests)]
    assert_all_free(engine)
    return [first, *rest]


def test_a_step_of_sequences_with_a_common_prompt_has_shared_blocks(checkpoint, request):
    prompt = [7 + index % 200 for index in range(83)]
    requests = requests_behind(prompt, [3, 9, 30, 1])
    expected = run(checkpoint, prompt, requests)
    steps = request.getfixturevalue("steps")

    assert run(checkpoint, prompt, requests) == expected

    found = [
        batch.decode.shared_prefix
        for _, batch, _ in steps
        if batch.decode and len(batch.decode.seq_lens) > 1
    ]
    # 83 tokens fill 10 blocks of 8, of which a multiple of 4 is read once.
    assert found
    assert set(found) == {64}
    assert all(batch.prefill.shared_prefix == 0 for _, batch, _ in steps if batch.prefill)


def test_the_shared_blocks_of_a_step_are_equal_in_all_tables(checkpoint, steps):
    prompt = [3 + index % 200 for index in range(70)]
    other = [200 - index % 150 for index in range(70)]
    # Nothing is read once until the sequence without the prefix has ended.
    outsider = greedy(50, other, 5)
    requests = [*requests_behind(prompt, [5, 40]), outsider]

    run(checkpoint, prompt, requests, kv_cache_tokens=320, max_num_seqs=8)

    several = [it for it in steps if len(it[0].decode) > 1]
    sharing_steps = [it for it in several if it[1].decode.shared_prefix]
    assert 0 < len(sharing_steps) < len(several)
    for output, batch, tables in sharing_steps:
        blocks = batch.decode.shared_prefix // 8
        assert all(s.start >= batch.decode.shared_prefix for s in output.decode)
        assert len({table[:blocks] for table in tables}) == 1
        # The number of shared blocks is the largest possible multiple of four.
        most = min(s.start for s in output.decode) // 8
        assert blocks + 4 > most or len({table[: blocks + 4] for table in tables}) > 1


def test_without_a_prefix_cache_nothing_is_shared(checkpoint, steps):
    prompt = [7 + index % 200 for index in range(83)]

    run(checkpoint, prompt, requests_behind(prompt, [3, 9]), enable_prefix_caching=False)

    assert {batch.decode.shared_prefix for _, batch, _ in steps if batch.decode} == {0}


def test_a_runner_has_a_sharing_rule_only_if_a_kernel_supports_it(
    checkpoint, monkeypatch, tmp_path
):
    def rule_of(folder, gpu):
        engine = make_engine(folder)
        monkeypatch.setattr(
            server.engine.runner.step.model_runner, "detect", lambda _device=None: gpu
        )
        rule = engine.engine._runner._find_sharing_rule()
        monkeypatch.undo()
        return rule

    wide = {"head_dim": 128, "num_key_value_heads": 4, "num_hidden_layers": 1}
    sliding = {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 32,
    }
    full = write_tiny_checkpoint(tmp_path / "full", **wide)
    windowed = write_tiny_checkpoint(tmp_path / "windowed", **wide, **sliding)

    assert rule_of(full, CATALOGUE["cpu"]) is None
    assert rule_of(full, CATALOGUE["t4"]) is None
    assert rule_of(windowed, CATALOGUE["h100"]) is None
    rule = rule_of(full, CATALOGUE["h100"])
    assert rule(256, 8192)
    assert not rule(2, 64)


@pytest.mark.parametrize("length", [2, 65, 256])
def test_the_dummy_sequences_share_the_shortest_possible_prefix(length):
    (output,) = sharing(length, limits(), S)

    assert_sound(output, limits(), 256)
    shared = shared_blocks(output.decode, S, always)
    assert shared == 4
    bucket = exact_bucket(output.decode, output.prefill, S, shared)
    assert bucket.columns == -(-min(4 * S + length, 256) // S)


def test_there_is_no_dummy_step_with_a_shared_prefix_if_the_limits_allow_none():
    assert list(sharing(2, limits(model_len=64), S)) == []
    assert list(sharing(2, limits(seqs=1), S)) == []
