"""Records that the engine exchanges with its front ends: msgspec structs of plain data.

`FrontEndMessage` goes to the engine, `EngineMessage` comes from it. `server.engine.link` transports them between
processes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Final

import msgspec

from server.engine.core.plan_report import PlanReport
from server.engine.core.request import FinishReason, GenerateRequest, SequenceUsage, TokenEvent
from server.engine.settings import EngineSettings

MAX_LISTED_ADAPTERS: Final = 32
"""Names of adapters in a list of `EngineStats`."""
_CPU_LORAS: Final = 4
"""Adapters in the memory of the host for each slot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(EngineSettings):
    """Configuration of an engine: its settings, and what the service knows beside them.

    Attributes:
        model_path: checkpoint folder on this machine.
        model_id: name of the model as the operator gave it.
        engine: number of this engine among those of the service, from 0.
        num_engines: engines of the service. On a CPU they share processors and memory by default.
    """

    model_path: str
    model_id: str
    engine: int = 0
    num_engines: int = 1

    @property
    def num_host_adapters(self) -> int:
        """Adapters that the memory of the host holds; 0 without slots for adapters."""
        if not self.max_loras:
            return 0
        return max(self.max_loras, self.max_cpu_loras or _CPU_LORAS * self.max_loras)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a started engine; constant until it is restarted.

    Attributes:
        quantization: of the weights: "none", "fp8", "int8", "int4", or the formats in which the checkpoint has them.
        max_model_len: limit of prompt and output tokens by the model.
        max_total_tokens: limit of one request's tokens: the smaller of `max_model_len` and the KV cache's capacity.
        num_blocks: blocks of `block_size` tokens in the KV cache.
        kv_cache_dtype: PyTorch's name of the KV cache's dtype.
        plan: the attention kernels in use, and why.
        startup_seconds: duration of each start-up phase, in order.
        versions: versions of the libraries that the results depend on.
        max_draft_tokens: tokens that are proposed at once, 0 for none.
        exact_rows: of `SchedulerConfig`: the tokens up to which a step may have drafts of any request.
        engine: number of the engine among those of the service.
        pid: of the engine's process, of rank 0 with `--tensor-parallel`; 0 if it runs in the front end's.
        max_loras: slots for adapters; 0 if it takes none.
        max_lora_rank: the largest rank of an adapter.
    """

    model_id: str
    device: str
    dtype: str
    quantization: str
    vocab_size: int
    max_model_len: int
    max_total_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    num_parameters: int
    plan: PlanReport
    startup_seconds: dict[str, float]
    versions: dict[str, str]
    max_draft_tokens: int = 0
    exact_rows: int = 1
    engine: int = 0
    pid: int = 0
    max_loras: int = 0
    max_lora_rank: int = 0


class EngineTotals(msgspec.Struct, frozen=True, array_like=True):
    """Counters that are sent a few times per second, not with each step.

    Attributes:
        prefill_steps, decode_steps: numbers of the steps with and without a prefill, by bucket of
            `accounting.STEP_SECONDS_BOUNDS`.
        accepted_by_place: accepted tokens of drafts by their place.
        num_ended, device_seconds, block_seconds: ended sequences and what they used, by `FinishReason` - 1.
    """

    prefill_steps: list[int] = []
    decode_steps: list[int] = []
    num_ended: list[int] = []
    device_seconds: list[float] = []
    block_seconds: list[float] = []
    accepted_by_place: list[int] = []


def encode_totals(totals: EngineTotals) -> msgspec.Raw:
    """Encode totals once for many messages."""
    return msgspec.Raw(msgspec.msgpack.encode(totals))


_NO_TOTALS = encode_totals(EngineTotals())


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of the engine after a step; counters start at 0 with each engine process.

    Attributes:
        engine: number of the engine among those of the service.
        num_free_blocks: blocks that no running sequence holds.
        num_cached_blocks: those of them whose content is in the prefix cache.
        kv_usage: share of the KV cache's blocks that running sequences hold, 0 to 1.
        prefix_cache_query_tokens: prompt tokens looked up in the prefix cache.
        prefix_cache_hit_tokens: prompt tokens found there.
        num_snapshots: states of fixed size that the prefix cache has.
        num_snapshot_hits: sequences that began at one.
        num_snapshots_taken, num_snapshots_evicted: snapshots that it got, and that have left.
        prompt_tokens: prompt tokens of admitted sequences, computed or found in the prefix cache.
        generation_tokens: tokens sampled.
        num_reserved_tokens: tokens that the running sequences have if all reach their limits.
        num_free_places: sequences that can be admitted before another one ends; 0 if blocks are short.
        num_prefill_tokens: tokens of the prompts of running sequences that are not computed yet.
        num_waiting_for_slots: sequences that wait until others release the slot of an adapter; 0 while one is free.
        waiting_by_length: sequences that wait by `length_counts.length_class`, those for a slot included; empty if none
            waits.
        waiting_tokens_by_length: tokens of their prompts.
        waiting_output_by_length: tokens that they will probably generate.
        prompt_rate: prompt tokens computed per second when steps are full; 0.0 until that was measured.
        output_rate: tokens generated per second while sequences wait for a place or a slot; 0.0 until it was measured.
        output_means: mean numbers of tokens that sequences have generated; see `expected_output.OutputMeans`.
        num_failed_steps: steps that had to be computed again, because they raised an error.
        num_invariant_violations: contradictions that the engine found in its own bookkeeping while it was idle.
        num_log_lines_dropped: lines of the log that the process has dropped.
        computed_tokens: tokens computed, of prompts and outputs.
        computed_prompt_tokens, recomputed_tokens: sums of `SequenceUsage` over the ended sequences.
        num_drafts: drafts computed.
        num_draft_tokens, num_accepted_tokens: their tokens, and those of them that were kept.
        prefill_seconds, decode_seconds: device time of the steps with and without a prefill.
        block_seconds: blocks of the KV cache times seconds; a block counts for each sequence that holds it.
        running_adapters, waiting_adapters: names of adapters that sequences have or wait for, sorted, at most
            `MAX_LISTED_ADAPTERS` of each.
        num_adapter_reads, num_adapter_loads: adapters read from files, and written to slots on the device.
        num_adapter_evictions: adapters that lost their slot to another one.
        totals: encoded `EngineTotals`, at most a fraction of a second old, and current if the engine has no work.
    """

    engine: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    kv_usage: float = 0.0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    num_snapshots: int = 0
    num_snapshot_hits: int = 0
    num_snapshots_taken: int = 0
    num_snapshots_evicted: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_invariant_violations: int = 0
    num_log_lines_dropped: int = 0
    num_reserved_tokens: int = 0
    num_free_places: int = 0
    num_prefill_tokens: int = 0
    num_waiting_for_slots: int = 0
    waiting_by_length: list[int] = []
    waiting_tokens_by_length: list[int] = []
    waiting_output_by_length: list[int] = []
    prompt_rate: float = 0.0
    output_rate: float = 0.0
    output_means: list[float] = []
    computed_tokens: int = 0
    computed_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    block_seconds: float = 0.0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    num_adapter_reads: int = 0
    num_adapter_loads: int = 0
    num_adapter_evictions: int = 0
    totals: msgspec.Raw = _NO_TOTALS

    def decode_totals(self) -> EngineTotals:
        """Decode `totals`."""
        return msgspec.msgpack.decode(self.totals, type=EngineTotals)


