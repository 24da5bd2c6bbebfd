"""What the front end and the engine process say to each other, as msgspec records over ZeroMQ.

One direction each: `FrontEndMessage` to the engine, `EngineMessage` back. Knows neither sockets nor processes.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from server.engine.core.request import FinishReason, GenerateRequest, TokenEvent
from server.engine.link.plan_report import PlanReport


class EngineState(enum.Enum):
    """Where the engine process stands, as the front end sees it."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine process needs to know, fixed for its life.

    Attributes:
        model_path: checkpoint folder on this machine.
        model_id: the name the operator gave it.
        device: "auto", "cpu" or "cuda".
        dtype: "auto", "float32", "bfloat16" or "float16".
        quantization: "none" or "fp8".
        load_format: "auto", "safetensors" or "dummy".
        max_model_len: tokens of prompt and output together; None takes the model's own limit.
        max_num_seqs: sequences that run at the same time; None chooses by device.
        max_num_batched_tokens: tokens computed in one step, over all sequences; None chooses by device.
        block_size: tokens in a block of the KV cache.
        kv_cache_dtype: "auto" or "fp8".
        kv_cache_tokens: tokens the KV cache holds; None derives it from the memory that is free.
        kv_cache_gib: the same as a size in GiB; at most one of the two is given.
        cuda_graphs: whether steps are recorded and replayed on a GPU.
        overlap: whether a step is launched on a GPU before the results of the one before are booked.
        enable_prefix_caching: whether finished blocks are kept for prompts with the same beginning.
        cpu_threads: threads of a forward pass on the CPU; None takes PyTorch's choice.
        log_level: name of a logging level.
    """

    model_path: str
    model_id: str
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_tokens: int | None = None
    kv_cache_gib: float | None = None
    cuda_graphs: bool = True
    overlap: bool = True
    enable_prefix_caching: bool = True
    cpu_threads: int | None = None
    log_level: str = "info"


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process is told on its standard input, in a line of JSON.

    Attributes:
        directory: of the sockets.
        config: of the engine.
    """

    directory: str
    config: EngineConfig


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine tells about itself; constant until it is started again.

    Attributes:
        quantization: of the layers' weights, as `EngineConfig`.
        max_model_len: tokens of prompt and output together that the model takes.
        max_total_tokens: the smaller of `max_model_len` and what the KV cache holds: the limit of one request.
        num_blocks: blocks of `block_size` tokens in the KV cache.
        kv_cache_dtype: of its numbers, as PyTorch names it.
        plan: attention kernels that run, and why.
        startup_seconds: seconds of each start-up phase, in order.
        versions: of the libraries the result depends on.
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
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    num_parameters: int
    plan: PlanReport
    startup_seconds: dict[str, float]
    versions: dict[str, str]


COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_query_tokens",
    "prefix_cache_hit_tokens",
    "num_preemptions",
    "num_steps",
)
"""Fields of `EngineStats` that only grow while one engine process lives."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's gauges and counters after a step; counters start at 0 with each engine process.

    Attributes:
        kv_usage: share of the KV cache's blocks that running sequences hold, 0 to 1.
        prefix_cache_query_tokens: prompt tokens looked up in the prefix cache.
        prefix_cache_hit_tokens: of those, tokens found there.
        prompt_tokens: prompt tokens of admitted sequences, whether computed or found in the prefix cache.
        generation_tokens: tokens sampled.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    kv_usage: float = 0.0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0


def add_counters(a: EngineStats, b: EngineStats) -> EngineStats:
    """Add up what only grows while an engine process lives; the gauges are left at their defaults."""
    return EngineStats(**{name: getattr(a, name) + getattr(b, name) for name in COUNTERS})


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Forget these requests, wherever they are; unknown ids are ignored (they may just have finished)."""

    request_ids: list[int]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine process."""


class StartupPhase(msgspec.Struct, frozen=True, tag="phase"):
    """The engine entered this phase of its start-up."""

    name: str


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests from now on."""

    info: EngineInfo


class StartupFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine cannot start; the text is for the operator. The process ends after this."""

    error: str


class SequenceStarted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence was scheduled for the first time in this step.

    Attributes:
        queue_seconds: time it waited in the engine.
        num_cached_tokens: prompt tokens it took from the prefix cache.
    """

    request_id: int
    queue_seconds: float
    num_cached_tokens: int


class StepMessage(msgspec.Struct, frozen=True, kw_only=True, tag="step", omit_defaults=True):
    """All events of one step, packed by column: entry i of each list belongs to `request_ids[i]`.

    Attributes:
        token_ids: -1 where the sequence ended without a new token.
        finish_reasons: 0 where the sequence goes on, else a `FinishReason`.
        logprobs: by index, only for requests that asked.
        top_tokens: by index, only for requests that asked.
        errors: by index, for sequences that ended with an error.
        prompt_logprobs: by request id, once the prompt is computed, only for requests that asked.
    """

    request_ids: list[int]
    token_ids: list[int]
    finish_reasons: list[int]
    stats: EngineStats
    started: list[SequenceStarted] = []
    logprobs: dict[int, float] = {}
    top_tokens: dict[int, list[tuple[int, float]]] = {}
    errors: dict[int, str] = {}
    prompt_logprobs: dict[int, list[float]] = {}

    def event(self, i: int) -> TokenEvent:
        """Unpack entry i."""
        token_id, reason = self.token_ids[i], self.finish_reasons[i]
        return TokenEvent(
            token_id=token_id if token_id >= 0 else None,
            logprob=self.logprobs.get(i),
            top_tokens=tuple(self.top_tokens.get(i, ())),
            finish_reason=FinishReason(reason) if reason else None,
            error=self.errors.get(i),
        )


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """Where the engine stands, for a front end that does not own it: the first message, and one for each change.

    Attributes:
        stats: the newest numbers.
        past: counters of the engine processes before this one, added up.
        lost: set where the requests in flight are lost; why, for their clients.
    """

    state: EngineState
    phase: str
    info: EngineInfo | None
    stats: EngineStats
    past: EngineStats
    restarts: int
    lost: str | None = None


class Attached(msgspec.Struct, frozen=True, tag="attached"):
    """A front end that does not own the engine reads its messages from now on."""


FrontEndMessage = GenerateRequest | AbortRequests | Shutdown
EngineMessage = StartupPhase | EngineReady | StartupFailed | StepMessage
HubMessage = EngineStatus | StepMessage
