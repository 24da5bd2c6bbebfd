"""Runs an engine in the calling process, without sockets or a front end, for benchmarks and tests."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import msgspec
from torch import distributed

from server.engine.core.messages import EngineMessage, FrontEndMessage, StepMessage
from server.engine.link.engine_process.rank_processes import RankProcesses
from server.engine.runner.start.startup import start_engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.engine.core.messages import EngineConfig
    from server.engine.core.request import GenerateRequest, SequenceUsage, TokenEvent


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

    Attributes:
        usage: what the requests of the last `generate` used, by their ids.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.usage: dict[int, SequenceUsage] = {}
        self.channel = LocalChannel()
        self._ranks = RankProcesses(config) if config.tensor_parallel > 1 else None
        try:
            self.engine = start_engine(config, self.channel, self._ranks)
        except BaseException:
            self.close()
            raise

    @property
    def drafts(self) -> Any:  # noqa: ANN401 - of the scheduler, whose `drafter` a caller may replace
        """What proposes tokens to the engine's steps."""
        return self.engine._scheduler.drafts  # noqa: SLF001

    def use_idle_time(self) -> None:
        """Let the engine do its preparatory work, such as recording steps."""
        while self.engine._runner.use_idle_time():  # noqa: SLF001
            pass

    def generate(
        self, requests: Sequence[GenerateRequest], streams: int | None = None
    ) -> list[list[TokenEvent]]:
        """Run requests that arrive at the same time, or each when another ends.

        Args:
            requests: with distinct ids.
            streams: so many arrive at the beginning, and one whenever another ends; None for all.

        Returns:
            The events of each request, in the order of `requests`; without the usage, which differs between runs.
        """
        arriving = iter(requests)
        self.channel.inbox += itertools.islice(arriving, streams)
        self.channel.steps.clear()
        self.usage.clear()
        answers: dict[int, list[TokenEvent]] = {r.request_id: [] for r in requests}
        unfinished = len(requests)
        self.engine.receive(wait=math.inf)
        while True:
            ended = sum(self._take(answers) for _ in range(len(self.channel.steps)))
            unfinished -= ended
            if not unfinished:
                break
            if ended:
                self.channel.inbox += itertools.islice(arriving, ended)
                self.engine.receive(wait=0)
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
                self.usage[request_id] = event.usage
                event = msgspec.structs.replace(event, usage=None)
            answers[request_id].append(event)
        return sum(map(bool, step.finish_reasons))
