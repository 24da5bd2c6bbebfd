"""The warp roles of Hopper's one-pass backward as coroutines.

Each warp of the consumers issues products of its own, which end in order after random times; the groups of four warps
of the GPU do so together, so what holds here holds there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.kernels.attention.warp_roles import Barrier, Block, Buffer, RoleError

if TYPE_CHECKING:
    from collections.abc import Iterator

WARPS = 4
"""Of the consumers, in the place of 8: two for each warp group."""


class NamedBarrier:
    """A barrier of the hardware: completes when all warps have arrived, and starts again."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.opened = name, count, 0
        self.present: set[str] = set()

    def arrive(self, who: str) -> int:
        """Arrive, and return how often the barrier must have opened for those who wait."""
        if who in self.present:
            raise RoleError(f"{who} arrives twice at {self.name}")
        self.present.add(who)
        number = self.opened + 1
        if len(self.present) == self.count:
            self.present.clear()
            self.opened += 1
        return number


class Use(NamedTuple):
    """One tile of queries of one head: whether its last rows belong to another sequence."""

    is_partial: bool


class BackwardBlock(Block):
    """One thread block.

    Args:
        uses: the tiles of queries, in order.
        stages: of the ring.
        seed: of all times.
        without: names of waits that are left out.
    """

    def __init__(
        self, uses: list[Use], stages: int, seed: int, without: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(WARPS, seed)
        self.uses, self.stages, self.without = uses, stages, without
        self.k, self.v = Buffer("k"), Buffer("v")
        self.q, self.do = ([Buffer(f"{name}{i}") for i in range(stages)] for name in ("q", "do"))
        self.ds = [Buffer(f"ds{warp}") for warp in range(WARPS)]
        self.kv_full = [Barrier(1), Barrier(1)]
        self.q_full, self.do_full = ([Barrier(1) for _ in range(stages)] for _ in range(2))
        self.released = [NamedBarrier(f"released{i}", WARPS + 1) for i in range(stages)]
        self.all_warps = NamedBarrier("all warps", WARPS)

    def roles(self) -> list[Iterator[None]]:
        return [self.produce(), *(self.consume(warp) for warp in range(WARPS))]

    def run(self) -> None:
        """Run, and find arrivals without a wait."""
        super().run()
        for barrier in (*self.released, self.all_warps):
            if barrier.present:
                raise RoleError(f"arrivals are left at {barrier.name}")

    def await_copy(self, name: str, barrier: Barrier, number: int) -> Iterator[None]:
        if name not in self.without:
            yield from self.wait(barrier, number)

    def sync(self, name: str, barrier: NamedBarrier, who: str) -> Iterator[None]:
        if name not in self.without:
            number = barrier.arrive(who)
            while barrier.opened < number:
                yield
        self.progress += 1

    def produce(self) -> Iterator[None]:
        """Mirror `backward_roles.produce`."""
        self.copy(self.k, "k", self.kv_full[0])
        for used in range(len(self.uses)):
            stage = used % self.stages
            if used >= self.stages:
                yield from self.sync("released", self.released[stage], "producer")
            self.copy(self.q[stage], used, self.q_full[stage])
            yield
            if used == 0:
                self.copy(self.v, "v", self.kv_full[1])
            self.copy(self.do[stage], used, self.do_full[stage])
        for used in range(max(len(self.uses) - self.stages, 0), len(self.uses)):
            yield from self.sync("drain", self.released[used % self.stages], "producer")

    def issue(self, warp: int, *reads: tuple[Buffer, object]) -> None:
        """Issue a product that reads some buffers, each with a tag."""

        def product() -> Iterator[None]:
            for buffer, tag in reads:
                buffer.expect(tag)
                buffer.readers += 1
            yield from self.some_time()
            for buffer, tag in reads:
                buffer.expect(tag)
                buffer.readers -= 1

        self.queues[warp].append(product())

    def outstanding(self, warp: int, most: int) -> Iterator[None]:
        """Wait until at most some products of a warp are in flight."""
        while len(self.queues[warp]) > most:
            yield
        self.progress += 1

    def release(self, used: int, who: str) -> None:
        if "released" not in self.without:
            self.released[used % self.stages].arrive(who)

    def consume(self, warp: int) -> Iterator[None]:
        """Mirror `backward_roles.consume`."""
        who = f"warp {warp}"
        yield from self.await_copy("k_full", self.kv_full[0], 0)
        for used, use in enumerate(self.uses):
            stage, phase = used % self.stages, used // self.stages
            q, do = self.q[stage], self.do[stage]
            yield from self.await_copy("q_full", self.q_full[stage], phase)
            if use.is_partial:
                yield from self.await_copy("do_full", self.do_full[stage], phase)
                for buffer in (q, do):
                    buffer.expect(used)
                    if buffer.readers:
                        raise RoleError(f"{buffer.name} is changed while it is read")
                    yield from self.sync("zeros", self.all_warps, who)
            self.issue(warp, (self.k, "k"), (q, used))
            if used == 0:
                yield from self.await_copy("v_full", self.kv_full[1], 0)
            yield from self.await_copy("do_full", self.do_full[stage], phase)
            self.issue(warp, (self.v, "v"), (do, used))
            yield from self.outstanding(warp, 1)
            if used > 0:
                self.release(used - 1, who)
            q.expect(used)  # the log-sum-exps, which arrive with it
            self.issue(warp, (do, used))
            yield from self.outstanding(warp, 1)
            q.expect(used)
            yield from self.sync("before dS", self.all_warps, who)
            self.ds[warp].overwrite()
            yield from self.some_time()
            self.ds[warp].tag = used
            yield from self.sync("after dS", self.all_warps, who)
            self.issue(warp, (self.k, "k"), *((part, used) for part in self.ds))
            self.issue(warp, (q, used))
            yield from self.outstanding(warp, 1)
        yield from self.outstanding(warp, 0)
        if self.uses:
            self.release(len(self.uses) - 1, who)
        yield from self.sync("end", self.all_warps, who)
        for buffer in (self.k, self.v):
            if buffer.readers:
                raise RoleError(f"{buffer.name} is overwritten while it is read")
