"""Finds the sequence that makes steps fail where a step cannot be computed again, because states were replaced.

The sequences of such a step are preempted and begin again at their last snapshots, fewer of them together after each
failure, so that of n sequences the one that makes steps fail is known after about log2(n) failures. It then ends with
an error. A failure with a temporary cause costs time alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as TypingSequence

    from server.engine.core.sequence import Sequence


class Suspects:
    """Owns the sequences one of which may make its step fail. Part of `LiveSequences`.

    A sequence is a suspect from a failed step on, until it has more tokens than it had then. As long as there are any,
    no new sequence is admitted.

    Attributes:
        most: suspects that may run at the same time.
    """

    def __init__(self) -> None:
        self.most = 1
        self._num_tokens: dict[Sequence, int] = {}

    def __bool__(self) -> bool:
        return bool(self._num_tokens)

    def next(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """Return the sequence that is admitted next as long as there are suspects, if `may_run` allows it."""
        return next((it for it in waiting if it.num_preemptions), None)

    def may_run(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Return whether a sequence may run beside those that do."""
        if sequence not in self._num_tokens:
            return sequence.num_preemptions > 0
        return len([it for it in running if it in self._num_tokens]) < self.most

    def note_failure(self, sequences: TypingSequence[Sequence]) -> Sequence | None:
        """Note that a step of these sequences failed.

        Returns:
            The one that makes steps fail, if that is known now.
        """
        suspects = [it for it in sequences if it in self._num_tokens]
        if len(suspects) == 1 and self.most == 1:
            self.discard(suspects[0])
            return suspects[0]
        if not suspects:
            suspects = list(sequences)
            self._num_tokens |= {it: it.num_tokens for it in suspects}
        self.most = max(1, len(suspects) // 2)
        return None

    def clear_advanced(self) -> None:
        """Forget the sequences that have got further than the failed step."""
        advanced = [it for it, count in self._num_tokens.items() if it.num_tokens > count]
        for sequence in advanced:
            del self._num_tokens[sequence]

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that ends."""
        self._num_tokens.pop(sequence, None)
