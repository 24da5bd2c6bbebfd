"""Tensor parallelism in the engine: one rank leads, the others repeat its operations on their part of the model.

    rank 0      schedule, pack, tell, compute, sample          one engine
    rank 1..    receive, compute                               a process each

The leader sends each packed step as bytes before it computes it. The ranks meet in the collective operations of the
model (`model.executors.parallel`), so all of them call the same ones in the same order.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import msgspec
import torch

from kernels.collective.communicator import RankLostError
from model.executors.columns import Bucket
from model.executors.step import StepInput, StepOutput
from server.engine.runner.step.executor import StepExecutor
from server.engine.runner.step.rank_adapters import AdapterRanks

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.collective.communicator import Communicator
    from kernels.collective.endpoint import RankEndpoint
    from model.decoder import DecoderLM
    from model.device.kv_cache import KVCache
    from model.device.replay import Recorder, Replay
    from server.engine.runner.step.rank_adapters import AdapterCommand, FollowingLoader

_KEPT_INPUTS: Final = 8


class RankCommand(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the other ranks do with the leader.

    Attributes:
        data: of the step, from `StepInput.to_bytes`.
        capacity: of `SampledTokens.ids`; 0 for none.
        bucket: of the step; None for that of a recording.
        recording: number of the recording that is made, where there is a bucket, or replayed; None for neither.
        shared: tokens that the leader sampled since the last command, and sends after this one.
    """

    data: bytes
    capacity: int
    bucket: Bucket | None = None
    recording: int | None = None
    shared: int = 0


class Ranks(AdapterRanks, Protocol):
    """The other ranks, as the leader sees them.

    Attributes:
        endpoint: of the leader.
    """

    endpoint: RankEndpoint

    def tell(self, command: RankCommand | AdapterCommand) -> None:
        """Send a command to all other ranks; never blocks."""

    def end_engine(self) -> NoReturn:
        """End this process, because a rank has ended."""


class LeadingExecutor(StepExecutor):
    """Computes with the leader's part of a model, and makes the other ranks do the same.

    Args:
        model: has a communicator.
        kv_cache: on the model's device.
        ranks: the others; each runs a `FollowingExecutor`.
    """

    is_shared = True

    def __init__(self, model: DecoderLM, kv_cache: KVCache, ranks: Ranks) -> None:
        super().__init__(model, kv_cache)
        assert model.communicator is not None
        self._communicator, self._ranks = model.communicator, ranks
        self._numbers = itertools.count()
        self._shared: Tensor | None = None

    def step(self, step: StepInput, sampled: Tensor | None) -> StepOutput:
        """See `StepExecutor.step`."""
        self._tell(step, sampled, step.bucket)
        try:
            return super().step(step, sampled)
        except RankLostError:
            # The requests are not at fault: they are lost with the engine, and may be sent to the next one.
            self._ranks.end_engine()

    def share_tokens(self, ids: Tensor, count: int) -> None:
        """See `StepExecutor.share_tokens`: the ranks get them with the next command, before they are read."""
        self._shared = ids[:count]

    def record(
        self, recorder: Recorder, step: StepInput, sampled: Tensor, out: StepOutput
    ) -> Replay:
        """See `StepExecutor.record`."""
        number = next(self._numbers)
        self._tell(step, sampled, step.bucket, number)
        replay = super().record(recorder, step, sampled, out)

        def replay_on_all() -> None:
            self._tell(step, sampled, None, number)
            replay()

        return replay_on_all

    def _tell(
        self,
        step: StepInput,
        sampled: Tensor | None,
        bucket: Bucket | None,
        recording: int | None = None,
    ) -> None:
        capacity = 0 if sampled is None else len(sampled)
        shared, self._shared = self._shared, None
        count = 0 if shared is None or not capacity else len(shared)
        self._ranks.tell(RankCommand(step.to_bytes(), capacity, bucket, recording, count))
        if count:
            assert shared is not None
            self._communicator.broadcast(shared)


class FollowingExecutor:
    """Repeats the leader's operations on this rank's part of a model.

    Args:
        model: has a communicator.
        kv_cache: of the heads of this rank, on the model's device.
        recorder: for that device.
        most_rows: most rows of logits in a recorded step.
        adapters: of this rank's slots; None if it has none.
    """

    def __init__(
        self,
        model: DecoderLM,
        kv_cache: KVCache,
        recorder: Recorder | None,
        most_rows: int,
        adapters: FollowingLoader | None = None,
    ) -> None:
        assert model.communicator is not None
        self._model, self._kv_cache, self._recorder = model, kv_cache, recorder
        self._communicator: Communicator = model.communicator
        self._most_rows = most_rows
        self._adapters = adapters
        self._device = kv_cache.device
        self._sampled: Tensor | None = None
        self._inputs: OrderedDict[Bucket, StepInput] = OrderedDict()
        self._recordings: dict[int, tuple[StepInput, Replay]] = {}
        self._out: StepOutput | None = None

    @torch.inference_mode()
    def run(self, command: RankCommand | AdapterCommand) -> None:
        """Carry out a command of the leader."""
        if not isinstance(command, RankCommand):
            assert self._adapters is not None
            self._adapters.run(command)
            return
        ids = self._tokens(command.capacity)
        if command.shared:
            assert ids is not None
            self._communicator.broadcast(ids[: command.shared])
        if command.bucket is None:
            assert command.recording is not None
            step, replay = self._recordings[command.recording]
            step.load(command.data)
            replay()
        elif command.recording is not None:
            assert ids is not None
            self._recordings[command.recording] = self._record(command.bucket, command.data, ids)
        else:
            self._model.step(self._loaded(command.bucket, command.data), self._kv_cache, ids)

    def _loaded(self, bucket: Bucket, data: bytes) -> StepInput:
        step = self._inputs.pop(bucket, None) or self._new_input(bucket)
        self._inputs[bucket] = step
        if len(self._inputs) > _KEPT_INPUTS:
            self._inputs.popitem(last=False)
        step.load(data)
        return step

    def _record(self, bucket: Bucket, data: bytes, ids: Tensor) -> tuple[StepInput, Replay]:
        assert self._recorder is not None
        step = self._new_input(bucket)
        step.load(data)
        out = self._results().first(step.bucket.num_logits)
        kept = ids.clone()  # as the leader does: the next step may continue from them
        replay = self._recorder.record(lambda: self._model.step(step, self._kv_cache, ids, out))
        ids.copy_(kept)
        return step, replay

    def _new_input(self, bucket: Bucket) -> StepInput:
        return StepInput(bucket, self._kv_cache.block_size, self._device)

    def _tokens(self, capacity: int) -> Tensor | None:
        """Return the sampled tokens, which the leader replaces only before the first recording."""
        if not capacity:
            return None
        if self._sampled is None or len(self._sampled) != capacity:
            self._sampled = torch.zeros(capacity, dtype=torch.int64, device=self._device)
        return self._sampled

    def _results(self) -> StepOutput:
        """Return memory for the results of all recorded steps, which nobody reads but the steps themselves."""
        if self._out is None:
            model, rows = self._model, self._most_rows
            tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
            logits = torch.empty(rows, model.network.vocab, dtype=model.dtype, device=self._device)
            self._out = StepOutput(logits, tokens, torch.empty_like(tokens, dtype=torch.float32))
        return self._out
