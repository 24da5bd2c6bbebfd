"""An engine inside this process, without sockets or a front end: for benchmarks and tests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from server.engine.link.protocol import EngineMessage, FrontEndMessage, StepMessage
from server.engine.runner.startup import start_engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.engine.core.request import GenerateRequest, TokenEvent
    from server.engine.link.protocol import EngineConfig


class LocalChannel:
    """Stands where the sockets are.

    Attributes:
        inbox: what the engine is about to receive.
        steps: what it has published, oldest first.
    """

    def __init__(self) -> None:
        self.inbox: list[FrontEndMessage] = []
        self.steps: list[StepMessage] = []

    def send(self, message: EngineMessage) -> None:
        """Keep a step's message."""
        if isinstance(message, StepMessage):
            self.steps.append(message)

    def receive(self, *, wait: float) -> Iterable[FrontEndMessage]:
        """Hand over the inbox; to wait for it is an error, since nobody else fills it."""
        assert self.inbox or not wait
        messages, self.inbox = self.inbox, []
        return messages


class LocalEngine:
    """Owns an engine and answers requests with it, in the caller's thread.

    Args:
        config: as for the engine process.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.channel = LocalChannel()
        self.engine = start_engine(config, self.channel)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[TokenEvent]]:
        """Answer requests that arrive all at once.

        Args:
            requests: with distinct ids.

        Returns:
            The events of each request, in the order of `requests`.
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
            self.engine.step()  # rows of sequences that ended while they were in flight
        return list(answers.values())

    def _take(self, answers: dict[int, list[TokenEvent]]) -> int:
        """Unpack the oldest step; returns how many requests it finished."""
        step = self.channel.steps.pop(0)
        for i, request_id in enumerate(step.request_ids):
            answers[request_id].append(step.event(i))
        return sum(map(bool, step.finish_reasons))
