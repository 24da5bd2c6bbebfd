"""An engine process without a model, which sends every request its next token at a given rate.

`benchmarks.streaming` configures the service to start this as its engine process, with the steps per second as the
argument. The messages are those of the real engine for the same number of sequences.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time

import msgspec

from server.engine.core.messages import (
    AbortRequests,
    EngineInfo,
    EngineReady,
    EngineStats,
    SequenceStarted,
    Shutdown,
    StepMessage,
)
from server.engine.core.plan_report import DeterminismPlan, MemoryPlan, PlanReport
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.engine_process.process import Channel
from server.engine.link.engine_process.process_setup import exit_with_parent
from server.engine.link.protocol import EngineLaunch
from server.engine.link.sockets import Connection

NO_PLAN = PlanReport(
    arch="none", arch_name="none", sm=0, num_sms=0, shared_memory_bytes=0, memory_bandwidth_gbs=0,
    peak_tflops=0.0, dtype="none", weight_dtype="none", kv_dtype="none",
    num_heads=1, num_kv_heads=1, head_dim=1, one_sequence="",
    block_size=1, phases=[], steps=[], memory=MemoryPlan(weight_bytes=0, kv_bytes_per_token=0, max_context=0),
    deterministic=DeterminismPlan(requests="none", why="no model"),
)  # fmt: skip
_LIMIT = 1 << 20
_FIRST_TOKEN, _TOKENS = 300, 1000


class PacedEngine:
    """Sends a token to every unfinished request in each step.

    Args:
        channel: channel to the front end.
        rate: steps per second.
        engine: number of the engine among those of the service.
    """

    def __init__(self, channel: Channel, rate: float, engine: int) -> None:
        self._engine = engine
        self._channel = channel
        self._seconds = 1 / rate
        self._left: dict[int, int] = {}
        self._started: list[SequenceStarted] = []
        self._stopped: list[int] = []
        self._generated = 0
        self._steps = 0

    def run(self) -> None:
        """Serve until a shutdown message arrives."""
        due = time.perf_counter()
        while self._receive():
            self._step()
            due = max(due + self._seconds, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))

    def _receive(self) -> bool:
        for message in self._channel.receive(wait=0 if self._left else math.inf):
            if isinstance(message, GenerateRequest):
                self._left[message.request_id] = message.sampling.max_new_tokens
                self._started.append(SequenceStarted(message.request_id, 0.0, 0))
            elif isinstance(message, AbortRequests):
                for request_id in message.request_ids:
                    if self._left.pop(request_id, None) and message.reason is FinishReason.STOP:
                        self._stopped.append(request_id)
            elif isinstance(message, Shutdown):
                return False
        return True

    def _step(self) -> None:
        ids = list(self._left)
        finished = []
        for request_id in ids:
            self._left[request_id] -= 1
            finished.append(0 if self._left[request_id] else int(FinishReason.LENGTH))
            if not self._left[request_id]:
                del self._left[request_id]
        self._steps += 1
        self._generated += len(ids)
        started, self._started = self._started, []
        token = _FIRST_TOKEN + self._steps % _TOKENS
        stopped, self._stopped = self._stopped, []
        self._channel.send(
            StepMessage(
                request_ids=ids + stopped,
                token_ids=[token] * len(ids) + [-1] * len(stopped),
                finish_reasons=finished + [int(FinishReason.STOP)] * len(stopped),
                logprobs=dict.fromkeys(range(len(ids)), -1.23456789),
                started=started,
                stats=EngineStats(
                    engine=self._engine,
                    num_running=len(self._left),
                    num_blocks=1,
                    generation_tokens=self._generated,
                    num_steps=self._steps,
                ),
            )
        )


def main() -> None:
    """Run until the front end sends a shutdown message or exits."""
    launch = msgspec.json.decode(os.read(0, 1 << 16), type=EngineLaunch)
    config, (rate,) = launch.config, sys.argv[1:]
    channel = Channel(Connection(launch.link))
    threading.Thread(target=exit_with_parent, daemon=True).start()
    info = EngineInfo(
        model_id=config.model_id, device="none", dtype="none", vocab_size=_LIMIT, max_model_len=_LIMIT,
        max_total_tokens=_LIMIT, max_num_seqs=config.max_num_seqs or 1, max_num_batched_tokens=1,
        max_prefill_tokens=1, block_size=1, num_blocks=1, quantization="none", kv_cache_dtype="none", num_parameters=0,
        plan=NO_PLAN, startup_seconds={}, versions={}, engine=config.engine,
    )  # fmt: skip
    channel.send(EngineReady(info))
    PacedEngine(channel, float(rate), config.engine).run()


if __name__ == "__main__":
    main()
