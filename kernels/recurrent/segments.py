"""Which tokens of a packed step belong to which sequence, and the slots of their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.recurrent.problem import RecurrentShape, RecurrentWeights


class Segments:
    """The sequences of a packed step: R decode rows of one token each, then Q prompts one after the other.

    Sequence i < R has token i. Sequence R + j has the tokens R + cu_seqlens[j] up to R + cu_seqlens[j + 1] exclusive.
    An unused row has slots -1 and any token. A sequence without tokens writes no state.

    Args:
        rows: R.
        cu_seqlens: [Q + 1] int32, from 0.
        positions: [T] int64, of each token in its sequence.
        slots: [R + Q, 2] int32: from which the state of each sequence is read and to which it is written, which may be
            the same; -1 reads zeros or writes nothing. No slot is written by one sequence and read by another.
        kept_slots: [T - R] int32: for each token of the prompts, the slot to which the state after it is written too;
            -1 for none, always after the last token of a prompt, and, unless `by_token`, after others than multiples of
            CHUNK tokens of a sequence. Nothing else reads or writes such a slot in the step, except that the first one
            of a prompt may be the slot that it reads. None if no state is kept so, which is all that kernels take whose
            row says so (`RecurrentSpec.keeps`).
        by_token: whether the prompts are decode rows with drafts: each of their tokens, and the state after it, has the
            bits that a decode row of one token gives. R is 0 then. Only for kernels whose row has `several_queries`.

    Attributes: the arguments.
    """

    def __init__(
        self,
        rows: int,
        cu_seqlens: Tensor,
        positions: Tensor,
        slots: Tensor,
        kept_slots: Tensor | None = None,
        *,
        by_token: bool = False,
    ) -> None:
        assert not (by_token and rows), "rows with drafts beside rows of one token"
        self.rows, self.cu_seqlens, self.positions, self.slots = rows, cu_seqlens, positions, slots
        self.kept_slots, self.by_token = kept_slots, by_token
        self._bounds: list[tuple[int, int, int, int]] | None = None
        self._starts: list[int] | None = None

    @property
    def num_prompts(self) -> int:
        """Q."""
        return len(self.cu_seqlens) - 1

    @property
    def bounds(self) -> list[tuple[int, int, int, int]]:
        """Of each prompt: its first token, the token after its last, the slot read and the slot written.

        A prompt after some of whose tokens the state is kept is several, to be computed in their order: one up to each
        of these tokens, which writes the slot that the next one reads. Read from the device once, for kernels that
        PyTorch's operations make up. Nothing is read if there are no prompts, so that steps of decode rows can be
        recorded.
        """
        if not self.num_prompts:
            return []
        if self._bounds is None:
            ends = [self.rows + it for it in self.cu_seqlens.tolist()]
            pairs = self.slots[self.rows :].tolist()
            kept: list[int] = [] if self.kept_slots is None else self.kept_slots.tolist()
            stops = [self.rows + i for i, slot in enumerate(kept) if slot >= 0]
            self._bounds = []
            for first, end, (read, write) in zip(ends[:-1], ends[1:], pairs, strict=True):
                for last in stops:
                    if first <= last < end:
                        slot = kept[last - self.rows]
                        self._bounds.append((first, last + 1, read, slot))
                        first, read = last + 1, slot  # noqa: PLW2901 - the rest of the prompt
                self._bounds.append((first, end, read, write))
        return self._bounds

    @property
    def starts(self) -> list[int]:
        """Position of the first token of each prompt; any number for one without tokens. Read as `bounds` is."""
        if self._starts is None:
            tokens = len(self.positions)
            firsts = [min(first, tokens - 1) for first, *_ in self.bounds]
            self._starts = self.positions[firsts].tolist() if tokens and firsts else firsts
        return self._starts


class RecurrentKernel(Protocol):
    """Computes a recurrent mixer between its products; the target of a row of `kernels.recurrent.registry`."""

    def __init__(self, shape: RecurrentShape, weights: RecurrentWeights) -> None: ...

    def __call__(
        self,
        projected: Tensor,
        gates: Tensor | None,
        states: tuple[Tensor, ...],
        segments: Segments,
        /,
    ) -> Tensor:
        """Compute the tokens of a step; the states that are written replace those before.

        Args:
            projected: [T, ...], what the problem's shape lists; rows contiguous. May be overwritten.
            gates: [T, 2 * H], [b | a] of the gated delta rule; None for others.
            states: [S, ...] float32 each, as the problem's shape lists them.
            segments: of the step.

        Returns:
            [T, inner] in the dtype of `projected`.
        """
