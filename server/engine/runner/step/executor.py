"""Computes packed steps with a model and its KV cache: the operations that all ranks of a model take part in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from model.decoder import DecoderLM
    from model.device.kv_cache import KVCache
    from model.device.replay import Recorder, Replay
    from model.executors.step import StepInput, StepOutput


class StepExecutor:
    """Computes with a model that is whole.

    Attributes:
        is_shared: whether other processes compute parts of the model. An operation that fails then leaves the group in
            an unknown state.

    Args:
        model: in evaluation mode.
        kv_cache: on the model's device.
    """

    is_shared = False

    def __init__(self, model: DecoderLM, kv_cache: KVCache) -> None:
        self._model, self._kv_cache = model, kv_cache

    def step(self, step: StepInput, sampled: Tensor | None) -> StepOutput:
        """Compute what a step's bucket wants; see `DecoderLM.step`."""
        return self._model.step(step, self._kv_cache, sampled)

    def share_tokens(self, ids: Tensor, count: int) -> None:
        """Make the first `count` tokens of `SampledTokens.ids` known to all ranks."""

    def record(
        self, recorder: Recorder, step: StepInput, sampled: Tensor, out: StepOutput
    ) -> Replay:
        """Record a step; see `DecoderLM.step`.

        Args:
            recorder: for the model's device.
            step: a replay reads its device arrays.
            sampled: a replay reads and writes it.
            out: a replay writes it.

        Returns:
            Computes the step that `step` contains then.
        """
        return recorder.record(lambda: self._model.step(step, self._kv_cache, sampled, out))
