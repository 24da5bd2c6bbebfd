"""Steps of the gated delta rule with ragged sequences, and their comparison with the formula."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from kernels.recurrent.problem import CHUNK, GatedDeltaShape, RecurrentWeights
from kernels.recurrent.segments import Segments
from tests.kernels.references.gated_delta import gated_delta
from tests.kernels.references.problems import assert_no_worse_than

NEW = -1
"""A slot: zeros are read, or nothing is written."""


class Sequence(NamedTuple):
    """A sequence of a step: its tokens, the position of the first one and its slots."""

    length: int
    start: int = 0
    read: int = NEW
    write: int = NEW


def make_shape(heads=4, groups=2, key_dim=16, value_dim=16, width=4):
    return GatedDeltaShape(heads, groups, key_dim, value_dim, width, 1e-6)


def make_weights(shape, dtype=torch.float32, decay=0.0):
    """Return weights whose logarithms of decays are about -exp(decay) * softplus(gate)."""
    heads = shape.num_heads
    return RecurrentWeights(
        conv=(torch.randn(shape.channels, shape.width) / 2).to(dtype),
        a_log=torch.rand(heads) + decay,
        dt_bias=torch.randn(heads),
        norm=(torch.rand(shape.value_dim) + 0.5).to(dtype),
    )


def empty_states(shape, num_slots):
    """Return states of NaN: views of slots that hold both, and what is of other layers between them."""
    sizes = (
        (shape.width - 1, shape.channels),
        (shape.num_heads, shape.key_dim, shape.value_dim),
    )
    first, second = (math.prod(it) for it in sizes)
    slots = torch.full((num_slots, 32 + first + 32 + second), torch.nan)
    return (
        slots[:, 32 : 32 + first].view(num_slots, *sizes[0]),
        slots[:, 64 + first :].view(num_slots, *sizes[1]),
    )


def copied(shape, states):
    """Return copies of states in separate slots."""
    found = empty_states(shape, len(states[0]))
    for it, state in zip(found, states, strict=True):
        it.copy_(state)
    return found


class Step:
    """A packed step: decode rows, then prompts.

    Args:
        shape: of the mixer.
        rows: the (read, write) slots of decode rows.
        prompts: the prompts, in order.
        dtype: of weights and inputs.
        num_slots: S; slots that no sequence reads hold NaN.
    """

    def __init__(
        self, shape, rows=(), prompts=(), dtype=torch.float32, num_slots=8, decay=0.0, spread=2.0
    ):
        self.shape, self.dtype = shape, dtype
        self.weights = make_weights(shape, dtype, decay)
        self.sequences = [Sequence(1, 7, *pair) for pair in rows] + list(prompts)
        self.rows, self.kept_slots = len(rows), None
        total = sum(it.length for it in self.sequences)
        self.projected = torch.randn(total, shape.channels + shape.inner).to(dtype)
        self.gates = (torch.randn(total, 2 * shape.num_heads) * spread).to(dtype)
        self.states = empty_states(shape, num_slots)
        for it in self.sequences:
            if it.read >= 0:
                for state in self.states:
                    state[it.read] = torch.randn_like(state[0])

    @property
    def segments(self):
        lengths = [it.length for it in self.sequences]
        prompts = torch.tensor([0, *lengths[self.rows :]]).cumsum(0).int()
        positions = [torch.arange(it.start, it.start + it.length) for it in self.sequences]
        slots = [(it.read, it.write) for it in self.sequences]
        return Segments(
            self.rows,
            prompts,
            torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
            torch.tensor(slots, dtype=torch.int32).view(-1, 2),
            self.kept_slots,
        )

    def run(self, kernel: Any):
        """Return the result and the states after, of copies of the arguments."""
        states = copied(self.shape, self.states)
        out = kernel(self.shape, self.weights)(
            self.projected.clone(), self.gates.clone(), states, self.segments
        )
        return out, states

    def references(self, dtype, formula=gated_delta):
        """Return what the formula gives for each sequence; None for one without tokens."""
        found, first = [], 0
        for it in self.sequences:
            tokens = slice(first, first + it.length)
            first += it.length
            before = [
                state[it.read] if it.read >= 0 else torch.zeros_like(state[0])
                for state in self.states
            ]
            inputs = self.projected[tokens], self.gates[tokens], *before
            found.append(formula(self.shape, self.weights, *inputs, dtype) if it.length else None)
        return found

    def check(self, kernel: Any, *, plain=torch.float32, **limits):
        """Assert that results and states are as exact as the formula's, and that no other slot changes.

        Args:
            kernel: the class of the kernel.
            plain: dtype in which the formula that the error is compared with computes.
            limits: of `assert_no_worse_than`.
        """
        out, states = self.run(kernel)
        assert out.dtype is self.dtype
        first, written = 0, set()
        both = zip(
            self.sequences, self.references(torch.float64), self.references(plain), strict=True
        )
        for it, truth, same in both:
            tokens = out[first : first + it.length]
            first += it.length
            if truth is None:
                continue
            if it != Sequence(1, 7):
                assert_no_worse_than(tokens, truth.out, same.out.to(self.dtype), **limits)
            if it.write >= 0:
                written.add(it.write)
                for state, kind in zip(states, ("conv_state", "state"), strict=True):
                    pair = getattr(truth, kind), getattr(same, kind)
                    assert_no_worse_than(state[it.write], *pair, **limits)
        for state, before in zip(states, self.states, strict=True):
            kept = [slot for slot in range(len(state)) if slot not in written]
            torch.testing.assert_close(state[kept], before[kept], rtol=0, atol=0, equal_nan=True)


def check_divided(kernel: Any, shape, ends, dtype=torch.float32):
    """Assert that a prompt has the same bits when it is computed by parts, beside others.

    Args:
        kernel: the class of the kernel.
        shape: of the mixer.
        ends: of the parts, multiples of `CHUNK` but the last one.
        dtype: of weights and inputs.
    """
    whole = Step(shape, prompts=[Sequence(ends[-1], 0, NEW, 0)], dtype=dtype)
    out, states = whole.run(kernel)
    now, parts = copied(shape, whole.states), []
    computed = kernel(shape, whole.weights)

    for first, end in itertools.pairwise((0, *ends)):
        prompt = Sequence(end - first, first, 1 if first else NEW, 1)
        step = Step(shape, [(NEW, NEW)], [Sequence(3, 0), prompt], dtype=dtype)
        step.projected[4:], step.gates[4:] = whole.projected[first:end], whole.gates[first:end]
        parts.append(computed(step.projected, step.gates, now, step.segments)[4:])

    assert torch.equal(torch.cat(parts), out)
    for state, other in zip(now, states, strict=True):
        assert torch.equal(state[1], other[0])


def check_alone(kernel: Any, shape, count, dtype=torch.float32):
    """Assert that each of `count` decode rows has the same bits when it is the only sequence of a step."""
    rows = [(i, i) for i in range(count)]
    many = Step(shape, rows, [Sequence(9, 0, NEW, count)], dtype=dtype, num_slots=count + 1)
    out, states = many.run(kernel)
    computed = kernel(shape, many.weights)

    for i in range(count):
        now = copied(shape, many.states)
        row = slice(i, i + 1)
        alone = Step(shape, [rows[i]], num_slots=count + 1)
        found = computed(many.projected[row].clone(), many.gates[row], now, alone.segments)

        assert torch.equal(found[0], out[i])
        for state, other in zip(now, states, strict=True):
            assert torch.equal(state[i], other[i])


def check_kept(kernel: Any, shape, start, length, dtype=torch.float32):
    """Assert that states kept within a prompt have the bits of those after a prompt that ends there."""
    step = Step(
        shape,
        [(NEW, NEW)],
        [Sequence(3, 0), Sequence(length, start, 0, 0), Sequence(2, 0)],
        dtype,
        num_slots=12,
    )
    plain, after = step.run(kernel)
    ends = range(-start % CHUNK or CHUNK, length, CHUNK)
    step.kept_slots = torch.full((length + 5,), NEW, dtype=torch.int32)
    for slot, end in enumerate(ends, 2):
        step.kept_slots[3 + end - 1] = slot

    out, states = step.run(kernel)

    assert torch.equal(out, plain)
    for state, other in zip(states, after, strict=True):
        assert torch.equal(state[0], other[0])
    for slot, end in enumerate(ends, 2):
        alone = Step(shape, prompts=[Sequence(end, start, 0, 1)], dtype=dtype, num_slots=12)
        alone.weights, alone.states = step.weights, step.states
        tokens = slice(4, 4 + end)
        alone.projected, alone.gates = step.projected[tokens], step.gates[tokens]
        _, wanted = alone.run(kernel)
        for state, other in zip(states, wanted, strict=True):
            assert torch.equal(state[slot], other[1])
    assert len(ends) > 0
