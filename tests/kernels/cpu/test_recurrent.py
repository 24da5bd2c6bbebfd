"""Recurrent mixers of the C library against their formulas, and the bits of divided prompts and of other companies."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.cpu import workers
from kernels.cpu.library import load
from kernels.recurrent.cpu_library import GatedDelta, Mamba2, ShortConv, unsupported
from kernels.recurrent.problem import GatedDeltaShape, Mamba2Shape, RecurrentProblem, ShortConvShape
from kernels.recurrent.registry import CPU_LIBRARY, PYTORCH, select
from kernels.recurrent.segments import Segments
from kernels.selection import load as load_target
from tests.kernels.recurrent import gated_delta_cases, mamba2_cases
from tests.kernels.recurrent.mamba2_cases import NEW, RAGGED, ROWS, UNUSED, Sequence

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


def make(shape, *arguments, **more):
    """Return a step of a mixer."""
    if isinstance(shape, GatedDeltaShape):
        return gated_delta_cases.Step(shape, *arguments, num_slots=mamba2_cases.NUM_SLOTS, **more)
    return mamba2_cases.Step(shape, *arguments, **more)


def run(kernel, step, projected, gates, states):
    """Compute a step over states that are views of slots, as those of the cache."""
    return kernel(step.shape, step.weights)(projected, gates, states, step.segments)


def in_slots(states):
    """Return copies of states that lie beside each other in each slot."""
    sizes = [state[0].numel() for state in states]
    slots = torch.full((len(states[0]), sum(sizes) + 64), torch.nan)
    copies = []
    for size, state in zip(sizes, states, strict=True):
        first = sum(it[0].numel() for it in copies)
        copies.append(slots[:, first : first + size].view(state.shape))
        copies[-1].copy_(state)
    return tuple(copies)


def gates_of(step):
    return getattr(step, "gates", None)


@EVERY
@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 200])
def test_a_prompt_agrees_with_the_formula(kernel, shape, length):
    make(shape, prompts=[Sequence(length, 0, NEW, 2)]).check(kernel)


@EVERY
def test_the_sequences_of_a_step_are_independent(kernel, shape):
    make(shape, ROWS, RAGGED).check(kernel)


@EVERY
def test_the_states_of_a_slot_may_lie_beside_each_other(kernel, shape):
    step = make(shape, ROWS, RAGGED)
    expected, after = step.run(kernel)
    states, gates = in_slots(step.states), gates_of(step)

    found = run(kernel, step, step.projected.clone(), gates, states)

    assert torch.equal(found, expected)
    for state, other in zip(states, after, strict=True):
        torch.testing.assert_close(state, other, rtol=0, atol=0, equal_nan=True)


@EVERY
def test_a_step_of_nothing_gives_nothing(kernel, shape):
    out, _ = make(shape).run(kernel)

    assert len(out) == 0


@pytest.mark.parametrize("spread", [0.1, 30.0])
@pytest.mark.parametrize("decay", [-12.0, 0.0, 3.0, 60.0])
def test_weak_and_strong_decays_are_exact(decay, spread):
    rows, prompts = [(0, 0), (1, 2)], [Sequence(150, 10, 3, 4)]
    for kernel, shape in (
        (GatedDelta, DELTA["two heads of a key"]),
        (Mamba2, MAMBA2["two groups"]),
    ):
        scale = spread if kernel is GatedDelta else min(spread, 10)
        make(shape, rows, prompts, decay=decay, spread=scale).check(kernel)


@EVERY
@pytest.mark.parametrize(
    "ends", [(1, 2, 3, 90), (89, 90), (64, 65, 90), (7, 30, 31, 90), tuple(range(1, 91))], ids=str
)  # fmt: skip
def test_the_bits_do_not_depend_on_where_a_prompt_is_divided(kernel, shape, ends):
    whole = make(shape, prompts=[Sequence(90, 0, NEW, 0)])
    out, after = whole.run(kernel)
    now, parts = in_slots(whole.states), []

    for first, end in itertools.pairwise((0, *ends)):
        # From slot to slot, or in place, as a decode row or a prompt; beside others.
        read, write = (first % 3 + 1 if first else NEW), end % 3 + 1
        mine = [(read, write)], [Sequence(5)]
        if end - first > 1 or end % 2:
            mine = [UNUSED], [Sequence(5), Sequence(end - first, first, read, write)]
        step = make(shape, *mine)
        step.weights = whole.weights
        place = slice(0, 1) if len(mine[1]) == 1 else slice(6, None)
        step.projected[place] = whole.projected[first:end]
        gates = gates_of(step)
        if gates is not None:
            gates[place] = whole.gates[first:end]
        parts.append(run(kernel, step, step.projected, gates, now)[place])

    assert torch.equal(torch.cat(parts), out)
    for state, other in zip(now, after, strict=True):
        assert torch.equal(state[90 % 3 + 1], other[0])


@EVERY
def test_the_bits_of_a_sequence_do_not_depend_on_the_others_nor_on_threads(kernel, shape):
    many = make(shape, [(i, i) for i in range(7)], [Sequence(9, 0, NEW, 7), Sequence(33, 3, 8, 9)])
    out, states = many.run(kernel)

    workers.set_num_threads(1)
    for i in range(7):
        now, alone = in_slots(many.states), make(shape, [(i, i)])
        alone.weights, gates = many.weights, gates_of(many)
        gates = None if gates is None else gates[i : i + 1]
        found = run(kernel, alone, many.projected[i : i + 1].clone(), gates, now)

        assert torch.equal(found[0], out[i])
        for state, other in zip(now, states, strict=True):
            assert torch.equal(state[i], other[i])


@EVERY
def test_states_within_a_prompt_are_kept_in_slots_of_their_own(kernel, shape):
    step = make(
        shape, [(0, 0), UNUSED], [Sequence(20), Sequence(90, 5, 1, 2), Sequence(9, 0, NEW, 3)]
    )
    expected, after = step.run(kernel)
    plain, states, gates = step.segments, in_slots(step.states), gates_of(step)
    kept = torch.full((119,), -1, dtype=torch.int32)
    places = {0: 5, 20: 6, 22: 7, 108: 8, 110: 9}
    for token, slot in places.items():
        kept[token] = slot
    step_segments = Segments(plain.rows, plain.cu_seqlens, plain.positions, plain.slots, kept)

    found = kernel(shape, step.weights)(step.projected.clone(), gates, states, step_segments)

    assert torch.equal(found, expected)
    for state, other in zip(states, after, strict=True):
        assert torch.equal(state[[0, 2, 3]], other[[0, 2, 3]])
    for token, slot in places.items():
        first = max(it for it in (0, 20, 110) if it <= token)
        read = {0: NEW, 20: 1, 110: NEW}[first]
        part = make(shape, prompts=[Sequence(token + 1 - first, 0, read, 4)])
        part.weights, now = step.weights, in_slots(step.states)
        tokens = slice(2 + first, 3 + token)
        its = None if gates is None else gates[tokens]
        run(kernel, part, step.projected[tokens].clone(), its, now)
        for state, other in zip(states, now, strict=True):
            assert torch.equal(state[slot], other[4])


@EVERY
def test_a_sequence_without_tokens_writes_no_state(kernel, shape):
    step = make(
        shape, prompts=[Sequence(0, 0, NEW, 1), Sequence(4, 0, NEW, 2), Sequence(0, 9, 3, 0)]
    )

    _, states = step.run(kernel)

    assert all(bool(it[[0, 1]].isnan().all()) for it in states)


@EVERY
def test_whole_sequences_begin_with_zeros(kernel, shape):
    step = make(shape, prompts=[Sequence(12, 0, NEW, 0), Sequence(12, 0, NEW, 1)])
    expected, _ = step.run(kernel)
    gates = gates_of(step)
    inputs = (it if it is None else it.view(2, 12, -1) for it in (step.projected, gates))

    found = kernel(shape, step.weights).dense(*inputs)

    assert torch.equal(found, expected.view(found.shape))


@EVERY
def test_numbers_that_are_not_finite_stay_in_their_sequence(kernel, shape):
    step = make(shape, [(0, 0), (1, 1)], [Sequence(9, 0, NEW, 7), Sequence(9, 0, NEW, 8)])
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
