"""What a fuzzing target is, and mutations that several targets use."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import random


class Target(Protocol):
    """Makes cases and checks them. A case is bytes, so that it can be stored when the process dies."""

    def make(self, rng: random.Random) -> bytes:
        """Make a case."""

    def check(self, case: bytes) -> None:
        """Run a case; any exception is a finding."""

    def close(self) -> None:
        """Release what the target holds."""


_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 16, 255, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.0, -0.5,
    1e308, 1e-308, float("nan"), float("inf"), "", "x", "0", "\ud800", "\x00", "a" * 300, "../x", [], {}, [[]], [None],
    [0, -1], {"": None}, {"type": "x"}, "(a+)+b", "(((((a{1,100}){1,100}){1,100})))", "\\p{L}+(?!\\S)|.*",
)  # fmt: skip
_MAX_DEPTH = 200


def mutate_tree(tree: Any, rng: random.Random, keys: tuple[str, ...] = ()) -> Any:
    """Return a copy of a JSON value with one to three changes at random places.

    Args:
        tree: the value.
        rng: decides everything.
        keys: names that are added to objects.
    """
    changed = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        changed = _change(changed, rng, keys)
    return changed


def _places(tree: Any, limit: int = 3000) -> list[tuple[Any, Any]]:
    """List the containers and the keys or indices of a value's parts, nearest to the root first."""
    places: list[tuple[Any, Any]] = []
    pending = [tree]
    for node in pending:
        if isinstance(node, dict | list):
            keys: Any = list(node) if isinstance(node, dict) else range(len(node))
            for key in keys:
                places.append((node, key))
                pending.append(node[key])
        if len(places) > limit:
            break
    return places


def _change(tree: Any, rng: random.Random, keys: tuple[str, ...]) -> Any:
    places = _places(tree)
    if not places:
        return rng.choice(_VALUES)
    # Half of the changes are near the root: deep places, such as the entries of a vocabulary, are many.
    node, key = rng.choice(places[:60] if rng.random() < 0.5 else places)
    kind = rng.randrange(7)
    if kind == 0:
        del node[key]
    elif kind in (1, 2):
        node[key] = copy.deepcopy(rng.choice(_VALUES))
    elif kind == 3:
        other, other_key = rng.choice(places)
        node[key] = copy.deepcopy(other[other_key]) if _has(other, other_key) else None
    elif kind == 4 and isinstance(node, dict):
        node[rng.choice(keys) if keys else "x"] = copy.deepcopy(rng.choice(_VALUES))
    elif kind == 5:
        value: Any = node[key]
        for _ in range(rng.choice([2, 50, _MAX_DEPTH])):
            value = [value] if rng.random() < 0.5 else {"type": value}
        node[key] = value
    elif isinstance(node[key], int) and not isinstance(node[key], bool):
        node[key] += rng.choice([-1, 1, -8, 8, 10**6, -(10**6)])
    elif isinstance(node[key], str):
        node[key] = node[key][: rng.randrange(len(node[key]) + 1)] + rng.choice(
            ["", "x", "\x00", "é"]
        )
    return tree


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)
