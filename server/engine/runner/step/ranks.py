"""Tensor parallelism in the engine: one rank leads, the others repeat its operations on their part of the model.

    rank 0      schedule, pack, tell, compute, sample          one engine
    rank 1..    receive, compute                               a process each

The leader sends each packed step as bytes before it computes it. The ranks meet in the collective operations of the
model (`model.network.parallel`), so all of them call the same ones in the same order.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec
import torch

from model.executors.columns import Bucket
from model.executors.step import StepInput, StepOutput
from server.engine.runner.step.executor import StepExecutor

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.collective.communicator import Communicator
    from model.decoder import DecoderLM
    from model.device.kv_cache import KVCache
    from model.device.replay import Recorder, Replay

_KEPT_INPUTS: Final = 8


class ComputeStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute a step without a recording.

    Attributes:
        bucket: sizes of the step's arrays.
        data: from `StepInput.to_bytes`.
        capacity: of `SampledTokens.ids`; 0 for none.
        scores: whether to compute the logits too; else `ScoreHidden` and `ComputeLogits` follow.
    """

    bucket: Bucket
    data: bytes
    capacity: int
    scores: bool


class ScoreHidden(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the logits of the last step."""


class ComputeLogits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the logits of `count` rows of the last step's hidden states, from row `first` on."""

    first: int
    count: int
    deterministic: bool


class ShareTokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take over `count` tokens that the leader sampled; see `ComputeStep` for `capacity`."""

    capacity: int
    count: int


class RecordStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Record a step as number `number`; the other fields are those of `ComputeStep`."""

    number: int
    bucket: Bucket
    data: bytes
    capacity: int


class ReplayStep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute a step with the recording of that number."""

    number: int
    data: bytes


RankCommand: TypeAlias = (
    ComputeStep | ScoreHidden | ComputeLogits | ShareTokens | RecordStep | ReplayStep
)


class Ranks(Protocol):
    """The other ranks, as the leader sees them.

    Attributes:
        size: number of ranks, the leader included.
        store: path by which the ranks find each other; see `TorchCommunicator`.
    """

    size: int
    store: str

    def tell(self, command: RankCommand) -> None:
        """Send a command to all other ranks; never blocks."""


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

    def step(self, step: StepInput, sampled: Tensor | None) -> StepOutput:
        """See `StepExecutor.step`."""
        self._ranks.tell(_compute(step, sampled, scores=True))
        return super().step(step, sampled)

    def hidden_states(self, step: StepInput, sampled: Tensor | None) -> Tensor:
        """See `StepExecutor.hidden_states`."""
        self._ranks.tell(_compute(step, sampled, scores=False))
        return super().hidden_states(step, sampled)

    def score(self, step: StepInput, hidden: Tensor) -> StepOutput:
        """See `StepExecutor.score`."""
        self._ranks.tell(ScoreHidden())
        return super().score(step, hidden)

    def logits(self, hidden: Tensor, first: int, count: int, *, deterministic: bool) -> Tensor:
        """See `StepExecutor.logits`."""
        self._ranks.tell(ComputeLogits(first, count, deterministic))
        return super().logits(hidden, first, count, deterministic=deterministic)

    def share_tokens(self, ids: Tensor, count: int) -> None:
        """See `StepExecutor.share_tokens`."""
        self._ranks.tell(ShareTokens(len(ids), count))
        self._communicator.broadcast(ids[:count])

    def record(
        self, recorder: Recorder, step: StepInput, sampled: Tensor, out: StepOutput
    ) -> Replay:
        """See `StepExecutor.record`."""
        number = next(self._numbers)
        self._ranks.tell(RecordStep(number, step.bucket, step.to_bytes(), len(sampled)))
        replay = super().record(recorder, step, sampled, out)

        def replay_on_all() -> None:
            self._ranks.tell(ReplayStep(number, step.to_bytes()))
            replay()

        return replay_on_all


class FollowingExecutor:
    """Repeats the leader's operations on this rank's part of a model.

    Args:
        model: has a communicator.
        kv_cache: of the heads of this rank, on the model's device.
        recorder: for that device.
        most_rows: most rows of logits in a recorded step.
    """

    def __init__(
        self, model: DecoderLM, kv_cache: KVCache, recorder: Recorder | None, most_rows: int
    ) -> None:
        assert model.communicator is not None
        self._model, self._kv_cache, self._recorder = model, kv_cache, recorder
        self._communicator: Communicator = model.communicator
        self._most_rows = most_rows
        self._device = kv_cache.device
        self._sampled: Tensor | None = None
        self._inputs: OrderedDict[Bucket, StepInput] = OrderedDict()
        self._recordings: dict[int, tuple[StepInput, Replay]] = {}
        self._out: StepOutput | None = None
        self._last: tuple[StepInput, Tensor] | None = None

    @torch.inference_mode()
    def run(self, command: RankCommand) -> None:
        """Carry out a command of the leader."""
        match command:
            case ReplayStep():
                step, replay = self._recordings[command.number]
                step.load(command.data)
                replay()
            case ComputeStep():
                self._compute(command)
            case ShareTokens():
                ids = self._tokens(command.capacity)
                assert ids is not None
                self._communicator.broadcast(ids[: command.count])
            case RecordStep():
                self._record(command)
            case ScoreHidden():
                assert self._last is not None
                self._model.score(*self._last)
            case ComputeLogits():
                assert self._last is not None
                rows = self._last[1][command.first : command.first + command.count]
                self._model.logits(rows, deterministic=command.deterministic)

    def _compute(self, command: ComputeStep) -> None:
        bucket = command.bucket
        step = self._inputs.pop(bucket, None) or self._new_input(bucket)
        self._inputs[bucket] = step
        if len(self._inputs) > _KEPT_INPUTS:
            self._inputs.popitem(last=False)
        step.load(command.data)
        sampled = self._tokens(command.capacity)
        if command.scores:
            self._last = None
            self._model.step(step, self._kv_cache, sampled)
        else:
            self._last = step, self._model.hidden_states(step, self._kv_cache, sampled)

    def _record(self, command: RecordStep) -> None:
        assert self._recorder is not None
        step = self._new_input(command.bucket)
        step.load(command.data)
        ids = self._tokens(command.capacity)
        assert ids is not None
        out = self._results().first(step.bucket.num_logits)
        kept = ids.clone()  # as the leader does: the next step may continue from them
        replay = self._recorder.record(lambda: self._model.step(step, self._kv_cache, ids, out))
        ids.copy_(kept)
        self._recordings[command.number] = step, replay

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
            table, rows = self._model.embed_tokens, self._most_rows
            tokens = torch.empty(rows, dtype=torch.int64, device=self._device)
            logits = torch.empty(rows, len(table), dtype=table.dtype, device=self._device)
            self._out = StepOutput(logits, tokens, torch.empty_like(tokens, dtype=torch.float32))
        return self._out


def _compute(step: StepInput, sampled: Tensor | None, *, scores: bool) -> ComputeStep:
    capacity = 0 if sampled is None else len(sampled)
    return ComputeStep(step.bucket, step.to_bytes(), capacity, scores)
