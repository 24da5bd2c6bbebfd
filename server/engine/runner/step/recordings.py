"""Records steps as CUDA graphs and replays them, so that the host makes one launch instead of hundreds.

Each recording belongs to a bucket. A step uses the first recorded bucket that it fits in:

    host arrays  -- one copy -->  device arrays  -- replay -->  logits, argmax tokens

Recordings are made while the engine is idle: first for buckets that steps needed, then in the order of the grid. A
bucket that `_PATIENCE` steps needed is recorded at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch

from model.executors.step import StepOutput
from server.engine.core.step import NO_ROWS
from server.engine.runner.step.buckets import BucketGrid
from server.engine.runner.step.executor import StepExecutor
from server.engine.runner.step.shared_prefix import shared_blocks
from server.engine.runner.step.step_input import PackedStep, exact_bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from model.decoder import DecoderLM
    from model.device.kv_cache import KVCache
    from model.device.replay import Recorder, Replay
    from model.executors.columns import Bucket
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.step import DecodeRows, ScheduledSequence
    from server.engine.runner.step.sampled_tokens import SampledTokens
    from server.engine.runner.step.shared_prefix import SharingRule

log = logging.getLogger("tessera.engine")

_PATIENCE: Final = 3
"""Steps of a bucket that are launched kernel by kernel before the last of them waits for a recording. A recording takes
about as long as these steps lose without it.
"""
_PATIENCE_WITH_A_LARGER: Final = 64
"""The same for steps that use the recording of a larger bucket meanwhile."""


class _Recording:
    """The recording of a bucket.

    Attributes:
        step: input; its arrays must outlive the replay.
        out: the replay writes its results here.
        replay: computes the step.
    """

    def __init__(self, step: PackedStep, out: StepOutput, replay: Replay) -> None:
        self.step, self.out, self.replay = step, out, replay
        self._first: dict[int, StepOutput] = {}

    def first(self, num_rows: int) -> StepOutput:
        """Return the leading rows of `out`. Views are kept: slicing tensors takes longer than the rest of a step."""
        found = self._first.get(num_rows)
        if found is None:
            found = self._first[num_rows] = self.out.first(num_rows)
        return found


_MOST_BEST: Final = 10_000


class RecordedSteps:
    """The recordings of a model's steps. Only the engine's thread uses it.

    Args:
        model: its `step` is recorded.
        kv_cache: its memory must not move.
        recorder: makes the recordings, on the cache's device.
        sampled: steps write their tokens here; its capacity is at least a step's rows plus one.
        limits: of a step.
        sharing_rule: decides whether a shared prefix is read once; None if no kernel supports it.
        executor: computes the steps to be recorded; None for one of the model and the cache.
        deterministic: whether the steps to record in idle time are deterministic.

    Attributes:
        report: called with the number of recordings, and that of those and the waiting ones, before and after each
            recording in idle time.
    """

    def __init__(
        self,
        model: DecoderLM,
        kv_cache: KVCache,
        recorder: Recorder,
        sampled: SampledTokens,
        limits: SchedulerConfig,
        sharing_rule: SharingRule | None = None,
        *,
        executor: StepExecutor | None = None,
        deterministic: bool = False,
    ) -> None:
        self.report: Callable[[int, int], None] = lambda *_: None
        self._executor = executor or StepExecutor(model, kv_cache)
        self._model, self._kv_cache, self._recorder = model, kv_cache, recorder
        self._sampled, self._sharing_rule = sampled, sharing_rule
        self._device = kv_cache.device
        self._has_states = kv_cache.spec.slot_bytes > 0
        self._exact_rows = limits.exact_rows
        self._grid = BucketGrid(
            limits,
            kv_cache.block_size,
            deterministic=deterministic,
            has_states=self._has_states,
        )
        # Two recordings may compute the decode rows and the prompts of a step; their results must not overlap.
        self._decode_out = self._allocate(limits.max_logits)
        self._prompt_out = self._allocate(limits.max_num_seqs)
        self._recordings: dict[Bucket, _Recording] = {}
        # By exact bucket: steps of decode rows whose best bucket has a recording, which is nearly all steps.
        self._best: dict[Bucket, _Recording] = {}
        self._batch, self._num_shared = NO_ROWS.batch, 0
        self._num_missed: dict[Bucket, int] = {}
        self._waiting = list(self._grid.ahead())
        self._closed = False

    @property
    def recorded(self) -> list[Bucket]:
        """The buckets that have a recording, in the order in which they were recorded."""
        return list(self._recordings)

    def compute(
        self, decode: DecodeRows, prefill: Sequence[ScheduledSequence]
    ) -> list[StepOutput] | None:
        """Compute a step with one recording, or with one for its decode rows and one for its prompts.

        Two recordings read the weights twice, which is faster than launching hundreds of kernels one by one.

        Args:
            decode: the decode rows.
            prefill: the other sequences.

        Returns:
            The results of the step's rows of logits, decode rows first, valid until the next step. None if a recording
            is missing and the step must be launched kernel by kernel.
        """
        if decode and prefill:
            # A step never waits for a recording of both kinds to be made.
            found = [self._find(decode, prefill, waits=False)]
            if found[0] is not None:
                return self._run(found, [(decode, prefill)])
        parts: list[tuple[DecodeRows, Sequence[ScheduledSequence]]] = []
        if decode:
            parts.append((decode, ()))
        if prefill:
            parts.append((NO_ROWS, prefill))
        return self._run([self._find(*part, waits=True) for part in parts], parts)

    def record_next(self) -> bool:
        """Make the next waiting recording; return whether there was one."""
        if not self._waiting:
            return False
        made = len(self._recordings)
        self.report(made, made + len(self._waiting))
        self._record(self._waiting.pop(0))
        made = len(self._recordings)
        self.report(made, made + len(self._waiting))
        return True

    def _run(
        self,
        recordings: list[_Recording | None],
        parts: Sequence[tuple[DecodeRows, Sequence[ScheduledSequence]]],
    ) -> list[StepOutput] | None:
        found = [recording for recording in recordings if recording is not None]
        if len(found) < len(recordings):
            return None
        outputs = []
        num_sampled = 0
        for recording, (decode, prefill) in zip(found, parts, strict=True):
            recording.step.pack(decode, prefill, self._sampled, num_sampled)
            try:
                recording.replay()
            except RuntimeError as error:
                if not self._model.executors.replaces_single_launch(error):
                    raise
                self._forget_single_launches()
                return None
            count = decode.num_logits + sum([s.num_logits for s in prefill])
            outputs.append(recording.first(count))
            num_sampled += count
        return outputs

    def _find(
        self,
        decode: DecodeRows,
        prefill: Sequence[ScheduledSequence],
        *,
        waits: bool,
    ) -> _Recording | None:
        """Return the first recording that a step fits in. If the best bucket has none, record it next."""
        block_size = self._kv_cache.block_size
        shared = self._shared_blocks(decode)
        step = exact_bucket(
            decode,
            prefill,
            block_size,
            shared,
            has_states=self._has_states,
            exact_rows=self._exact_rows,
        )
        best = self._best.get(step)
        if best is not None:
            return best
        found = self._first(self._grid.fitting(step), waits=waits)
        if found is None or prefill or len(self._best) == _MOST_BEST:
            return found
        if found.step.input.bucket == next(self._grid.fitting(step)):
            self._best[step] = found
        return found

    def _shared_blocks(self, decode: DecodeRows) -> int:
        """Return `shared_blocks`, which the steps of a batch have in common: all shared blocks are computed before."""
        if decode.batch is not self._batch:
            shared = shared_blocks(decode, self._kv_cache.block_size, self._sharing_rule)
            self._batch, self._num_shared = decode.batch, shared
        return self._num_shared

    def _first(self, buckets: Iterable[Bucket], *, waits: bool) -> _Recording | None:
        own = None
        for bucket in buckets:
            own = bucket if own is None else own
            recording = self._recordings.get(bucket)
            if recording is not None:
                if bucket != own:
                    self._miss(own, _PATIENCE_WITH_A_LARGER if waits else None)
                return recording
        if own is not None:
            self._miss(own, _PATIENCE if waits else None)
        return None

    def _miss(self, bucket: Bucket, patience: int | None) -> None:
        """Count a step without its own recording.

        Args:
            bucket: the bucket to record next.
            patience: number of such steps after which it is recorded at once; None records it in idle time.
        """
        if self._closed:
            return
        if bucket in self._waiting:
            self._waiting.remove(bucket)
        self._waiting.insert(0, bucket)
        if patience is None:
            return
        self._num_missed[bucket] = self._num_missed.get(bucket, 0) + 1
        if self._num_missed[bucket] >= patience:
            self.record_next()

    def _record(self, bucket: Bucket) -> None:
        if bucket in self._recordings:
            return
        out = self._prompt_out if bucket.prompt_seqs else self._decode_out
        try:
            self._recordings[bucket] = self._make(bucket, out.first(bucket.num_logits))
        except RuntimeError as error:
            if self._model.executors.replaces_single_launch(error):
                self._forget_single_launches()
                self._record(bucket)
                return
            # Steps without a recording are launched kernel by kernel, so the service continues.
            self._waiting.clear()
            self._closed = True
            log.warning("no more steps are recorded: %s failed: %s", bucket, error)
        else:
            log.debug("recorded %s", bucket)

    def _forget_single_launches(self) -> None:
        """Drop the recordings of decode rows, which may be single launches; they are made again in idle time."""
        self._best.clear()
        for bucket in [b for b in self._recordings if not b.prompt_seqs]:
            del self._recordings[bucket]
            self._waiting.insert(0, bucket)

    @torch.inference_mode()
    def _make(self, bucket: Bucket, out: StepOutput) -> _Recording:
        """Record a step without sequences, which runs the same kernels and writes to no block."""
        step = PackedStep(bucket, self._kv_cache.block_size, self._device)
        step.pack(NO_ROWS, (), self._sampled)
        ids = self._sampled.ids
        kept = ids.clone()  # the next step may continue from what the last one sampled
        replay = self._executor.record(self._recorder, step.input, ids, out)
        ids.copy_(kept)
        return _Recording(step, out, replay)

    def _allocate(self, num_rows: int) -> StepOutput:
        """Allocate the results of steps with up to `num_rows` rows."""
        model = self._model
        tokens = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        logits = torch.empty(num_rows, model.network.vocab, dtype=model.dtype, device=self._device)
        return StepOutput(logits, tokens, torch.empty_like(tokens, dtype=torch.float32))
