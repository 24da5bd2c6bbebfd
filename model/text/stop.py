"""Finds stop strings in text that arrives piece by piece. Knows neither tokens nor what is done with a match."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Where a stop string was completed.

    Attributes:
        stop: the stop string.
        start: characters of the whole text before it.
        end: characters of the whole text up to and including it.
    """

    stop: str
    start: int
    end: int


class _Node:
    """The longest beginning of a stop string that the text ends with."""

    __slots__ = ("depth", "failure", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.failure: _Node = self
        self.match: str | None = None


class StopChecker:
    """Watches one text for any of several stop strings.

    The match is the one completed first; of those completed by the same character, the longest. That does not
    depend on how the text was cut into pieces. Work is proportional to the text, whatever the stop strings are.

    Owns the text that may still turn out to be the beginning of a stop string, and nothing before it.

    Args:
        stop: stop strings, none of them empty. None at all is fine: nothing is then held back.

    Raises:
        ValueError: a stop string is empty.

    Source: Aho and Corasick 1975.
    """

    __slots__ = ("_firsts", "_held", "_length", "_node", "_root", "match")

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError(f"a stop string must not be empty, got {list(stop)}")
        self._root = self._node = _automaton(stop)
        self._firsts = frozenset(self._root.next)
        self._length = 0
        self._held: list[str] = []
        self.match: StopMatch | None = None

    @property
    def safe_length(self) -> int:
        """Characters of the whole text, from its beginning, that belong to no stop string whatever comes next."""
        return self._length - self._node.depth if self.match is None else self.match.start

    def push(self, delta: str) -> StopMatch | None:
        """Take in the next piece of the text.

        Args:
            delta: any number of characters. Must not be called again after a match.

        Returns:
            The match that this piece completes, if any; what follows it in `delta` is dropped.
        """
        assert self.match is None, self.match
        if self._node is self._root and self._firsts.isdisjoint(delta):
            self._length += len(delta)
            self._held.append(delta)
            return None
        root, node = self._root, self._node
        for i, character in enumerate(delta):
            while character not in node.next and node is not root:
                node = node.failure
            node = node.next.get(character, root)
            if node.match is not None:
                end = self._length + i + 1
                self.match = StopMatch(node.match, end - len(node.match), end)
                delta = delta[: i + 1]
                break
        self._node = node
        self._length += len(delta)
        self._held.append(delta)
        return self.match

    def release(self) -> str:
        """Return the text that has become safe to show since the last call; after a match, what precedes it."""
        held = "".join(self._held)
        cut = len(held) - (self._length - self.safe_length)
        self._held = [held[cut:]]
        return held[:cut]

    def flush(self) -> str:
        """Return what is left at the end of the text: without a match, nothing needs to be held back any more."""
        self._node = self._root
        return self.release()


def _automaton(stop: Sequence[str]) -> _Node:
    root = _Node(0)
    for string in stop:
        node = root
        for character in string:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.match = string
    queue = deque(root.next.values())
    for child in queue:
        child.failure = root
    while queue:
        node = queue.popleft()
        for character, child in node.next.items():
            failure = node.failure
            while character not in failure.next and failure is not root:
                failure = failure.failure
            child.failure = failure.next.get(character, root)
            # A shorter stop string that ends here too; the node's own, longer one goes first.
            child.match = child.match or child.failure.match
            queue.append(child)
    return root