_GAUGES = {
    "num_snapshots", "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "kv_usage",
    "num_reserved_tokens", "num_free_places", "num_prefill_tokens", "num_waiting_for_slots", "waiting_by_length",
    "waiting_tokens_by_length", "waiting_output_by_length", "prompt_rate", "output_rate", "output_means",
    "running_adapters", "waiting_adapters",
}  # fmt: skip
_COUNTERS = tuple(
    n for n in EngineStats.__struct_fields__ if n not in _GAUGES | {"engine", "totals"}
)


def add_counters(a: EngineStats, b: EngineStats) -> EngineStats:
    """Add the counters of two engine processes; the result's gauges have their defaults."""
    counters = {name: getattr(a, name) + getattr(b, name) for name in _COUNTERS}
    pairs = zip(
        msgspec.structs.astuple(a.decode_totals()),
        msgspec.structs.astuple(b.decode_totals()),
        strict=True,
    )
    sums = [[x + y for x, y in itertools.zip_longest(*pair, fillvalue=0)] for pair in pairs]
    return EngineStats(**counters, totals=encode_totals(EngineTotals(*sums)))


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests; unknown ids, of requests that have just finished for example, are ignored.

    Attributes:
        request_ids: of the requests.
        reason: `ABORT`, or `STOP` if the front end found a stop string. With `STOP` the engine sends a last event,
            which reports what the request used.
    """

    request_ids: list[int]
    reason: FinishReason = FinishReason.ABORT


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine process."""


