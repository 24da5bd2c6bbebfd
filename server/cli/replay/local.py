"""Computes the outputs of receipts with an engine in this process.

Imports PyTorch, so `server.cli.command_groups` imports it only when it is needed.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from torch import distributed

from server.engine.core.messages import (
    AbortRequests,
    EngineInfo,
    EngineMessage,
    FrontEndMessage,
    Shutdown,
    StepMessage,
)
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.link.engine_process.rank_processes import RankProcesses
from server.engine.runner.start.startup import release_memory, start_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from server.cli.replay.work import Task
    from server.engine.core.engine import Engine
    from server.engine.core.messages import EngineConfig
    from server.receipts.record import Logprobs

_POLL_SECONDS = 0.001


class LocalReplay:
    """An engine in this process. Call `close` at the end.

    Args:
        config: of the engine.

    Attributes:
        info: what the engine reported.

    Raises:
        StartupError: the engine cannot start.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._channel = _Channel()
        self._ranks = RankProcesses(config) if config.tensor_parallel > 1 else None
        self._engine: Engine | None = None
        try:
            self._engine = start_engine(config, self._channel, self._ranks)
        except BaseException:
            self.close()
            raise
        self.info: EngineInfo = self._engine.info

    def run(self, tasks: Sequence[Task], on_done: Callable[[], None]) -> None:
        """Compute tasks, as many together as the engine takes.

        Args:
            tasks: to compute.
            on_done: called when one is done.
        """
        assert self._engine is not None
        self._channel.begin(tasks, self.info, on_done)
        self._engine.run()

    def close(self) -> None:
        """Free the engine, so that this process can have another one."""
        self._engine = None
        if self._ranks is not None:
            self._ranks.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        release_memory()


class _Channel:
    """Gives the engine a request for each task, and each task its tokens."""

    def __init__(self) -> None:
        self._waiting: Iterator[GenerateRequest] = iter(())
        self._running: dict[int, Task] = {}
        self._outbox: list[FrontEndMessage] = []
        self._most = 1
        self._on_done: Callable[[], None] = lambda: None

    def begin(self, tasks: Sequence[Task], info: EngineInfo, on_done: Callable[[], None]) -> None:
        self._most, self._on_done = info.max_num_seqs, on_done
        self._waiting = self._requests(tasks, info)

    def send(self, message: EngineMessage) -> None:
        if not isinstance(message, StepMessage):
            return
        for i, request_id in enumerate(message.request_ids):
            task = self._running.get(request_id)
            if task is None:  # it had enough tokens
                continue
            computed, event = task.computed, message.event(i)
            if request_id in message.prompt_logprobs:
                computed.prompt_logprobs = _prompt_logprobs(message, request_id)
            if event.token_id is not None:
                computed.token_ids.append(event.token_id)
                computed.logprobs.append((event.logprob, event.top_tokens))
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                computed.error = event.error or "the engine ended it"
            else:
                computed.finish_reason = event.finish_reason
            if event.finish_reason is None and not computed.suffices_for(task.output):
                continue
            if event.finish_reason is None:
                self._outbox.append(AbortRequests([request_id]))
            del self._running[request_id]
            self._on_done()

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        messages, self._outbox = self._outbox, []
        messages += itertools.islice(self._waiting, self._most - len(self._running))
        if not (messages or self._running):
            return [Shutdown()]
        if wait and not messages:  # a grammar is being compiled, or an adapter read
            time.sleep(min(wait, _POLL_SECONDS))
        return messages

    def _requests(self, tasks: Sequence[Task], info: EngineInfo) -> Iterator[GenerateRequest]:
        on_request = info.plan.deterministic.requests == "on request"
        for request_id, task in enumerate(tasks, 1):
            self._running[request_id] = task
            yield GenerateRequest(
                request_id=request_id,
                prompt_token_ids=task.prompt,
                sampling=task.sampling,
                deterministic=on_request and task.receipt.deterministic,
                adapter=task.adapter,
            )


def _prompt_logprobs(message: StepMessage, request_id: int) -> list[Logprobs]:
    values = message.prompt_logprobs[request_id]
    top = message.prompt_top_tokens.get(request_id) or [[] for _ in values]
    return list(zip(values, top, strict=True))
