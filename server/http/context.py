"""What every route works with: engine client, tokenizer, limits, metrics. One for each app.

Knows no routes and no wire format.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from server.engine.link.client import EngineUnavailableError
from server.engine.link.protocol import EngineState
from server.errors import OverloadedError, UnavailableError
from server.http.metrics.registry import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from model.text.tokenizer import Tokenizer
    from server.engine.core.messages import EngineInfo
    from server.engine.core.request import GenerateRequest
    from server.engine.link.client import EngineHandle
    from server.engine.link.request_stream import RequestStream
    from server.http.config import HTTPConfig
    from server.http.metrics.shared_counters import Board

ResultT = TypeVar("ResultT")

# Phases are written for people, and one of a failed start may be a long text.
_LONGEST_PHASE = 200


class AppContext:
    """Owns what the routes share; lives on the event loop.

    Attributes:
        plain_tokens: text, and beginning of a frame, of tokens that were seen to have the same text wherever nothing is
            held back; see `Transcript.plain`.
    """

    def __init__(
        self,
        client: EngineHandle,
        tokenizer: Tokenizer,
        config: HTTPConfig,
        version: str,
        board: Board | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.version = version
        self.plain_tokens: dict[int, tuple[str, bytes]] = {}
        self.metrics = Metrics(client, config, version, board)
        self._workers = ThreadPoolExecutor(config.validation_workers, "tokenize")

    @contextlib.contextmanager
    def admit(self, sequences: int, info: EngineInfo) -> Iterator[None]:
        """Hold a place for each sequence of a request.

        The places are those of the service: front ends that admit at the same moment may go over by one request each.

        Args:
            sequences: of the request.
            info: of the engine that runs.

        Raises:
            OverloadedError: there are not as many places left.
        """
        if self.metrics.in_flight + sequences > self.max_concurrent_requests(info):
            raise OverloadedError
        self.metrics.add_in_flight(sequences)
        try:
            yield
        finally:
            self.metrics.add_in_flight(-sequences)

    def max_concurrent_requests(self, info: EngineInfo) -> int:
        """Sequences in flight, at most: as configured, or twice those that the engine computes at a time."""
        return self.config.max_concurrent_requests or 2 * info.max_num_seqs

    def engine_info(self) -> EngineInfo:
        """What the running engine told about itself.

        Raises:
            UnavailableError: it does not run.
        """
        if self.client.state is not EngineState.READY or self.client.info is None:
            raise self.unavailable()
        return self.client.info

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Hand a request to the engine.

        Raises:
            UnavailableError: it does not run.
        """
        try:
            return self.client.submit(request)
        except EngineUnavailableError:
            raise self.unavailable() from None

    def unavailable(self) -> UnavailableError:
        """The error that says what the engine is doing instead of serving."""
        return UnavailableError(
            f"the model is not ready: {self.client.state.value}, {self.phase()}"
        )

    def phase(self) -> str:
        """What the engine is doing, on one line."""
        return " ".join(self.client.phase.split())[:_LONGEST_PHASE]

    async def on_text(self, characters: int, work: Callable[[], ResultT]) -> ResultT:
        """Run work that takes time in proportion to a text: in a thread, where that pays.

        Args:
            characters: length of the text.
            work: touches nothing that the event loop changes.
        """
        if characters <= self.config.inline_characters:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)
