"""Steps of short convolutions and of Mamba-2 with ragged sequences, and their comparison with the formulas."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from kernels.recurrent.problem import CHUNK, Mamba2Shape, RecurrentWeights, ShortConvShape
from kernels.recurrent.segments import Segments
from tests.kernels.references.mamba2 import mamba2, short_conv
from tests.kernels.references.problems import assert_no_worse_than

NEW = -1
"""A slot: zeros are read, or nothing is written."""
UNUSED = (NEW, NEW)
MAMBA2 = Mamba2Shape(4, 32, 16, 2, 4, 1e-5)
SHORT_CONV = ShortConvShape(48, 3)


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


def sizes(shape):
    """Return the number of elements that a token has in the product, and the shapes of its states."""
    if isinstance(shape, ShortConvShape):
        return 3 * shape.channels, ((shape.width - 1, shape.channels),)
    state = shape.num_heads, shape.head_dim, shape.state_dim
    return shape.inner + shape.channels + shape.num_heads, (
        (shape.width - 1, shape.channels),
        state,
    )


def make_weights(shape, dtype=torch.float32, decay=0.0):
    """Return weights of a mixer; the logarithms of Mamba-2's decays are about -exp(decay) times the step sizes."""
    conv = (torch.randn(shape.channels, shape.width) / 2).to(dtype)
    if isinstance(shape, ShortConvShape):
        bias = torch.randn(shape.channels).to(dtype) if shape.bias else None
        return RecurrentWeights(conv, bias)
    heads = shape.num_heads
    return RecurrentWeights(
        conv=conv,
        conv_bias=torch.randn(shape.channels).to(dtype) if shape.conv_bias else None,
        a_log=torch.rand(heads) + decay,
        dt_bias=torch.randn(heads),
        d=torch.randn(heads),
        norm=None if shape.eps is None else (torch.rand(shape.inner) + 0.5).to(dtype),
    )


def in_slots(states):
    """Return copies of states, [S, ...] each, as a cache has them: those of a slot beside each other."""
    sizes = [state[0].numel() for state in states]
    slots = torch.full((NUM_SLOTS, sum(sizes) + 32), torch.nan)
    found = tuple(
        part.unflatten(1, state.shape[1:])
        for part, state in zip(slots[:, 16:-16].split(sizes, 1), states, strict=True)
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
        spread: of the inputs.
        decay: as for `make_weights`.

    Slots that no sequence reads hold NaN.
    """

    def __init__(self, shape, rows=(), prompts=(), dtype=torch.float32, *, spread=1.0, decay=0.0):
        self.shape, self.dtype = shape, dtype
        self.weights = make_weights(shape, dtype, decay)
        self.sequences = [Sequence(1, 7, *pair) for pair in rows] + list(prompts)
        self.rows, self.kept_slots = len(rows), None
        width, states = sizes(shape)
        total = sum(it.length for it in self.sequences)
        self.projected = (torch.randn(total, width) * spread).to(dtype)
        self.states = tuple(torch.full((NUM_SLOTS, *it), torch.nan) for it in states)
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
        )

    def run(self, kernel: Any):
        """Return the result and the states after, of copies of the arguments."""
        states = in_slots(self.states)
        run = kernel(self.shape, self.weights)
        return run(self.projected.clone(), None, states, self.segments), states

    def references(self, dtype, formula=None):
        """Return what the formula gives for each sequence; None for one without tokens."""
        if formula is None:
            plain = short_conv if isinstance(self.shape, ShortConvShape) else mamba2
            formula = functools.partial(plain, dtype=dtype)
        found, first = [], 0
        for it in self.sequences:
            tokens = self.projected[first : first + it.length]
            first += it.length
            before = tuple(
                state[it.read] if it.read >= 0 else torch.zeros_like(state[0])
                for state in self.states
            )
            found.append(formula(self.shape, self.weights, tokens, before) if it.length else None)
        return found

    def check(self, kernel: Any, *, rounded=None, **limits):
        """Assert that results and states are as exact as the formula's in float32, and that no other slot changes.

        Args:
            kernel: the class of the kernel.
            rounded: another formula that sets the allowed error of prompts.
            limits: of `assert_no_worse_than`.
        """
        out, states = self.run(kernel)
        assert out.dtype is self.dtype
        first, written = 0, set()
        both = zip(
            self.sequences,
            self.references(torch.float64),
            self.references(torch.float32)[: self.rows if rounded else None]
            + (self.references(torch.float32, rounded)[self.rows :] if rounded else []),
            strict=True,
        )
        for it, truth, same in both:
            tokens = out[first : first + it.length]
            first += it.length
            if truth is None:
                continue
            assert_no_worse_than(tokens, truth.out, same.out.to(self.dtype), **limits)
            if it.write >= 0:
                written.add(it.write)
                for three in zip(states, truth.states, same.states, strict=True):
                    assert_no_worse_than(three[0][it.write], *three[1:], **limits)
        for state, before in zip(states, self.states, strict=True):
            kept = [slot for slot in range(len(state)) if slot not in written]
            torch.testing.assert_close(state[kept], before[kept], rtol=0, atol=0, equal_nan=True)


def divided(whole, kernel, ends):
    """Compute the only prompt of a step in parts that end at some tokens, beside others; its state moves from slot 1.

    Returns:
        The result, and the states in slot 1.
    """
    parts, first = [], 0
    run = kernel(whole.shape, whole.weights)
    states = in_slots(whole.states)
    for end in ends:
        pair = (1, 1) if first else (NEW, 1)
        step = Step(
            whole.shape, [UNUSED], [Sequence(3), Sequence(end - first, first, *pair)], whole.dtype
        )
        step.projected[4:] = whole.projected[first:end]
        parts.append(run(step.projected, None, states, step.segments)[4:])
        first = end
    return torch.cat(parts), tuple(state[1] for state in states)


def check_kept(kernel, shape, start, length, dtype=torch.float32):
    """Assert that states kept within a prompt have the bits of those after a prompt that ends there."""
    prompts = [Sequence(3), Sequence(length, start, 0, 0), Sequence(2)]
    step = Step(shape, [UNUSED], prompts, dtype)
    plain, after = step.run(kernel)
    ends = list(enumerate(range(CHUNK - start % CHUNK, length, CHUNK), 2))
    step.kept_slots = torch.full((length + 5,), NEW, dtype=torch.int32)
    for slot, end in ends:
        step.kept_slots[3 + end - 1] = slot

    out, states = step.run(kernel)

    assert torch.equal(out, plain)
    assert ends
    for slot, end in [(0, length), *ends]:
        alone = Step(shape, prompts=[Sequence(end, start, 0, 1)], dtype=dtype)
        alone.weights, alone.states = step.weights, step.states
        alone.projected = step.projected[4 : 4 + end]
        _, wanted = alone.run(kernel)
        for state, other in zip(states, wanted, strict=True):
            assert torch.equal(state[slot], other[1])
    written = {0, *(slot for slot, _ in ends)}
    for state, other in zip(states, after, strict=True):
        rest = [slot for slot in range(NUM_SLOTS) if slot not in written]
        torch.testing.assert_close(state[rest], other[rest], rtol=0, atol=0, equal_nan=True)


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
