"""Fuzzes the messages between the processes: their decoders, and the handlers of what can be decoded.

The parent must handle any message of the engine and of the front ends, and the engine any request that the hub forwards
to it without decoding it. A front end trusts the parent, which has decoded all messages that it forwards. A case is a
receiver's name and messages.
"""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import msgspec

from model.errors import GrammarError
from model.sampling.parameters import SamplingParams
from server.engine.core.grammar_queue import GrammarQueue
from server.engine.core.messages import (
    AbortRequests,
    EngineConfig,
    EngineReady,
    EngineStats,
    FrontEndMessage,
    SequenceStarted,
    StartupFailed,
    StartupPhase,
    StepMessage,
)
from server.engine.core.progress import Progress
from server.engine.core.request import AdapterRef, FinishReason, GenerateRequest, SequenceUsage
from server.engine.link.engine_process.process import Channel
from server.engine.link.front_end.client import EngineClient, RemoteEngine
from server.engine.link.front_end.hub import EngineHub, FrontEndConnection
from server.engine.link.protocol import (
    AbortExternal,
    AbortStreams,
    AbortTarget,
    AdapterChange,
    AdapterProposal,
    AdapterRefusal,
    AdapterVerdict,
    Attached,
    EngineReport,
    EngineState,
    EngineStatus,
    ExternalAborted,
    RequestsLost,
)
from server.engine.link.silence import SilenceTimer
from tests.engine.link.fake_engine import make_engine, make_info
from tests.reliability.fuzz.target import mutate_tree
from tests.reliability.malformed import mutate

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

_CONFIG = EngineConfig(model_path="ok", model_id="m")
_INFO = make_info(_CONFIG, 256)
_MAX_STEPS = 200
_STEPS = [
    StepMessage(
        request_ids=[1, 2], token_ids=[5, -1], finish_reasons=[0, int(FinishReason.LENGTH)],
        stats=EngineStats(num_running=1), started=[SequenceStarted(1, 0.1, 0)], logprobs={0: -1.0},
        top_tokens={0: [(5, -1.0)]}, errors={1: "x"}, usage={1: SequenceUsage()}, prompt_logprobs={1: [-1.0]},
        prompt_top_tokens={1: [[(5, -1.0)]]},
    ),
    StepMessage(request_ids=[3], token_ids=[7], finish_reasons=[0]),
]  # fmt: skip
_REQUESTS = [
    GenerateRequest(
        request_id=1, prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_new_tokens=3)
    ),
    GenerateRequest(
        request_id=2, prompt_token_ids=list(range(40)), external_id="a", priority=-3, deadline=1e12, cache_salt="s",
        sampling=SamplingParams(max_new_tokens=5, temperature=0.5, seed=3, top_k=4, logit_bias={3: 1.0}),
    ),
    AbortRequests([1, 2]),
    AbortRequests([2], FinishReason.STOP),
]  # fmt: skip
_STATUS = EngineStatus(engines=[EngineReport(state=EngineState.READY, phase="ready", info=_INFO)])
_TO_CLIENT = [*_STEPS, StartupPhase("x"), EngineReady(_INFO), StartupFailed("x")]
_TO_FRONT_END = [
    *_STEPS,
    _STATUS,
    RequestsLost([2], "x"),
    AbortStreams([1]),
    ExternalAborted(1, ["a"]),
    AdapterChange("a", AdapterRef("a", "/a", "digest"), 8),
    AdapterChange("a"),
    AdapterVerdict(1, AdapterRefusal.TAKEN),
]
_TO_HUB = [
    *_REQUESTS,
    Attached(),
    AbortExternal(1, AbortTarget(frozenset("a"))),
    AbortExternal(2, AbortTarget()),
    AdapterProposal(3, AdapterChange("a", AdapterRef("a", "/a", "digest"), 8), replaces=True),
    AdapterProposal(4, AdapterChange("a")),
]
MESSAGES: dict[str, list[Any]] = {
    "client": _TO_CLIENT,
    "front end": _TO_FRONT_END,
    "hub": _TO_HUB,
    "engine": _REQUESTS,
}
"""Correct messages by receiver."""


