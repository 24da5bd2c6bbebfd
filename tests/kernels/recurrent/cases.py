"""Steps of recurrent mixers with ragged sequences, and what every kernel of a mixer must satisfy on them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import torch

from kernels.recurrent.problem import (
    CHUNK,
    GatedDeltaShape,
    Mamba2Shape,
    RecurrentWeights,
    ShortConvShape,
)
from kernels.recurrent.segments import Segments
from tests.kernels.references.gated_delta import gated_delta
from tests.kernels.references.mamba2 import mamba2, short_conv
from tests.kernels.references.problems import assert_no_worse_than

NEW = -1
"""A slot: zeros are read, or nothing is written."""
UNUSED = (NEW, NEW)
MAMBA2 = Mamba2Shape(4, 32, 16, 2, 4, 1e-5)
SHORT_CONV = ShortConvShape(48, 3)
FORMULAS = {ShortConvShape: short_conv, GatedDeltaShape: gated_delta, Mamba2Shape: mamba2}


class Sequence(NamedTuple):
    """A sequence of a step: its tokens, the position of the first one and its slots."""

    length: int
    start: int = 0
    read: int = NEW
    write: int = NEW


RAGGED = [
    Sequence(70, 0, NEW, 0),
    Sequence(0, 64, 1, 6),
    Sequence(5, 128, 2, 3),
    Sequence(1, 0, NEW, NEW),
    Sequence(129, 63, 4, 4),
    Sequence(0, 0, NEW, NEW),
    Sequence(2, 10, 11, 1),
]
ROWS = [(5, 5), UNUSED, (7, 8), (NEW, 9), (10, NEW), UNUSED]
NUM_SLOTS = 12


class Sizes(NamedTuple):
    """Elements of a token in the product, in that of the gates and in the result, and the shapes of the states."""

    projected: int
    gates: int
    inner: int
    states: tuple[tuple[int, ...], ...]


def sizes_of(shape):
    conv = shape.width - 1, shape.channels
    if isinstance(shape, ShortConvShape):
        return Sizes(3 * shape.channels, 0, shape.channels, (conv,))
    width, heads = shape.channels + shape.inner, shape.num_heads
    if isinstance(shape, GatedDeltaShape):
        state = heads, shape.key_dim, shape.value_dim
        return Sizes(width, 2 * heads, shape.inner, (conv, state))
    state = heads, shape.head_dim, shape.state_dim
    return Sizes(width + heads, 0, shape.inner, (conv, state))


def delta_shape(heads=4, groups=2, key_dim=16, value_dim=16, width=4):
    return GatedDeltaShape(heads, groups, key_dim, value_dim, width, 1e-6)


def make_weights(shape, dtype=torch.float32, decay=0.0):
    """Return weights of a mixer; logarithms of decays are about -exp(decay) times softplus(gate) or the step size."""
    conv = (torch.randn(shape.channels, shape.width) / 2).to(dtype)
    if isinstance(shape, ShortConvShape):
        bias = torch.randn(shape.channels).to(dtype) if shape.bias else None
        return RecurrentWeights(conv, bias)
    heads, is_mamba2 = shape.num_heads, isinstance(shape, Mamba2Shape)
    has_bias = is_mamba2 and shape.conv_bias
    normalized = shape.inner if is_mamba2 else shape.value_dim
    return RecurrentWeights(
        conv=conv,
        conv_bias=torch.randn(shape.channels).to(dtype) if has_bias else None,
        a_log=torch.rand(heads) + decay,
        dt_bias=torch.randn(heads),
        d=torch.randn(heads) if is_mamba2 else None,
        norm=None if shape.eps is None else (torch.rand(normalized) + 0.5).to(dtype),
    )


def in_slots(states):
    """Return copies of states, [S, ...] each, as a cache has them: in each slot, with those of other layers between."""
    sizes = [32 + state[0].numel() for state in states]
    slots = torch.full((NUM_SLOTS, sum(sizes) + 32), torch.nan)
    parts = slots[:, :-32].split(sizes, 1)
    found = tuple(
        part[:, 32:].unflatten(1, state.shape[1:])
        for part, state in zip(parts, states, strict=True)
    )
    for new, old in zip(found, states, strict=True):
        new.copy_(old)
    return found


class Step:
    """A packed step: decode rows, then prompts.

    Args:
        shape: of the mixer.
        rows: the (read, write) slots of decode rows.
        prompts: the prompts, in order.
        dtype: of weights and inputs.
        spread: of the product.
        gate_spread: of the gates, where there are any.
        decay: as for `make_weights`.

    Slots that no sequence reads hold NaN.
    """

    def __init__(
        self,
        shape,
        rows=(),
        prompts=(),
        dtype=torch.float32,
        *,
        spread=1.0,
        gate_spread=2.0,
        decay=0.0,
    ):
        self.shape, self.dtype, sizes = shape, dtype, sizes_of(shape)
        self.weights = make_weights(shape, dtype, decay)
        self.sequences = [Sequence(1, 7, *pair) for pair in rows] + list(prompts)
        self.rows, self.kept_slots, self.by_token = len(rows), None, False
        total = sum(it.length for it in self.sequences)
        self.projected = (torch.randn(total, sizes.projected) * spread).to(dtype)
        self.gates = None
        if sizes.gates:
            self.gates = (torch.randn(total, sizes.gates) * gate_spread).to(dtype)
        self.states = tuple(torch.full((NUM_SLOTS, *it), torch.nan) for it in sizes.states)
        for it in self.sequences:
            if it.read >= 0:
                for state in self.states:
                    state[it.read] = torch.randn_like(state[0])

    @property
    def segments(self):
        lengths = [it.length for it in self.sequences]
        positions = [torch.arange(it.start, it.start + it.length) for it in self.sequences]
        slots = [(it.read, it.write) for it in self.sequences]
        return Segments(
            self.rows,
            torch.tensor([0, *lengths[self.rows :]]).cumsum(0).int(),
            torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int32).view(-1, 2),
            self.kept_slots,
            by_token=self.by_token,
        )

    @property
    def tokens(self):
        """The tokens of each sequence, as slices."""
        ends = itertools.accumulate((it.length for it in self.sequences), initial=0)
        return list(itertools.starmap(slice, itertools.pairwise(ends)))

    def inputs(self, tokens=...):
        """Return the product and the gates of some tokens, the latter None where there are none."""
        return self.projected[tokens], None if self.gates is None else self.gates[tokens]

    def take(self, tokens, other, those):
        """Replace the inputs of some tokens by those of another step."""
        self.projected[tokens] = other.projected[those]
        if self.gates is not None:
            self.gates[tokens] = other.gates[those]

    def compute(self, computed, states):
        """Return what a kernel's object gives for copies of the inputs; the states are written."""
        projected, gates = self.inputs()
        gates = None if gates is None else gates.clone()
        return computed(projected.clone(), gates, states, self.segments)

    def run(self, kernel: Any):
        """Return the result and the states after, of copies of the arguments."""
        states = in_slots(self.states)
        return self.compute(kernel(self.shape, self.weights), states), states

    def references(self, dtype, formula=None):
        """Return what the formula gives for each sequence; None for one without tokens."""
        formula, found = formula or FORMULAS[type(self.shape)], []
        for it, tokens in zip(self.sequences, self.tokens, strict=True):
            before = tuple(
                state[it.read] if it.read >= 0 else torch.zeros_like(state[0])
                for state in self.states
            )
            inputs = (one for one in self.inputs(tokens) if one is not None)
            result = (
                formula(self.shape, self.weights, *inputs, before, dtype) if it.length else None
            )
            found.append(result)
        return found

    def check(self, kernel: Any, *, plain=torch.float32, rounded=None, **limits):
        """Assert that results and states are as exact as the formula's, and that no other slot changes.

        Args:
            kernel: the class of the kernel.
            plain: dtype in which the formula that the error is compared with computes.
            rounded: another formula that sets the allowed error of prompts; takes the dtype of the inputs.
            limits: of `assert_no_worse_than`.
        """
        out, states = self.run(kernel)
        assert out.dtype is self.dtype
        written = set()
        allowed = self.references(plain)
        if rounded:
            allowed[self.rows :] = self.references(self.dtype, rounded)[self.rows :]
        exact = self.references(torch.float64)
        for it, tokens, truth, same in zip(
            self.sequences, self.tokens, exact, allowed, strict=True
        ):
            if truth is None:
                continue
            assert_no_worse_than(out[tokens], truth.out, same.out.to(self.dtype), **limits)
            if it.write >= 0:
                written.add(it.write)
                for state, *pair in zip(states, truth.states, same.states, strict=True):
                    assert_no_worse_than(state[it.write], *pair, **limits)
        assert_equal_slots(states, self.states, set(range(NUM_SLOTS)) - written)


