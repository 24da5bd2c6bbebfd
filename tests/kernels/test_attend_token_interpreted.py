"""One launch from a projection to attention, in Triton's interpreter, against PyTorch and against two launches."""

from __future__ import annotations

import pytest
import torch

from kernels.fused.attend_token import lines_of
from kernels.token_plan import TokenLaunch
from tests.kernels import triton_interpreter
from tests.kernels.token_cases import TokenCase

pytestmark = triton_interpreter.interpreted

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = TokenLaunch(depth=1, splits=4, num_warps=1)
SHAPES = [
    ((1,), 4, 2, 32),
    ((17, 0, 40, 16), 4, 2, 32),
    ((63,), 3, 1, 80),
    ((130, 5), 4, 1, 64),
    ((33,), 2, 2, 128),
]


@pytest.fixture(autouse=True)
def _poison():
    torch.manual_seed(0)
    with triton_interpreter.poisoned_memory():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_exact_as_two_launches_and_writes_the_same_cache(dtype, norms, shape):
    TokenCase(*shape, dtype, norms=norms).check(SMALL)


@pytest.mark.parametrize(
    "launch",
    [
        TokenLaunch(1, 1, 1),
        TokenLaunch(1, 2, 1),
        TokenLaunch(2, 8, 2),
        TokenLaunch(4, 2, 2),
        TokenLaunch(1, 16, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 20}, {"sliding_window": 1}, {"softcap": 5.0}],
    ids=str,
)
def test_however_it_is_cut_the_result_is_right(launch, changes):
    TokenCase((70, 3), 4, 2, 64, torch.float16, **changes).check(launch)


def test_rows_without_tokens_become_zero_whatever_was_projected():
    out = TokenCase((0, 20), 4, 2, 32, torch.float16).check(SMALL)

    assert not out[0].any()


def test_counters_are_left_as_they_were_found():
    case = TokenCase((70, 0, 5), 4, 2, 32, torch.float16)
    room = case.room(SMALL)

    first = case.run(SMALL, room)
    again = case.run(SMALL, room)

    assert not room.arrivals.any()
    assert torch.equal(first, again)


def test_a_sequence_without_a_slot_writes_nothing():
    case = TokenCase((20,), 4, 2, 32, torch.float16)
    case.slots.fill_(-1)
    before = case.kv.clone()

    out = case.run(SMALL)

    torch.testing.assert_close(case.kv, before, rtol=0, atol=0, equal_nan=True)
    assert bool(out.isfinite().all())


def test_what_is_fetched_ahead_changes_nothing():
    ahead = tuple(torch.empty(100_000, dtype=torch.int8) for _ in range(2))
    expected = TokenCase((40,), 4, 2, 32, torch.float16).run(SMALL)

    found = TokenCase((40,), 4, 2, 32, torch.float16).run(SMALL, ahead=ahead)

    assert torch.equal(found, expected)


@pytest.mark.parametrize(("num_warps", "half", "lines"), [(1, 64, 4), (4, 64, 16), (1, 32, 8)])
def test_a_line_has_as_many_threads_as_load_half_a_head(num_warps, half, lines):
    assert lines_of(num_warps, half) == lines