def _refuse_grammar(_: object) -> Future[Any]:
    refused: Future[Any] = Future()
    refused.set_exception(GrammarError("none is supported"))
    return refused


class _Sockets:
    """Has the methods of a `Connection` that the receivers use; drops what is sent."""

    address = ""

    def __init__(self, batch: Sequence[bytes] = ()) -> None:
        self._batch = list(batch)

    def receive(self, *, wait: float) -> list[bytes]:
        batch, self._batch = self._batch, []
        return batch

    def send(self, data: bytes) -> None:
        pass

    def close(self, linger_ms: int = 0) -> None:
        pass

    def attach(self, *_: object) -> None:
        pass


class _Channel(Channel):
    """The engine's channel, with the messages of a case."""

    def __init__(self, batch: list[bytes]) -> None:
        self._progress = Progress()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FrontEndMessage)
        self.connection = cast("Any", _Sockets(batch))


class ProtocolTarget:
    """See the module."""

    def __init__(self) -> None:
        ours, self._other_side = socket.socketpair()
        self._remote = RemoteEngine(ours.detach(), 1)

    def make(self, rng: random.Random) -> bytes:
        """Mutate one or more messages for one receiver, as a tree of values or as bytes."""
        receiver = rng.choice(list(MESSAGES))
        batch = []
        for message in rng.choices(MESSAGES[receiver], k=rng.randint(1, 5)):
            data = msgspec.msgpack.encode(message)
            kind = rng.random()
            if kind < 0.6:
                tree = mutate_tree(msgspec.msgpack.decode(data, strict=False), rng)
                with contextlib.suppress(OverflowError, RecursionError, ValueError):
                    data = msgspec.msgpack.encode(tree)
            elif kind < 0.8:
                data = mutate(data, rng)
            batch.append(data)
        return msgspec.msgpack.encode([receiver, batch])

    def check(self, case: bytes) -> None:
        """Give the messages to the receiver."""
        receiver, batch = msgspec.msgpack.decode(case, type=tuple[str, list[bytes]])
        getattr(self, f"_to_{receiver.replace(' ', '_')}")(batch)

    def close(self) -> None:
        """Close the sockets."""
        self._remote.stop()
        self._other_side.close()

    def _to_client(self, batch: list[bytes]) -> None:
        client = EngineClient(_CONFIG)
        try:
            client.engines[0]._connection = cast("Any", _Sockets())
            client.reports[0].state = EngineState.READY
            for request in _REQUESTS[:2]:
                client.submit(cast("GenerateRequest", request))
            client.engines[0]._on_messages(batch)
        finally:
            client.kill()

    def _to_front_end(self, batch: list[bytes]) -> None:
        self._remote._connection.drain()
        self._remote.reports = [EngineReport(state=EngineState.READY, info=_INFO)]
        self._remote._streams.clear()
        self._remote.hub_lost = cast("Any", Future())  # `start` makes it
        for request in _REQUESTS[:2]:
            self._remote.submit(cast("GenerateRequest", request))
        # The parent ends all requests after a step that contradicts itself.
        with contextlib.suppress(ValueError, LookupError):
            self._remote._on_messages(batch)

    def _to_hub(self, batch: list[bytes]) -> None:
        hub = EngineHub(_CONFIG, environments=({}, {}))
        try:
            for engine in hub.engines:
                engine._connection = cast("Any", _Sockets())
                engine.report.state, engine.report.info = EngineState.READY, _INFO
            front_end = FrontEndConnection(
                cast("Any", _Sockets()),
                0,
                lambda: None,
                lambda _: None,
                SilenceTimer(1.0),
                [{}, {}],
            )
            hub._front_ends = [front_end]
            hub._on_front_end_messages(front_end, batch)
            hub._front_ends = []
        finally:
            hub.kill()

    def _to_engine(self, batch: list[bytes]) -> None:
        engine = make_engine(_CONFIG, _Channel(batch))
        engine._compiling = GrammarQueue(_refuse_grammar)  # the arithmetic runner has none
        engine.receive(wait=0)
        for _ in range(_MAX_STEPS):
            if not engine.has_work:
                break
            engine.step()