def assert_equal_slots(states, others, slots):
    """Assert that some slots hold the same bits, NaN included."""
    for state, other in zip(states, others, strict=True):
        kept = sorted(slots)
        torch.testing.assert_close(state[kept], other[kept], rtol=0, atol=0, equal_nan=True)


def assert_equal_states(states, slot, others, other_slot):
    """Assert that a slot has the bits of another one, and no NaN."""
    for state, other in zip(states, others, strict=True):
        assert torch.equal(state[slot], other[other_slot])


def check_decays(kernel: Any, shape, decay, **spread):
    """Assert that weak and strong decays beside each other are exact; the arguments are those of `Step`."""
    rows, prompts = [(0, 0), (1, 2)], [Sequence(150, 10, 3, 4)]
    step = Step(shape, rows, prompts, decay=decay, **spread)
    step.weights.a_log[0] = -3.0
    step.check(kernel)


def check_mean_error(kernel: Any, step, blocks, factor=1.2):
    """Assert that the mean error is that of the field's formula in the precision of the inputs, for a step of prompts.

    The mean, since the largest errors are those of the few vectors that the norm enlarges.

    Args:
        kernel: the class of the kernel.
        step: its prompts write states.
        blocks: the formula.
        factor: the most by which the mean error may be larger than the formula's.
    """
    out, states = step.run(kernel)
    exact, rounded = step.references(torch.float64), step.references(step.dtype, blocks)
    for it, tokens, truth, same in zip(step.sequences, step.tokens, exact, rounded, strict=True):
        pairs = [(out[tokens], same.out.to(step.dtype), truth.out)]
        found = (state[it.write] for state in states)
        pairs += zip(found, same.states, truth.states, strict=True)
        for ours, plain, wanted in pairs:
            error, allowed = (
                (one.double() - wanted).square().mean().sqrt() for one in (ours, plain)
            )
            assert error <= factor * allowed + 1e-7 * wanted.abs().max()


