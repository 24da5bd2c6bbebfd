"""Lets a CPU take decode steps for single launches, for tests of who computes which step."""

import torch

from kernels import PagedBatch
from model.executors import single_launch
from model.executors.layers.network import PagedStep


def replace_single_launch(monkeypatch, launch, counts=(1, *single_launch.ROW_COUNTS)):
    """Have decode steps of `counts` sequences computed by `launch(kernel, *arguments of the kernel)`.

    `kernel(*arguments)` computes the step layer by layer; `kernel.rows` is the number of its sequences.
    """

    def unsupported(problem, rows=1):
        return problem.refusals or (() if rows in counts else (f"no kernel of {rows} rows",))

    def bind(model, cache, rows):
        kernel = LayersAsKernel(model, cache, rows)
        return lambda *given: launch(kernel, *given)

    monkeypatch.setattr(single_launch, "unsupported", unsupported)
    monkeypatch.setattr(single_launch, "bind_single_launch", bind)


class LayersAsKernel:
    """Computes a decode step of some sequences layer by layer, with the arguments of the single launch."""

    def __init__(self, model, cache, rows):
        self._model, self._cache, self.rows = model, cache, rows

    def __call__(
        self,
        ids,
        positions,
        _earlier,
        slots,
        table,
        _ropes,
        logits,
        tokens,
        logprobs,
        sampled,
        rows,
    ):
        most = table.shape[1] * self._cache.block_size
        batch = PagedBatch(
            torch.arange(self.rows + 1, dtype=torch.int32),
            (positions + 1).int(),
            table,
            num_tokens=self.rows,
            max_seqlen_q=1,
            max_seqlen_k=most,
        )
        metadata = self._model.attention.metadata(
            slots, self._cache.block_size, batch, None, self._cache.kv_dtype
        )
        layers = self._model.executors.layers
        step = PagedStep(
            None, self._cache, positions, layers.bound, deterministic=False, metadata=metadata
        )
        hidden = layers.hidden_states(step, ids, sampled)
        found = layers.bound.head.argmax(hidden, logits, tokens, logprobs)
        sampled.index_copy_(0, rows, found)
