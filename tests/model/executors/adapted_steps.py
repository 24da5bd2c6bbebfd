"""Steps of sequences with adapters, packed as in an engine."""

import torch

from model.adapters.adapter import AdapterReader
from model.adapters.updates import UpdateReader
from model.device.kv_cache import KVCache
from server.engine.core.memory.state_slots import NO_SLOT, SequenceSlots
from server.engine.core.step import DecodeBatch, DecodeRows, ScheduledSequence
from server.engine.runner.step.sampled_tokens import SampledTokens
from server.engine.runner.step.step_input import PackedStep, exact_bucket
from tests.engine.core.bookkeeping import make_sequence

BLOCK_SIZE = 16


def write_adapters(model, config, folders, rank):
    """Reserve a slot for the adapter of each folder, and write it."""
    model.reserve_adapters(len(folders), rank)
    for slot, folder in enumerate(folders):
        write_adapter(model, config, folder, slot)


def write_adapter(model, config, folder, slot):
    """Put the adapter of a folder into a slot."""
    adapter = AdapterReader(config, 256).read(folder)
    model.adapters.write(slot, UpdateReader(config).read(adapter, model.adapters.dtype))


class AdaptedSteps:
    """Computes sequences over a cache of a model, each in blocks of its own."""

    def __init__(self, model, num_sequences=8, most=64):
        self.model = model
        self._columns = -(-most // BLOCK_SIZE)
        state = model.network.state(model.cache_dtype)
        blocks = num_sequences * self._columns
        self.cache = KVCache(state, blocks, BLOCK_SIZE, model.device, num_sequences)
        self._num = 0

    def sequence(self, token_ids, slot=-1):
        """Return a sequence of which nothing is computed yet."""
        number, self._num = self._num, self._num + 1
        found = make_sequence(number, token_ids)
        found.adapter_slot = slot
        found.block_table = [number * self._columns + i for i in range(self._columns)]
        found.slots = SequenceSlots(NO_SLOT, number)
        return found

    def step(self, decode=(), prefill=(), *, deterministic=False):
        """Compute a step.

        Args:
            decode: sequences whose last token is computed, or (sequence, draft).
            prefill: (sequence, first position, number of tokens).
            deterministic: whether it is a deterministic step.

        Returns:
            The logits of all its tokens, [T, V] float32.
        """
        pairs = [it if isinstance(it, tuple) else (it, ()) for it in decode]
        drafts = [draft for _, draft in pairs]
        rows = DecodeRows(
            DecodeBatch([it for it, _ in pairs]),
            [it.num_tokens - 1 for it, _ in pairs],
            len(pairs),
            drafts if any(drafts) else None,
        )
        for it in (*rows.batch.sequences, *(it for it, *_ in prefill)):
            it.deterministic = deterministic
        chunks = [ScheduledSequence(*it, it[2]) for it in prefill]
        bucket = exact_bucket(rows, chunks, BLOCK_SIZE, has_states=bool(self.cache.num_slots))
        packed = PackedStep(bucket, BLOCK_SIZE, self.model.device)
        packed.pack(rows, chunks, SampledTokens(99, self.model.device))
        with torch.inference_mode():
            logits = self.model.step(packed.input, self.cache).logits.float().cpu()
        for it in (*rows.batch.sequences, *(it for it, *_ in prefill)):
            it.slots.read = it.slots.write
        return logits