def check_nothing_written(kernel: Any, shape):
    """Assert that unused rows, whatever their inputs, a prompt without tokens and a step of nothing write no state."""
    for step, length in (
        (Step(shape, [UNUSED] * 3), 3),
        (Step(shape, prompts=[Sequence(0, 0, 1, 1)]), 0),
        (Step(shape), 0),
    ):
        for it in (step.projected, *step.states):
            it[:] = torch.nan

        out, states = step.run(kernel)

        assert out.shape == (length, sizes_of(shape).inner)
        assert all(bool(state.isnan().all()) for state in states)


def check_divided(kernel: Any, shape, ends, dtype=torch.float32, *, rows=False):
    """Assert that a prompt has the same bits when it is computed by parts, beside others, with its state in new slots.

    Args:
        kernel: the class of the kernel.
        shape: of the mixer.
        ends: of the parts.
        dtype: of weights and inputs.
        rows: whether parts of one token that end after an even number of tokens are decode rows.
    """
    whole = Step(shape, prompts=[Sequence(ends[-1], 0, NEW, 0)], dtype=dtype)
    out, states = whole.run(kernel)
    computed = kernel(shape, whole.weights)
    now, parts = in_slots(whole.states), []

    for first, end in itertools.pairwise((0, *ends)):
        # From slot to slot, or in place.
        read, write = first // 3 % 3 + 1 if first else NEW, end // 3 % 3 + 1
        prompt = Sequence(end - first, first, read, write)
        step = Step(shape, [UNUSED], [Sequence(5), prompt], dtype)
        place = slice(6, None)
        if rows and end - first == 1 and end % 2 == 0:
            step, place = Step(shape, [(read, write)], [Sequence(5)], dtype), slice(0, 1)
        step.take(place, whole, slice(first, end))
        parts.append(step.compute(computed, now)[place])

    assert torch.equal(torch.cat(parts), out)
    assert_equal_states(now, ends[-1] // 3 % 3 + 1, states, 0)


def check_alone(kernel: Any, shape, count, dtype=torch.float32, *, between=lambda: None):
    """Assert that each of `count` decode rows has the same bits when it is the only sequence of a step.

    `between` is called before the rows are computed alone.
    """
    rows = [(i, i) for i in range(count)]
    many = Step(shape, rows, [Sequence(9, 0, NEW, 7), Sequence(33, 3, 8, 9)], dtype)
    out, states = many.run(kernel)
    between()
    computed = kernel(shape, many.weights)

    for i in range(count):
        now, alone = in_slots(many.states), Step(shape, [rows[i]], dtype=dtype)
        alone.take(slice(0, 1), many, slice(i, i + 1))

        assert torch.equal(alone.compute(computed, now)[0], out[i])
        assert_equal_states(now, i, states, i)


def check_kept(kernel: Any, step, places):
    """Assert that states kept within prompts have the bits of those after prompts that end there.

    Args:
        kernel: the class of the kernel.
        step: uses neither slot 11 nor those of `places`.
        places: the slot of each token of the prompts after which the state is kept.
    """
    rows, spare = step.rows, NUM_SLOTS - 1
    plain, after = step.run(kernel)
    step.kept_slots = torch.full((len(step.projected) - rows,), NEW, dtype=torch.int32)
    for token, slot in places.items():
        step.kept_slots[token] = slot

    out, states = step.run(kernel)

    assert torch.equal(out, plain)
    assert places
    assert_equal_slots(states, after, set(range(NUM_SLOTS)) - set(places.values()))
    for it, tokens in list(zip(step.sequences, step.tokens, strict=True))[rows:]:
        first = tokens.start - rows
        ends = {at + 1 - first: slot for at, slot in places.items() if 0 <= at - first < it.length}
        if it.write >= 0:
            ends[it.length] = it.write
        for end, slot in ends.items():
            alone = Step(step.shape, (), [Sequence(end, it.start, it.read, spare)], step.dtype)
            alone.weights, alone.states = step.weights, step.states
            alone.take(slice(None), step, slice(tokens.start, tokens.start + end))
            _, wanted = alone.run(kernel)
            assert_equal_states(states, slot, wanted, spare)


def check_kept_blocks(kernel: Any, shape, start, length, dtype=torch.float32):
    """Do what `check_kept` does, with the states after each block of a prompt among others."""
    prompts = [Sequence(3), Sequence(length, start, 0, 0), Sequence(2)]
    ends = range(CHUNK - start % CHUNK, length, CHUNK)
    places = {3 + end - 1: slot for slot, end in enumerate(ends, 2)}
    check_kept(kernel, Step(shape, [UNUSED], prompts, dtype), places)


def check_trained(kernel: Any, shape, length):
    """Assert that two whole sequences and the gradients of their inputs and weights are as exact as the formula's."""
    weights, sizes = make_weights(shape), sizes_of(shape)
    inputs = [torch.randn(2, length, it) for it in (sizes.projected, sizes.gates) if it]
    target = torch.randn(2, length, sizes.inner)

    def gradients(dtype, compute):
        def leaf(it):
            return None if it is None else it.to(dtype, copy=True).requires_grad_()

        used, given = RecurrentWeights(*map(leaf, weights)), [leaf(it) for it in inputs]
        out = compute(used, *given)
        wanted = [*given, *(it for it in used if it is not None)]
        return out.detach(), torch.autograd.grad((out * target).sum(), wanted)

    def formula(dtype):
        def compute(used, *given):
            zeros, computed = tuple(torch.zeros(it) for it in sizes.states), FORMULAS[type(shape)]
            found = (computed(shape, used, *it, zeros, dtype) for it in zip(*given, strict=True))
            return torch.stack([it.out for it in found])

        return gradients(dtype, compute)

    out, found = gradients(torch.float32, lambda used, *given: kernel(shape, used).dense(*given))
    truth, exact = formula(torch.float64)
    same, rounded = formula(torch.float32)

    assert_no_worse_than(out, truth, same)
    for pair in zip(found, exact, rounded, strict=True):
        assert_no_worse_than(*pair, atol=1e-4)


def variants():
    """Return shapes of Mamba-2 that differ from the common one, by what they are for."""
    change = dataclasses.replace
    return {
        "one group": change(MAMBA2, num_groups=1),
        "8 groups": change(MAMBA2, num_heads=8, num_groups=8),
        "heads of 64, states of 128": Mamba2Shape(3, 64, 128, 1, 4, 1e-5),
        "heads of 128, states of 64": Mamba2Shape(2, 128, 64, 2, 4, 1e-5),
        "states of 256": Mamba2Shape(2, 32, 256, 1, 4, 1e-5),
        "sizes that are no powers of two": Mamba2Shape(6, 48, 24, 3, 3, 1e-5),
        "no norm": change(MAMBA2, eps=None),
        "norm before the gate": change(MAMBA2, norm_before_gate=True),
        "limits of steps": change(MAMBA2, dt_limits=(0.2, 0.9)),
        "no bias": change(MAMBA2, conv_bias=False),
        "two taps": change(MAMBA2, width=2),
    }


def check_drafts(kernel: Any, shape, dtype=torch.float32):
    """Assert that the tokens of rows with drafts, and the states after them, have the bits of rows of one token.

    Args:
        kernel: the class of the kernel.
        shape: of the mixer.
        dtype: of weights and inputs.
    """
    rows = [
        Sequence(3, 9, 0, 2),
        Sequence(0),
        Sequence(1, 4, 3, 3),
        Sequence(4, 0, NEW, 7),
        Sequence(7, 30, 8, 10),
        Sequence(2, 3, NEW, NEW),
        Sequence(0),
    ]
    kept = {0: 0, 1: 1, 4: 4, 5: 5, 6: 6, 8: 8, 10: 9, 13: 11}
    step = Step(shape, prompts=rows, dtype=dtype)
    step.by_token = True
    step.kept_slots = torch.full((len(step.projected),), NEW, dtype=torch.int32)
    step.kept_slots[list(kept)] = torch.tensor(list(kept.values()), dtype=torch.int32)
    computed = kernel(shape, step.weights)
    states = in_slots(step.states)

    out = step.compute(computed, states)

    written = set()
    for it, tokens in zip(step.sequences, step.tokens, strict=True):
        now, read = in_slots(step.states), it.read
        for token in range(tokens.start, tokens.stop):
            write = NUM_SLOTS - 2 if token + 1 < tokens.stop else it.write
            alone = Step(shape, [(read, write)], dtype=dtype)
            alone.take(slice(0, 1), step, slice(token, token + 1))
            assert torch.equal(alone.compute(computed, now)[0], out[token])
            slot = kept.get(token, NEW) if token + 1 < tokens.stop else write
            if slot >= 0:
                written.add(slot)
                assert_equal_states(states, slot, now, write)
            read = write
    assert_equal_slots(states, step.states, set(range(NUM_SLOTS)) - written)
