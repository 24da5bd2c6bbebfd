"""Runs a decoder of the reference in the C library, over a paged cache that is full of NaN at first."""

import random
from types import SimpleNamespace

import torch

from kernels.cpu.decoder import CPUDecoder, LayerMatrices, StepTensors
from kernels.cpu.library import load
from kernels.cpu.matrix import PackedMatrix
from kernels.rope.pytorch import rope_tables
from kernels.weights import Weight
from tests.kernels.cpu.reference import FORMATS

POSITIONS = 1024


def bind(decoder, threads=2):
    """Return a `CPUDecoder` with the weights of a `tests.kernels.cpu.reference.Decoder`."""
    library = load()
    assert not isinstance(library, str), library

    form = FORMATS[decoder.bits]

    def pack(layer, name, *, gated=False):
        weight = Weight.full(layer[name])
        return PackedMatrix(library, weight, form, layer.get(f"{name}_bias"), gated=gated)

    layers = [
        LayerMatrices(
            pack(layer, "qkv"),
            pack(layer, "output"),
            pack(layer, "gate_up", gated=True),
            pack(layer, "down"),
            layer["input_norm"],
            layer["mlp_norm"],
            layer["q_norm"],
            layer["k_norm"],
        )
        for layer in decoder.layers
    ]
    head = PackedMatrix(library, Weight.full(decoder.head), form)
    embedding = head
    if decoder.embedding is not decoder.head:
        embedding = PackedMatrix(library, Weight.full(decoder.embedding), form)
    return CPUDecoder(decoder.shape, layers, decoder.norm, head, embedding, threads)


class Driver:
    """Runs steps with any chunks of any sequences; blocks come from a shuffled pool."""

    def __init__(self, bound, shape, *, block_size=16, num_blocks=160, dtype=torch.float16):
        self.bound, self.block_size = bound, block_size
        size = (2, num_blocks, block_size, shape.kv_heads, shape.head_dim)
        self.caches = tuple(torch.full(size, torch.nan, dtype=dtype) for _ in shape.windows)
        half = shape.head_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half).double() / half)
        self._rope = rope_tables((torch.arange(POSITIONS)[:, None] * frequencies).float())
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._blocks, self._lengths = {}, {}

    def step(self, chunks, *, hidden=False, queries=1, adapters=None):
        """Run a step with {sequence: token ids}; return {sequence: logits of all its tokens}.

        Sequences with at most `queries` tokens are decode rows. `adapters` has the slots of some sequences.
        """
        ordered = sorted(chunks.items(), key=lambda item: len(item[1]) > queries)
        rows = sum(len(tokens) <= queries for _, tokens in ordered)
        unused = rows * queries - sum(len(tokens) for _, tokens in ordered[:rows])
        ids, positions, slots, of_adapters = [], [], [], []

        def pad():
            of_adapters.extend([-1] * unused)
            ids.extend([0] * unused)
            positions.extend([0] * unused)
            slots.extend([-1] * unused)

        for index, (name, tokens) in enumerate(ordered):
            if index == rows:
                pad()
            start, blocks = self._lengths.get(name, 0), self._blocks.setdefault(name, [])
            while len(blocks) * self.block_size < start + len(tokens):
                blocks.append(self._free.pop())
            for position in range(start, start + len(tokens)):
                block, offset = divmod(position, self.block_size)
                slots.append(blocks[block] * self.block_size + offset)
                positions.append(position)
            ids += tokens
            of_adapters += [(adapters or {}).get(name, -1)] * len(tokens)
            self._lengths[name] = start + len(tokens)
        if rows == len(ordered):
            pad()
        columns = max(len(self._blocks[name]) for name, _ in ordered)
        cu_seqlens, seq_lens, table = self._batch(ordered[:rows], columns)
        prompt_cu_seqlens, prompt_seq_lens, prompt_table = self._batch(ordered[rows:], columns)
        arrays = SimpleNamespace(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=_ints(slots),
            cu_seqlens=cu_seqlens,
            seq_lens=seq_lens,
            block_table=table,
            prompt_cu_seqlens=prompt_cu_seqlens,
            prompt_seq_lens=prompt_seq_lens,
            prompt_block_table=prompt_table,
        )
        step = StepTensors(
            arrays, rows, queries, len(ordered) - rows, columns, None, self.caches, self._rope
        )
        if adapters is not None:
            step = step._replace(slots=_ints(of_adapters))
        self.last = step
        if hidden:
            result = self.bound.project(self.bound.hidden_states(step))
        else:
            result, self.best = self.bound.logits(step, None, len(ids))
        sizes = [len(tokens) for _, tokens in ordered]
        sizes.insert(rows, unused)
        parts = list(result.split(sizes))
        assert parts.pop(rows).isfinite().all()
        return {name: part for (name, _), part in zip(ordered, parts, strict=True)}

    def run(self, tokens, chunks, name=0, adapters=None):
        """Return the logits of a sequence that is computed in chunks of these sizes."""
        assert sum(chunks) == len(tokens)
        at, parts = 0, []
        for size in chunks:
            parts.append(self.step({name: tokens[at : at + size]}, adapters=adapters)[name])
            at += size
        return torch.cat(parts)

    def _batch(self, ordered, columns):
        tables = [self._blocks[name] for name, _ in ordered]
        rows = [table + [-1] * (columns - len(table)) for table in tables]
        lengths = [len(tokens) for _, tokens in ordered]
        return (
            _ints([0, *lengths]).cumsum(0).int(),
            _ints([self._lengths[name] for name, _ in ordered]),
            _ints(rows).view(-1, columns),
        )


def _ints(values):
    return torch.tensor(values, dtype=torch.int32)
