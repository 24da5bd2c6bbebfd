"""Whether a decode step's attention is one launch with what lies before it."""

import dataclasses

import pytest

from kernels import Phase
from kernels.arch import CATALOGUE, CPU
from kernels.plan import AttentionProblem
from kernels.token_plan import TokenChoice, TokenLaunch, TokenStep, launch_mistakes, select_token
from kernels.tuning.token import find, token_mistakes, token_table, tuned_token

H100 = CATALOGUE["h100"]
QWEN = AttentionProblem(
    phase=Phase.DECODE,
    dtype="bfloat16",
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    block_size=16,
    softmax_scale=0.1,
)
STEP = TokenStep(QWEN, 1, 1024)
LAUNCH = {"depth": 2, "splits": 16, "num_warps": 2}
ROW = {
    "heads": [16, 8, 128],
    "max_rows": 1,
    "max_keys": 1024,
    "launch": LAUNCH,
    "provenance": "timed",
}


def always(*_):
    return TokenChoice(TokenLaunch(**LAUNCH), "timed", measured=True)


def changed(**changes):
    return TokenStep(dataclasses.replace(QWEN, **changes), 1, 1024)


def test_a_step_that_was_timed_takes_its_launch():
    choice = select_token(STEP, H100, always)

    assert choice == always()


def test_a_step_that_was_not_timed_takes_two_launches_and_says_so():
    choice = select_token(STEP, H100)

    assert choice.launch is None
    assert "not measured" in choice.why


@pytest.mark.parametrize(
    ("step", "arch", "reason"),
    [
        (STEP, CPU, "a CPU"),
        (STEP, CATALOGUE["t4"], "needs sm_80, this is sm_75"),
        (TokenStep(QWEN, 9, 64), H100, "9 rows"),
        (TokenStep(QWEN, 0, 64), H100, "0 rows"),
        (changed(kv_dtype="float8_e4m3fn"), H100, "no cache in float8"),
        (changed(max_query_tokens=2), H100, "one query token"),
        (changed(lse=True), H100, "no log-sum-exp"),
        (changed(causal=False), H100, "causal only"),
        (changed(batch_invariant=True), H100, "number of rows"),
        (changed(num_heads=64), H100, "8 query heads for a key-value head"),
        (changed(num_heads=512, num_kv_heads=512), H100, "512 key-value heads"),
        (changed(head_dim=72), H100, "no head dim of 72"),
        (changed(head_dim=512), H100, "no head dim of 512"),
    ],
    ids=str,
)
def test_what_cannot_be_one_launch_says_why(step, arch, reason):
    choice = select_token(step, arch, always)

    assert choice.launch is None
    assert reason in choice.why


@pytest.mark.parametrize("changes", [{"sliding_window": 100}, {"softcap": 30.0}, {"head_dim": 80}])
def test_windows_caps_and_odd_heads_are_taken(changes):
    assert select_token(changed(**changes), H100, always).launch is not None


def test_the_row_for_the_fewest_rows_then_keys_is_found():
    more_rows = ROW | {"max_rows": 4, "launch": LAUNCH | {"depth": 4}}
    more_keys = ROW | {"max_keys": 4096, "launch": LAUNCH | {"depth": 1}}
    none = ROW | {"max_rows": 8, "launch": None}
    rows = [none, more_rows, more_keys, ROW]

    def depth(rows_of_step, keys):
        return find(TokenStep(QWEN, rows_of_step, keys), rows).launch.depth

    assert (depth(1, 1024), depth(1, 1025), depth(2, 100)) == (2, 1, 4)
    assert find(TokenStep(QWEN, 5, 100), rows).launch is None
    assert find(TokenStep(QWEN, 1, 5000), rows) is None
    assert find(changed(num_heads=8), rows) is None


def test_float32_has_no_rows():
    assert tuned_token(changed(dtype="float32"), H100) is None


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        ({}, None),
        ({"launch": None}, None),
        ({"provenance": " "}, "provenance"),
        ({"max_rows": 9}, "max_rows is 9"),
        ({"launch": LAUNCH | {"depth": 3}}, "depth is 3; it must be a power of two"),
        ({"launch": LAUNCH | {"depth": 8}}, "depth is 8; it must be at most 4"),
        ({"launch": LAUNCH | {"splits": 64}}, "splits is 64"),
        ({"surplus": 1}, "has the keys"),
    ],
    ids=str,
)
def test_mistakes_of_a_table_are_found(change, mistake):
    found = token_mistakes([ROW | change])

    assert found == [] if mistake is None else mistake in found[0]


def test_a_second_row_for_the_same_steps_is_found():
    assert "a second row" in token_mistakes([ROW, ROW])[0]


@pytest.mark.parametrize("arch", CATALOGUE.values(), ids=lambda arch: arch.name)
def test_no_table_has_a_mistake(arch):
    assert token_mistakes(token_table(arch.sm)) == []


def test_a_launch_that_fits_has_no_mistakes():
    assert launch_mistakes(TokenLaunch(**LAUNCH)) == []
