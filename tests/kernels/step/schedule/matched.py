"""Compares what a program publishes with the weights, keys and values that its producer copied for it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels.step.gpu import step_constants
from tests.kernels.step.schedule.events import Access, Record, require
from tests.kernels.step.schedule.shared_memory import Copy, Ring, RowsOfWeights, Use
from tests.kernels.step.schedule.values import Pointer

_MATRICES: Final = {
    "qkv": "qkv", "between": "output", "inner": "gate_up", "hidden": "down", "logits": "head",
}  # fmt: skip
"""The matrix whose products a buffer holds."""
_STORED: Final = -2
_NOT_CACHED: Final = -1


class Matcher:
    """Compares the numbers that a program stores with the uses of its ring from which they were computed.

    Args:
        record: of the launch.
    """

    ring: Ring

    def __init__(self, record: Record) -> None:
        self._record = record
        self.c = c = record.c
        inputs = {
            "qkv": c.HIDDEN, "output": c.HEADS * c.D, "gate_up": c.HIDDEN, "down": c.INNER, "head": c.HIDDEN,
        }  # fmt: skip
        self._row_sizes = {}
        self._scale_sizes = {}
        for name, size in inputs.items():
            fp8 = name != "head" and c.FP8_WEIGHTS
            self._row_sizes[name] = step_constants.stored_size(size, fp8)
            self._scale_sizes[name] = step_constants.scale_stride(size, fp8, c.PART_SCALES)
        self._outputs = {
            "qkv": (c.HEADS + 2 * c.KV_HEADS) * c.D, "between": c.HIDDEN, "inner": c.INNER, "hidden": c.HIDDEN,
            "logits": c.VOCAB,
        }  # fmt: skip
        self._rows: dict[tuple[str, int], tuple[int, ...]] = {}

    def stored(self, event: Access, uses: frozenset[int]) -> None:
        """Compare numbers that are stored with the uses of the ring that they were computed from."""
        if event.buffer in _MATRICES:
            self._product(event, uses)
        elif event.buffer in ("parts", "logs"):
            self._attention(event, uses)

    def end_program(self) -> None:
        """Require that something has been computed from each use of the ring."""
        for number, use in enumerate(self.ring.uses):
            require(use.product, "nothing is computed from use", number, "of the ring")

    def _product(self, event: Access, uses: frozenset[int]) -> None:
        """Require that rows of a product are those of the weights, in all of their columns."""
        name = _MATRICES[event.buffer]
        layer = 0 if name == "head" else event.layer
        rows: list[int] = []
        columns: dict[int, list[tuple[int, int]]] = {}
        for number in sorted(uses):
            use = self.ring.uses[number]
            require(not use.product, event.buffer, "uses weights of", use.product, "again")
            require(use.weights is not None, event.buffer, "is computed from no weights")
            use.product = name
            memory, first, found = use.weights
            require(
                memory.name == name and memory.layer == layer,
                event.buffer,
                "of layer",
                layer,
                "is computed from",
                memory.name,
                "of layer",
                memory.layer,
            )
            self._check_scales(use, name, layer, first)
            if not found.begin:
                rows += [first + it for it in found.rows]
            columns.setdefault(first, []).append((found.begin, found.end))
        expected = self._published_rows(event)
        if name == "gate_up":
            expected = (*expected, *(it + self.c.INNER for it in expected))
        require(
            tuple(sorted(set(rows))) == expected,
            "rows",
            expected,
            "of",
            name,
            "are published, computed from rows",
            rows,
        )
        for spans in columns.values():
            ends = [0, *(end for _, end in spans)]
            require(
                [begin for begin, _ in spans] == ends[:-1] and ends[-1] == self._row_sizes[name],
                "rows",
                expected,
                "of",
                name,
                "are multiplied in columns",
                spans,
            )

    def _check_scales(self, use: Use, name: str, layer: int, first: int) -> None:
        block = self._scale_sizes[name] * step_constants.ROWS
        for _, source, _ in use.copies:
            memory = source.memory
            require(
                (memory.name, memory.layer, source.offset // block)
                == (name + "'", layer, first // step_constants.ROWS),
                "rows from",
                first,
                "of",
                name,
                "have other scales",
            )

    def _published_rows(self, event: Access) -> tuple[int, ...]:
        """Return the rows of a matrix whose products are stored; require that they are of all rows of the step."""
        key = event.buffer, event.places
        if key not in self._rows:
            places = self._record.places.sets[event.places]
            rows = np.unique(places % self._outputs[event.buffer])
            require(
                len(places) == len(rows) * self.c.BATCH, f"a part of the rows of {event.buffer}"
            )
            self._rows[key] = tuple(rows.tolist())
        return self._rows[key]

    def _attention(self, event: Access, uses: frozenset[int]) -> None:
        """Require that a split attends adjacent stages of keys; note which, for `proof`."""
        c, record = self.c, self._record
        places = record.places.sets[event.places]
        each = c.D if event.buffer == "parts" else 1
        heads = np.unique(places // each)
        require(len(heads), "keys are attended for no head")
        require(len(heads) * each == len(places), "a part of a head is published")
        rows = np.unique(heads // c.HEADS % c.BATCH)
        require(len(rows) == 1, "heads of several rows are published together")
        row, heads = int(rows[0]), heads % c.HEADS
        stages = sorted(self._stage_of_keys(number, row, event.layer, heads) for number in uses)
        span = (stages[0], stages[-1] + 1) if stages else (0, 0)
        require(stages == list(range(*span)), f"a split of row {row} attends stages {stages}")
        if event.buffer == "parts":
            for number in uses:
                use = self.ring.uses[number]
                require(not use.product, "keys of", use.product, "are attended again")
                use.product = f"row {row} of layer {event.layer}"
            for head in heads.tolist():
                record.attended.setdefault((event.layer, row, head), []).append(span)

    def _stage_of_keys(self, number: int, row: int, layer: int, heads: np.ndarray) -> int:
        """Return which stage of keys a use holds; require that it has the keys and values of a row and some heads."""
        c, position = self.c, int(self._record.positions[row])
        use = self.ring.uses[number]
        keys = self._cached_keys(use, row, layer, heads)
        names = ("keys", "values", *(("key_scales", "value_scales") if c.FP8 else ()))
        require(set(keys) == set(names), f"use {number} of the ring does not hold {names}")
        starts = set()
        for which, name in enumerate(names):
            found = keys[name]
            for slot in self._stored_slots(use, which):
                require(found[slot] == _NOT_CACHED, "a key of the cache is written again")
                found[slot] = _STORED
            cached = found >= 0
            # A stage without cached keys has only keys of the step, which are fewer than a stage: it is the last one.
            start = position // c.KEYS * c.KEYS
            if cached.any():
                slot = int(np.argmax(cached))
                start = int(found[slot]) - slot
            starts.add(start)
            wanted = start + np.arange(c.KEYS)
            require(
                ((found == wanted) | (found == _STORED))[wanted <= position].all()
                and (found[wanted > position] == _NOT_CACHED).all(),
                "row",
                row,
                "attends",
                name,
                found,
                "of",
                start,
                "to",
                position,
            )
        require(len(starts) == 1, f"a stage of row {row} has keys and values of {starts}")
        return starts.pop() // c.KEYS

    def _cached_keys(
        self, use: Use, row: int, layer: int, heads: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return the positions of keys, values and scales in a stage; `_NOT_CACHED` if they are not copied."""
        c, record = self.c, self._record
        found = {}
        parts = {
            "keys": (0,), "values": (1,), "key_scales": (c.DP // 2,), "value_scales": (c.DP // 2 + 1,),
        }  # fmt: skip
        for part, source, mask in use.copies:
            name = source.memory.name
            require(source.memory.layer == layer, f"{name} of another layer than {layer}")
            require(part == parts.get(name), name, "are copied to part", part)
            (element,) = source.terms
            element, shown = np.broadcast_arrays(element + source.offset, mask)
            if name.endswith("_scales"):
                blocks, kv_heads = np.divmod(element // c.BLOCK_SIZE, c.KV_HEADS)
                offsets = element % c.BLOCK_SIZE
            else:
                lines, kv_heads = np.divmod(element[:, 0] // c.D, c.KV_HEADS)
                blocks, offsets = np.divmod(lines, c.BLOCK_SIZE)
                shown = shown[:, 0]
            require(
                (kv_heads[:, None] == heads[None, :] // c.GROUP).all(),
                "heads",
                heads,
                "attend",
                name,
                "of others",
            )
            owners, columns = np.divmod(blocks, record.columns)
            require(
                (owners == record.sequences[row]).all(),
                "row",
                row,
                "attends",
                name,
                "of another sequence",
            )
            require(
                not np.isin((blocks * c.BLOCK_SIZE + offsets)[shown], record.slots).any(),
                "row",
                row,
                "loads",
                name,
                "from the cache that this step writes",
            )
            found[name] = np.where(shown, columns * c.BLOCK_SIZE + offsets, _NOT_CACHED)
        return found

    def _stored_slots(self, use: Use, which: int) -> list[int]:
        """Return the slots of a stage to which keys of the step, values, or scales of these are stored."""
        c = self.c
        if which < 2:
            return [
                it[0] - which * c.KEYS
                for it in use.stored
                if len(it) == 1 and it[0] // c.KEYS == which
            ]
        line = c.DP // 2 + which - 2
        return [it[1] for it in use.stored if len(it) == 2 and it[0] == line]

    def rows_of_weights(self, copies: list[Copy], size: int) -> RowsOfWeights:
        """Return what the parts of a stage hold; the rows of the matrix have `size` stored numbers."""
        require([it.part for it in copies] == [(i,) for i in range(len(copies))], "other parts")
        found = [self._part(it.source, it.mask, size) for it in copies]
        filled = [it for it in found if it.end > it.begin] or found[:1]
        ends = [filled[0].begin, *(it.end for it in filled)]
        require(
            all(it.rows == found[0].rows for it in found)
            and [it.begin for it in filled] == ends[:-1],
            "the parts of a stage do not follow each other",
        )
        return RowsOfWeights(found[0].rows, ends[0], ends[-1])

    def _part(self, source: Pointer, mask: Any, size: int) -> RowsOfWeights:
        rows, columns = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64)
        for term in source.terms:
            require(1 in term.shape, "weights are not copied by rows and columns")
            if term.shape[0] > 1:
                rows = rows + term
            else:
                columns = columns + term
        begin = int(columns[0, 0]) + source.offset
        count = columns.size
        require((np.diff(columns[0]) == 1).all(), "columns are not adjacent")
        require(not (rows % size).any(), "a part begins within a row")
        if mask is not None:
            shown = np.broadcast_to(mask, (rows.size, count))
            count = int(shown[0].sum())
            require(shown[:, :count].all() and not shown[:, count:].any(), "gaps within a part")
        require(count == 0 or begin + count <= size, f"columns of {size} up to {begin + count}")
        return RowsOfWeights(tuple((rows // size).ravel().tolist()), begin, begin + count)
