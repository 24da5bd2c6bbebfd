"""Runs an engine in the calling process, without sockets or a front end, for benchmarks and tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
from torch import distributed

from server.engine.core.messages import EngineMessage, FrontEndMessage, StepMessage
from server.engine.link.engine_process.rank_processes import RankProcesses
from server.engine.runner.start.startup import start_engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.engine.core.messages import EngineConfig
    from server.engine.core.request import GenerateRequest, TokenEvent


class LocalChannel:
    """An `EngineChannel` in memory.

    Attributes:
        inbox: messages for the engine.
        steps: messages of steps from the engine, oldest first.
    """

    def __init__(self) -> None:
        self.inbox: list[FrontEndMessage] = []
        self.steps: list[StepMessage] = []

    def send(self, message: EngineMessage) -> None:
        """Store messages of steps and drop all others."""
        if isinstance(message, StepMessage):
            self.steps.append(message)

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        """Return and empty the inbox. Waiting on an empty inbox is an error: no other thread fills it."""
        assert self.inbox or not wait
        messages, self.inbox = self.inbox, []
        return messages


class LocalEngine:
    """Owns an engine and runs it in the caller's thread.

    Args:
        config: the engine's configuration.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.channel = LocalChannel()
        self._ranks = RankProcesses(config) if config.tensor_parallel > 1 else None
        try:
            self.engine = start_engine(config, self.channel, self._ranks)
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenEvent]]:
        """Run requests that arrive at the same time.

        Args:
            requests: with distinct ids.

        Returns:
            The events of each request, in the order of `requests`; without the usage, which differs between runs.
        """
        self.channel.inbox += requests
        self.channel.steps.clear()
        answers: dict[int, list[TokenEvent]] = {r.request_id: [] for r in requests}
        unfinished = len(requests)
        self.engine.receive(wait=math.inf)
        while True:
            unfinished -= sum(self._take(answers) for _ in range(len(self.channel.steps)))
            if not unfinished:
                break
            self.engine.step()
        while self.engine.has_work:
            self.engine.step()  # steps that were launched before the last sequence ended
        return list(answers.values())

    def close(self) -> None:
        """End the processes of the other ranks, so that another engine can have ranks in this process."""
        if self._ranks is not None:
            self._ranks.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _take(self, answers: dict[int, list[TokenEvent]]) -> int:
        """Add the events of the oldest step to `answers` and return the number of requests that it finished."""
        step = self.channel.steps.pop(0)
        for i, request_id in enumerate(step.request_ids):
            event = step.event(i)
            if event.usage is not None:
                event = msgspec.structs.replace(event, usage=None)
            answers[request_id].append(event)
        return sum(map(bool, step.finish_reasons))
