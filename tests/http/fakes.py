"""A scripted engine, and a small tokenizer in Hugging Face's format."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from server.engine.core.messages import EngineInfo, EngineStats
from server.engine.core.request import FinishReason, GenerateRequest, SequenceUsage, TokenEvent
from server.engine.link.front_end.client import EngineHandle, EngineUnavailableError
from server.engine.link.front_end.request_stream import RequestStream
from server.engine.link.front_end.restart_queue import RestartQueue
from server.engine.link.protocol import (
    AbortTarget,
    AdapterChange,
    AdapterRefusal,
    EngineReport,
    EngineState,
)
from tests.plans import PLAN

INFO = EngineInfo(
    model_id="fake",
    device="cpu",
    dtype="float32",
    vocab_size=300,
    max_model_len=128,
    max_total_tokens=128,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    max_prefill_tokens=256,
    block_size=16,
    num_blocks=64,
    quantization="none",
    kv_cache_dtype="float32",
    num_parameters=1,
    plan=PLAN,
    startup_seconds={},
    versions={},
    max_draft_tokens=7,
    pid=os.getpid(),
)
USAGE = SequenceUsage(
    prefill_seconds=0.25,
    decode_seconds=0.5,
    num_steps=3,
    num_cached_prompt_tokens=2,
    num_computed_prompt_tokens=4,
    num_recomputed_tokens=1,
    device_seconds=0.125,
    block_seconds=1.5,
    num_draft_tokens=5,
    num_accepted_tokens=4,
    num_predicted_tokens=3,
    num_accepted_predicted_tokens=2,
)
EOS_ID = 256
IM_END_ID = 257


def save_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer; ids 0 to 255 are the bytes in the order of the byte alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True) for t in ("</s>", "<|im_end|>")]
    tokenizer.add_special_tokens(special)
    # Ordinary tokens of several characters, for stop strings that end within one.
    tokenizer.add_tokens([AddedToken(t) for t in (" world!", "END.more")])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


Script = Callable[["FakeEngine", GenerateRequest, RequestStream], Awaitable[None]]


class FakeEngine:
    """Has the interface of `EngineClient` that the HTTP layer uses; `script` produces the events of each request."""

    def __init__(self, script: Script | None = None) -> None:
        self.state = EngineState.READY
        self.phase = "ready"
        self.info: EngineInfo | None = INFO
        self.stats = EngineStats(num_blocks=64, num_free_blocks=64)
        self.past = EngineStats()
        self.restarts = 0
        self.others: list[EngineReport] = []  # of a service with several engine processes
        self.restart_queue = RestartQueue()
        self.adapters = EngineHandle()
        self.script: Script = script or say([72, 105], FinishReason.LENGTH)
        self.requests: list[GenerateRequest] = []
        self.aborted: list[int] = []
        self.abort_seen = asyncio.Event()
        self.running: set[int] = set()
        self.streams: list[RequestStream] = []
        self._ids = itertools.count(1)
        self._streams: dict[int, RequestStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def reports(self) -> list[EngineReport]:
        return [
            EngineReport(
                state=self.state, phase=self.phase, info=self.info,
                stats=self.stats, past=self.past, restarts=self.restarts,
            ),
            *self.others,
        ]  # fmt: skip

    @property
    def num_ready(self) -> int:
        return sum(report.state is EngineState.READY for report in self.reports)

    @property
    def takes_requests(self) -> bool:
        return self.state is EngineState.READY

    def next_request_id(self) -> int:
        return next(self._ids)

    def submit(self, request: GenerateRequest) -> RequestStream:
        if self.state is not EngineState.READY:
            raise EngineUnavailableError(self.state, self.phase)
        self.requests.append(request)
        self.running.add(request.request_id)
        stream = RequestStream(
            request.request_id,
            self.abort,
            self.stop_request,
            request.external_id,
            request.client,
        )
        self.streams.append(stream)
        self._streams[request.request_id] = stream
        task = asyncio.get_running_loop().create_task(self._play(request, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _play(self, request: GenerateRequest, stream: RequestStream) -> None:
        await self.script(self, request, stream)
        self.running.discard(request.request_id)

    def share_adapters(
        self, names: Iterable[str], on_change: Callable[[AdapterChange], None]
    ) -> None:
        self.adapters.share_adapters(names, on_change)

    async def change_adapters(
        self, change: AdapterChange, *, replaces: bool = False
    ) -> AdapterRefusal | None:
        return await self.adapters.change_adapters(change, replaces=replaces)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)
        self.running.discard(request_id)
        self.abort_seen.set()

    async def abort_external(self, target: AbortTarget) -> set[str]:
        found = [s for s in self.streams if not s._finished and target.matches(s)]
        for stream in found:
            stream.abort()
        return {stream.external_id for stream in found}

    def stop_request(self, request_id: int) -> None:
        self.abort(request_id)
        put(self._streams[request_id], event(None, FinishReason.STOP))


def put(stream: RequestStream, *events: TokenEvent) -> None:
    """Queue events; the events of one call are delivered together."""
    for event in events:
        if not stream._finished:
            stream.push(event)
    stream.deliver()


def event(
    token_id: int | None,
    finish: FinishReason | None = None,
    logprob: float | None = -0.5,
    top: tuple[tuple[int, float], ...] = (),
    error: str | None = None,
) -> TokenEvent:
    return TokenEvent(
        token_id=token_id,
        logprob=logprob,
        top_tokens=top,
        finish_reason=finish,
        error=error,
        usage=USAGE if finish is not None else None,
    )


def say(
    token_ids: list[int],
    finish: FinishReason,
    *,
    together: bool = False,
    wait: float = 0.0,
    logprob: float = -0.5,
    top: tuple[tuple[int, float], ...] = (),
) -> Script:
    """Make a script that produces these tokens; the last one finishes with `finish`."""

    async def script(_engine: FakeEngine, request: GenerateRequest, stream: RequestStream) -> None:
        stream.queue_seconds = 0.002
        if request.sampling.prompt_logprobs:
            stream.prompt_logprobs = [-1.0] * (len(request.prompt_token_ids) - 1)
        if request.sampling.prompt_top_logprobs:
            stream.prompt_top_tokens = [[(7, -0.75)]] * (len(request.prompt_token_ids) - 1)
        events = [
            event(
                token_id,
                finish if i == len(token_ids) - 1 else None,
                logprob if request.sampling.logprobs else None,
                top[: request.sampling.top_logprobs],
            )
            for i, token_id in enumerate(token_ids)
        ]
        if together:
            put(stream, *events)
            return
        for one in events:
            put(stream, one)
            if one.finish_reason is None:
                await asyncio.sleep(wait)

    return script


async def silent(_engine: FakeEngine, _request: GenerateRequest, _stream: RequestStream) -> None:
    """Produce no events: a script for requests that never end."""
    await asyncio.Event().wait()
