"""Runs a DecoderLM over a paged cache as an engine does, for tests."""

import itertools
import random

import torch

from kernels import PagedBatch
from kernels.recurrent.segments import Segments
from model.device.kv_cache import KVCache

BLOCK_SIZE = 4
NUM_SLOTS = 32


def new_cache(model, num_blocks, block_size, dtype=None):
    """Return a cache for a model, on its device, by default of its dtype."""
    state = model.network.state(dtype or model.dtype)
    return KVCache(state, num_blocks, block_size, model.device, num_slots=NUM_SLOTS)


class PagedDriver:
    """Runs steps with arbitrary chunks of arbitrary sequences; blocks come from a shuffled pool."""

    def __init__(self, model, num_blocks=160, cache_dtype=None):
        self.model = model
        self.device = model.device
        self.cache = new_cache(model, num_blocks, BLOCK_SIZE, cache_dtype)
        for layer in (*self.cache.layers, *self.cache.scales):
            if layer is not None:
                layer.fill_(float("nan"))
        for state in itertools.chain(*self.cache.fixed):
            state.fill_(float("nan"))
        self._free = list(range(num_blocks))
        random.Random(0).shuffle(self._free)
        self._blocks = {}
        self._lengths = {}
        self._slots = {}

    def step(self, chunks):
        """Run a step with {sequence: token ids}; return {sequence: logits [tokens, V]}.

        Sequences with one token are decode rows, the others prefill rows.
        """
        ordered = sorted(chunks.items(), key=lambda item: len(item[1]) > 1)
        num_decode = sum(len(tokens) == 1 for _, tokens in ordered)
        ids, positions, slots, states = [], [], [], []
        for name, tokens in ordered:
            start = self._lengths.get(name, 0)
            slot = self._slots.setdefault(name, len(self._slots))
            states.append([slot if start else -1, slot])
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * BLOCK_SIZE < start + len(tokens):
                blocks.append(self._free.pop())
            for position in range(start, start + len(tokens)):
                block, offset = divmod(position, BLOCK_SIZE)
                slots.append(blocks[block] * BLOCK_SIZE + offset)
                positions.append(position)
            ids += tokens
            self._lengths[name] = start + len(tokens)
        metadata = self.model.attention.metadata(
            self._ints(slots),
            BLOCK_SIZE,
            self._batch(ordered[:num_decode]),
            self._batch(ordered[num_decode:]),
            self.cache.kv_dtype,
        )
        with torch.inference_mode():
            tokens, at = (torch.tensor(x, device=self.device) for x in (ids, positions))
            lengths = [len(it) for _, it in ordered[num_decode:]]
            segments = Segments(
                num_decode, self._ints([0, *lengths]).cumsum(0).int(), at, self._ints(states)
            )
            hidden = self.model.executors.layers.paged(tokens, at, self.cache, metadata, segments)
            logits = self.model.logits(hidden)
        parts = logits.split([len(tokens) for _, tokens in ordered])
        return {name: part for (name, _), part in zip(ordered, parts, strict=True)}

    def _batch(self, ordered):
        if not ordered:
            return None
        lengths = [len(tokens) for _, tokens in ordered]
        tables = [self._blocks[name] for name, _ in ordered]
        width = max(map(len, tables))
        seq_lens = [self._lengths[name] for name, _ in ordered]
        return PagedBatch(
            cu_seqlens_q=self._ints([0, *lengths]).cumsum(0).int(),
            seq_lens=self._ints(seq_lens),
            block_table=self._ints([table + [0] * (width - len(table)) for table in tables]),
            num_tokens=sum(lengths),
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(seq_lens),
        )

    def _ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def logits_in_chunks(model, tokens, chunk, cache_dtype=None):
    """Return the logits [S, V] of one sequence, computed `chunk` tokens at a time."""
    driver = PagedDriver(model, cache_dtype=cache_dtype)
    parts = [
        driver.step({0: tokens[start : start + chunk]})[0] for start in range(0, len(tokens), chunk)
    ]
    return torch.cat(parts)


def greedy(model, prompt, steps, cache_dtype=None):
    """Generate `steps` tokens greedily; return them and their logits [steps, V]."""
    driver = PagedDriver(model, cache_dtype=cache_dtype)
    tokens, rows = list(prompt), []
    new = tokens
    for _ in range(steps):
        rows.append(driver.step({0: new})[0][-1])
        new = [int(rows[-1].argmax())]
        tokens += new
    return tokens[len(prompt) :], torch.stack(rows)
