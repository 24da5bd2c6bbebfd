"""Finds stop strings in text that arrives piece by piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The position of a stop string in the text.

    Attributes:
        stop: the stop string.
        start: number of characters of the whole text before it.
        end: number of characters of the whole text up to and including it.
    """

    stop: str
    start: int
    end: int


class _Node:
    """A state of the automaton: the longest prefix of a stop string that the text ends with."""

    __slots__ = ("depth", "failure", "match", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.failure: _Node = self
        self.match: str | None = None


class StopChecker:
    """Searches one text for any of several stop strings.

    The match is the stop string that ends first; of several that end at the same character, the longest. It does not
    depend on how the text is cut into pieces. The time is linear in the text, independent of the stop strings.

    Args:
        stop: stop strings, none of them empty; may itself be empty.

    Raises:
        ValueError: a stop string is empty.

    Source: Aho and Corasick 1975.
    """

    __slots__ = ("_firsts", "_length", "_node", "_root")

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError(f"a stop string must not be empty, got {list(stop)}")
        self._root = self._node = _automaton(stop)
        self._firsts = frozenset(self._root.next)
        self._length = 0

    @property
    def safe_length(self) -> int:
        """Number of leading characters that belong to no stop string, whatever follows. Not valid after a match."""
        return self._length - self._node.depth

    def push(self, delta: str) -> StopMatch | None:
        """Search the next piece of the text.

        Args:
            delta: any number of characters. There must be no further call after a match.

        Returns:
            The match that this piece completes, if any.
        """
        root, node = self._root, self._node
        begin, self._length = self._length, self._length + len(delta)
        if node is root and self._firsts.isdisjoint(delta):
            return None
        for end, character in enumerate(delta, begin + 1):
            while character not in node.next and node is not root:
                node = node.failure
            node = node.next.get(character, root)
            if node.match is not None:
                return StopMatch(node.match, end - len(node.match), end)
        self._node = node
        return None


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
            # A shorter stop string may end here too; the node's own, longer one takes precedence.
            child.match = child.match or child.failure.match
            queue.append(child)
    return root
