"""Warp roles of a thread block as coroutines: who waits for which barrier, without the arithmetic.

Copies and products end after random times, products of a queue in order. Every buffer has a tag that says what it
holds, so that a role that reads too early, or overwrites too early, is found; and so is a role that waits for ever.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE = 1000
"""Turns in a row in which no role gets past a wait, and nothing is in progress, that mean a deadlock."""


class RoleError(AssertionError):
    """A role used a buffer at the wrong time, or waits for ever."""


@dataclasses.dataclass
class Barrier:
    """An mbarrier that completes a phase after `count` arrivals."""

    count: int
    phase: int = 0
    arrived: int = 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.phase, self.arrived = self.phase + 1, 0

    def is_complete(self, number: int) -> bool:
        """Whether phase `number` is complete, as its parity tells; a wrong answer is a fault."""
        by_parity = (self.phase & 1) != (number & 1)
        if by_parity != (self.phase > number):
            raise RoleError(f"parity of phase {number} is wrong in phase {self.phase}")
        return by_parity


@dataclasses.dataclass
class Buffer:
    """Memory with a tag of its content; None while it is written. `readers` are operations in progress."""

    name: str
    tag: object = None
    readers: int = 0

    def expect(self, tag: object) -> None:
        if self.tag != tag:
            raise RoleError(f"{self.name} has {self.tag}, wanted {tag}")

    def overwrite(self) -> None:
        if self.readers:
            raise RoleError(f"{self.name} is overwritten while it is read")
        self.tag = None


class Block:
    """A thread block.

    Args:
        queues: of products, each of which runs in order.
        seed: of all times.
    """

    def __init__(self, queues: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.queues: list[deque[Iterator[None]]] = [deque() for _ in range(queues)]
        self.copies: list[Iterator[None]] = []
        self.progress = 0

    def roles(self) -> list[Iterator[None]]:
        """Return the roles, each of which does something at every turn."""
        raise NotImplementedError

    def run(self) -> None:
        """Run until every role has ended, each turn in a random one."""
        roles = self.roles()
        turns_without_progress = 0
        while roles:
            before = self.progress
            heads = [queue[0] for queue in self.queues if queue]
            turn = self.random.choice([*roles, *self.copies, *heads])
            try:
                next(turn)
            except StopIteration:
                owner = next(it for it in (roles, self.copies, *self.queues) if turn in it)
                owner.remove(turn)
                self.progress += 1
            is_idle = self.progress == before and not self.copies and not any(self.queues)
            turns_without_progress = turns_without_progress + 1 if is_idle else 0
            if turns_without_progress > _PATIENCE:
                raise RoleError("every role waits for ever")

    def wait(self, barrier: Barrier, number: int) -> Iterator[None]:
        while not barrier.is_complete(number):
            yield
        self.progress += 1

    def some_time(self) -> Iterator[None]:
        for _ in range(self.random.randrange(6)):
            yield

    def copy(self, buffer: Buffer, tag: object, full: Barrier) -> None:
        buffer.overwrite()

        def arrive() -> Iterator[None]:
            yield from self.some_time()
            buffer.tag = tag
            full.arrive()

        self.copies.append(arrive())