class StartupPhase(msgspec.Struct, frozen=True, tag="phase"):
    """The engine entered this phase of its start-up."""

    name: str


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine accepts requests from now on."""

    info: EngineInfo


class StartupFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start, and its process ends; the text is for the operator."""

    error: str


class SequenceStarted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence was scheduled for the first time.

    Attributes:
        queue_seconds: time it waited in the engine.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: int
    queue_seconds: float
    num_cached_tokens: int


class StepMessage(msgspec.Struct, frozen=True, kw_only=True, tag="step", omit_defaults=True):
    """The events of one step, by column: entry i of each list belongs to `request_ids[i]`.

    Attributes:
        token_ids: -1 where the sequence ended without a new token.
        stats: the engine's gauges and counters; None if they were sent a moment ago.
        finish_reasons: a `FinishReason`, or 0 where the sequence continues.
        logprobs: by index; only for requests that asked for them.
        top_tokens: by index; only for requests that asked for them.
        errors: by index; only for sequences that ended with an error.
        usage: by index; only for sequences that ended.
        prompt_logprobs: by request id, in the step that completes the prompt; only for requests that asked for them.
        prompt_top_tokens: likewise, the most likely tokens at the same positions.
    """

    request_ids: list[int]
    token_ids: list[int]
    finish_reasons: list[int]
    stats: EngineStats | None = None
    started: list[SequenceStarted] = []
    logprobs: dict[int, float] = {}
    top_tokens: dict[int, list[tuple[int, float]]] = {}
    errors: dict[int, str] = {}
    usage: dict[int, SequenceUsage] = {}
    prompt_logprobs: dict[int, list[float]] = {}
    prompt_top_tokens: dict[int, list[list[tuple[int, float]]]] = {}

    def event(self, i: int) -> TokenEvent:
        """Return entry i as an event."""
        token_id, reason = self.token_ids[i], self.finish_reasons[i]
        return TokenEvent(
            token_id=token_id if token_id >= 0 else None,
            logprob=self.logprobs.get(i),
            top_tokens=tuple(self.top_tokens.get(i, ())),
            finish_reason=FinishReason(reason) if reason else None,
            error=self.errors.get(i),
            usage=self.usage.get(i),
        )


def newest_stats(steps: Iterable[StepMessage]) -> EngineStats | None:
    """Return the stats of the last of some messages that has any."""
    newest = None
    for step in steps:
        if step.stats is not None:
            newest = step.stats
    return newest


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A sign of life, which the engine process sends about once per second, also while its loop waits for the device.

    Attributes:
        activity: value of an `Activity`.
        count: progress of the engine's loop.
        num_tokens: of the step that it is launching or waiting for; 0 if there is none.
    """

    activity: str
    count: int
    num_tokens: int


class EngineHung(msgspec.Struct, frozen=True, tag="hung"):
    """The engine's loop hangs, and its process is about to end.

    Attributes:
        doing: what it has been doing, and for how long; completes the sentence "it has been ...".
    """

    doing: str


FrontEndMessage = GenerateRequest | AbortRequests | Shutdown
EngineMessage = StartupPhase | EngineReady | StartupFailed | StepMessage | Heartbeat | EngineHung
