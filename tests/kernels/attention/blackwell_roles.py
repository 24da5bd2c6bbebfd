"""The warp roles of the Blackwell prefill as coroutines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.kernels.attention.warp_roles import Barrier, Block, Buffer

if TYPE_CHECKING:
    from collections.abc import Iterator


class Item(NamedTuple):
    """A work item: its key tiles, and for each softmax group the tiles to pass over first and the tiles it has."""

    count: int
    passed: tuple[int, int]
    mine: tuple[int, int]


class Kernel(Block):
    """One thread block.

    Args:
        items: in the order in which the loading warp fetches them.
        stages: of the rings of keys and values.
        seed: of all times.
        item_readers: arrivals that free a slot of the ring of items.
    """

    def __init__(self, items: list[Item], stages: int, seed: int, item_readers: int = 3) -> None:
        super().__init__(1, seed)
        self.items, self.stages, self.products = items, stages, self.queues[0]
        self.q = Buffer("q")
        self.k = [Buffer(f"k{i}") for i in range(stages)]
        self.v = [Buffer(f"v{i}") for i in range(stages)]
        self.slots = [Buffer(f"item{i}") for i in range(2)]
        self.scores = [Buffer(f"scores{i}") for i in range(2)]
        self.outputs = [Buffer(f"output{i}") for i in range(2)]
        self.q_full, self.q_empty = Barrier(1), Barrier(1)
        self.k_full, self.k_empty, self.v_full, self.v_empty = (
            [Barrier(1) for _ in range(stages)] for _ in range(4)
        )
        self.item_full = [Barrier(1) for _ in range(2)]
        self.item_empty = [Barrier(item_readers) for _ in range(2)]
        self.s_full, self.p_full, self.o_full = ([Barrier(1) for _ in range(2)] for _ in range(3))
        self.finished: list[tuple[int, int]] = []

    def roles(self) -> list[Iterator[None]]:
        return [self.load(), self.multiply(), self.soften(0), self.soften(1)]

    def load(self) -> Iterator[None]:
        """Mirror `load.load_items`."""
        loaded = queries = 0
        for number, item in enumerate([*self.items, None]):
            slot = number % 2
            yield from self.wait(self.item_empty[slot], number // 2 - 1)
            self.slots[slot].overwrite()
            self.slots[slot].tag = number
            self.item_full[slot].arrive()
            for i in range(item.count if item else 0):
                buffer, phase = loaded % self.stages, loaded // self.stages - 1
                yield from self.wait(self.k_empty[buffer], phase)
                self.copy(self.k[buffer], (number, i), self.k_full[buffer])
                if i == 0:
                    yield from self.wait(self.q_empty, queries - 1)
                    self.copy(self.q, number, self.q_full)
                    queries += 1
                yield from self.wait(self.v_empty[buffer], phase)
                self.copy(self.v[buffer], (number, i), self.v_full[buffer])
                loaded += 1

    def next_item(self, number: int) -> Iterator[None]:
        slot = number % 2
        yield from self.wait(self.item_full[slot], number // 2)
        self.slots[slot].expect(number)
        self.slots[slot].readers += 1
        yield from self.some_time()
        self.slots[slot].readers -= 1
        self.item_empty[slot].arrive()

    def commit(self, barrier: Barrier) -> None:
        def arrive() -> Iterator[None]:
            barrier.arrive()
            yield

        self.products.append(arrive())

    def multiply(self) -> Iterator[None]:
        """Mirror `multiply.multiply_items`."""
        used = queries = 0
        my_used = [0, 0]
        for number, item in enumerate(self.items):
            yield from self.next_item(number)
            if item.count:
                yield from self.wait(self.q_full, queries)
                for i in range(item.count + 1):
                    for group in range(2):
                        yield from self.multiply_tile(number, i, used, my_used[group], group)
                    if i < item.count:
                        self.commit(self.k_empty[(used + i) % self.stages])
                    if i > 0:
                        self.commit(self.v_empty[(used + i - 1) % self.stages])
                    if i == item.count - 1:
                        self.commit(self.q_empty)
                used += item.count
                queries += 1
                my_used = [my_used[group] + item.mine[group] for group in range(2)]
        yield from self.next_item(len(self.items))

    def multiply_tile(
        self, number: int, i: int, used: int, my_used: int, group: int
    ) -> Iterator[None]:
        item = self.items[number]
        mine, count = i - item.passed[group], item.mine[group]
        scores, output = self.scores[group], self.outputs[group]
        if 0 < mine <= count:
            tile = used + i - 1
            value = self.v[tile % self.stages]
            yield from self.wait(self.v_full[tile % self.stages], tile // self.stages)
            yield from self.wait(self.p_full[group], my_used + mine - 1)

            def product_of_weights() -> Iterator[None]:
                scores.expect(("weights", number, i - 1))
                value.expect((number, i - 1))
                if mine > 1:
                    output.expect((number, mine - 1))
                output.overwrite()
                value.readers, scores.readers = value.readers + 1, scores.readers + 1
                yield from self.some_time()
                value.readers, scores.readers = value.readers - 1, scores.readers - 1
                output.tag = (number, mine)
                self.o_full[group].arrive()

            self.products.append(product_of_weights())
        if 0 <= mine < count:
            tile = used + i
            key = self.k[tile % self.stages]
            yield from self.wait(self.k_full[tile % self.stages], tile // self.stages)

            def product_of_queries() -> Iterator[None]:
                self.q.expect(number)
                key.expect((number, i))
                scores.overwrite()
                key.readers, self.q.readers = key.readers + 1, self.q.readers + 1
                yield from self.some_time()
                key.readers, self.q.readers = key.readers - 1, self.q.readers - 1
                scores.tag = ("scores", number, i)
                self.s_full[group].arrive()

            self.products.append(product_of_queries())

    def soften(self, group: int) -> Iterator[None]:
        """Mirror `softmax.soften_items`; which tiles need zeros among the values, or a rescaled output, is random."""
        used = my_used = 0
        scores, output = self.scores[group], self.outputs[group]
        for number, item in enumerate(self.items):
            yield from self.next_item(number)
            count = item.mine[group]
            for i in range(count):
                tile, in_item = used + item.passed[group] + i, item.passed[group] + i
                if i in (0, count - 1) and self.random.random() < 0.5:
                    value = self.v[tile % self.stages]
                    yield from self.wait(self.v_full[tile % self.stages], tile // self.stages)
                    value.expect((number, in_item))
                yield from self.wait(self.s_full[group], my_used + i)
                scores.expect(("scores", number, in_item))
                scores.readers += 1
                yield from self.some_time()
                if i > 0 and self.random.random() < 0.3:
                    yield from self.wait(self.o_full[group], my_used + i - 1)
                    output.expect((number, i))
                    output.readers += 1
                    yield from self.some_time()
                    output.readers -= 1
                scores.readers -= 1
                scores.tag = ("weights", number, in_item)
                self.p_full[group].arrive()
            used += item.count
            my_used += count
            if count:
                yield from self.wait(self.o_full[group], my_used - 1)
                output.expect((number, count))
                output.readers += 1
                yield from self.some_time()
                output.readers -= 1
            self.finished.append((number, group))
        yield from self.next_item(len(self.items))
