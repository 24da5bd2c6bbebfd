"""Recurrent mixers of the C library against their formulas, and the bits of divided prompts and of other companies."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.cpu import workers
from kernels.cpu.library import load
from kernels.recurrent.cpu_library import GatedDelta, Mamba2, ShortConv, unsupported
from kernels.recurrent.problem import GatedDeltaShape, Mamba2Shape, RecurrentProblem, ShortConvShape
from kernels.recurrent.registry import CPU_LIBRARY, PYTORCH, select
from kernels.selection import load as load_target
from tests.kernels.recurrent.cases import (
    NEW,
    NUM_SLOTS,
    RAGGED,
    ROWS,
    UNUSED,
    Sequence,
    Step,
    assert_equal_slots,
    check_alone,
    check_decays,
    check_divided,
    check_kept,
    check_nothing_written,
)

LIBRARY = load()
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
DELTA = {
    "two heads of a key": GatedDeltaShape(4, 2, 32, 32, 4, 1e-6),
    "heads of 128": GatedDeltaShape(2, 2, 128, 128, 4, 1e-6),
    "values in an odd number of vectors": GatedDeltaShape(3, 1, 64, 48, 4, 1e-6),
    "wide keys": GatedDeltaShape(2, 1, 256, 16, 2, 1e-6),
    "many heads": GatedDeltaShape(20, 4, 16, 16, 3, 1e-6),
}
MAMBA2 = {
    "two groups": Mamba2Shape(4, 32, 16, 2, 4, 1e-5),
    "one group": Mamba2Shape(4, 32, 16, 1, 4, 1e-5),
    "heads of 64, states of 128": Mamba2Shape(3, 64, 128, 1, 4, 1e-5),
    "heads of 128, states of 64": Mamba2Shape(2, 128, 64, 2, 4, 1e-5),
    "states of 256": Mamba2Shape(2, 32, 256, 1, 4, 1e-5),
    "many heads": Mamba2Shape(24, 16, 48, 8, 3, 1e-5),
    "no norm": Mamba2Shape(4, 32, 16, 2, 4, None),
    "norm before the gate": Mamba2Shape(4, 32, 16, 2, 4, 1e-5, norm_before_gate=True),
    "limits of steps": Mamba2Shape(4, 32, 16, 2, 4, 1e-5, dt_limits=(0.2, 0.9)),
    "no bias": Mamba2Shape(4, 32, 16, 2, 4, 1e-5, conv_bias=False),
}
SHORT_CONV = {
    "three taps": ShortConvShape(48, 3),
    "a bias": ShortConvShape(144, 4, bias=True),
    "two taps": ShortConvShape(16, 2),
    "eight taps": ShortConvShape(80, 8),
}
ALL = {
    f"{kernel.__name__}, {name}": (kernel, shape)
    for kernel, shapes in ((GatedDelta, DELTA), (Mamba2, MAMBA2), (ShortConv, SHORT_CONV))
    for name, shape in shapes.items()
}
EVERY = pytest.mark.parametrize(("kernel", "shape"), ALL.values(), ids=ALL)


@pytest.fixture(autouse=True)
def several_threads():
    torch.manual_seed(0)
    workers.set_num_threads(3)
    yield
    workers.set_num_threads(torch.get_num_threads())


@EVERY
@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 200])
def test_a_prompt_agrees_with_the_formula(kernel, shape, length):
    Step(shape, prompts=[Sequence(length, 0, NEW, 2)]).check(kernel)


@EVERY
def test_the_sequences_of_a_step_are_independent(kernel, shape):
    Step(shape, ROWS, RAGGED).check(kernel)


@EVERY
def test_the_states_of_a_slot_may_lie_beside_those_of_other_layers(kernel, shape):
    step = Step(shape, ROWS, RAGGED)
    found, after = step.run(kernel)
    states = tuple(it.clone() for it in step.states)

    expected = step.compute(kernel(shape, step.weights), states)

    assert torch.equal(found, expected)
    assert_equal_slots(after, states, range(NUM_SLOTS))


@EVERY
def test_unused_rows_and_steps_of_nothing_write_nothing(kernel, shape):
    check_nothing_written(kernel, shape)


@pytest.mark.parametrize("spread", [0.1, 30.0])
@pytest.mark.parametrize("decay", [-12.0, 0.0, 3.0, 60.0])
def test_weak_and_strong_decays_are_exact(decay, spread):
    check_decays(GatedDelta, DELTA["two heads of a key"], decay, gate_spread=spread)
    check_decays(Mamba2, MAMBA2["two groups"], decay, spread=min(spread, 10))


@EVERY
@pytest.mark.parametrize(
    "ends", [(1, 2, 3, 90), (89, 90), (64, 65, 90), (7, 30, 31, 90), tuple(range(1, 91))], ids=str
)  # fmt: skip
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(kernel, shape, ends):
    check_divided(kernel, shape, ends, rows=True)


@EVERY
def test_the_bits_of_a_sequence_do_not_depend_on_the_others_nor_on_threads(kernel, shape):
    check_alone(kernel, shape, 7, between=lambda: workers.set_num_threads(1))


@EVERY
def test_states_within_a_prompt_are_kept_in_slots_of_their_own(kernel, shape):
    prompts = [Sequence(20), Sequence(90, 5, 1, 2), Sequence(9, 0, NEW, 3)]
    step = Step(shape, [(0, 0), UNUSED], prompts)

    check_kept(kernel, step, {0: 5, 20: 6, 22: 7, 108: 8, 110: 9})


@EVERY
def test_a_sequence_without_tokens_writes_no_state(kernel, shape):
    step = Step(
        shape, prompts=[Sequence(0, 0, NEW, 1), Sequence(4, 0, NEW, 2), Sequence(0, 9, 3, 0)]
    )

    _, states = step.run(kernel)

    assert all(bool(it[[0, 1]].isnan().all()) for it in states)


@EVERY
def test_whole_sequences_begin_with_zeros(kernel, shape):
    step = Step(shape, prompts=[Sequence(12, 0, NEW, 0), Sequence(12, 0, NEW, 1)])
    expected, _ = step.run(kernel)
    inputs = (it if it is None else it.view(2, 12, -1) for it in step.inputs())

    found = kernel(shape, step.weights).dense(*inputs)

    assert torch.equal(found, expected.view(found.shape))


@EVERY
def test_numbers_that_are_not_finite_stay_in_their_sequence(kernel, shape):
    step = Step(shape, [(0, 0), (1, 1)], [Sequence(9, 0, NEW, 7), Sequence(9, 0, NEW, 8)])
    sound, _ = step.run(kernel)
    step.projected[1] = torch.nan
    step.projected[5] = torch.inf

    found, _ = step.run(kernel)

    assert found[1].isnan().all()
    assert found[5:11].isnan().any(-1).all() or isinstance(shape, ShortConvShape)
    for kept in (slice(0, 1), slice(2, 5), slice(11, None)):
        assert torch.equal(found[kept], sound[kept])


@EVERY
def test_the_registry_takes_the_library_on_a_cpu(kernel, shape):
    choice = select(RecurrentProblem(shape, "float32"), CPU)

    assert choice.spec is CPU_LIBRARY
    assert choice.spec.batch_invariant
    assert load_target(choice.spec.targets[type(shape)]) is kernel


@pytest.mark.parametrize(
    ("shape", "changes", "arch", "reason"),
    [
        (SHORT_CONV["a bias"], {}, CATALOGUE["h100"], "needs a CPU"),
        (SHORT_CONV["a bias"], {"trainable": True}, CPU, "not differentiable"),
        (SHORT_CONV["a bias"], {"dtype": "bfloat16"}, CPU, "no bfloat16"),
        (ShortConvShape(40, 3), {}, CPU, "a number of channels of 40 is not a multiple of 16"),
        (ShortConvShape(48, 9), {}, CPU, "9 taps, more than 8"),
        (GatedDeltaShape(2, 1, 40, 16, 4, 1e-6), {}, CPU, "a key dim of 40 is not a multiple of"),
        (GatedDeltaShape(2, 1, 512, 16, 4, 1e-6), {}, CPU, "a key dim of 512, more than 256"),
        (Mamba2Shape(2, 24, 16, 1, 4, 1e-6), {}, CPU, "a head dim of 24 is not a multiple of 16"),
        (Mamba2Shape(2, 16, 16, 4, 4, 1e-6), {}, CPU, "a group of 8 is not a multiple of 16"),
    ],
    ids=str,
)
def test_other_mixers_are_refused_with_the_reason(shape, changes, arch, reason):
    problem = dataclasses.replace(RecurrentProblem(shape, "float32"), **changes)

    assert reason in "; ".join(unsupported(problem, arch))
    assert CPU_LIBRARY not in (select(problem, arch).spec,)


def test_without_the_library_pytorch_computes_the_mixer(monkeypatch):
    monkeypatch.setattr("kernels.recurrent.cpu_library.load", lambda: "there is none")
    problem = RecurrentProblem(ShortConvShape(64, 5), "float32")

    assert unsupported(problem, CPU) == ("there is none",)
    assert select.__wrapped__(problem, CPU).spec is PYTORCH
