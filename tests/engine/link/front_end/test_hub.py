"""The hub and its front ends notice when the other side hangs, does not read or sends nonsense."""

import asyncio
import contextlib
import os
import socket
import time

import msgspec
import pytest

from model.sampling.parameters import SamplingParams
from server.engine.core.messages import AbortRequests, EngineConfig, EngineStats, StepMessage
from server.engine.core.request import AdapterRef, FinishReason, GenerateRequest
from server.engine.link.front_end import hub as hub_module
from server.engine.link.front_end.client import EngineUnavailableError, RemoteEngine
from server.engine.link.front_end.hub import EngineHub
from server.engine.link.protocol import (
    AdapterChange,
    AdapterRefusal,
    Attached,
    EngineState,
    RequestHeader,
)
from server.engine.link.sockets import Connection
from tests.engine.link.front_end.test_client import (
    COMMAND,
    collect,
    expected_tokens,
    run,
    submit,
)
from tests.waiting import reached

TAKEN, UNKNOWN = AdapterRefusal.TAKEN, AdapterRefusal.UNKNOWN


class Pool:
    """A hub with a fake engine, and the reasons for which it gave front ends up."""

    def __init__(self, hub):
        self.hub = hub
        self.failures = []
        self.closing = contextlib.ExitStack()

    def connect(self):
        """Return the hub's side of a connection, and the descriptor of the other side."""
        ours, theirs = socket.socketpair()
        connection = self.hub.connect(ours.detach(), lambda: None, self.failures.append)
        return connection, theirs.detach()

    async def front_end(self, hang_seconds=60.0):
        """Return a front end, which works in this process, and the hub's side of its connection."""
        connection, descriptor = self.connect()
        remote = RemoteEngine(descriptor, connection.first_id, hang_seconds)
        self.closing.callback(remote.stop)
        await remote.start()
        await reached(lambda: remote.state is EngineState.READY)
        return remote, connection

    def raw(self):
        """Return a front end that only does what the test says, and the hub's side of its connection."""
        connection, descriptor = self.connect()
        sockets = Connection(descriptor)
        self.closing.callback(sockets.close)
        sockets.send(msgspec.msgpack.encode(Attached()))
        return sockets, connection


@contextlib.asynccontextmanager
async def pool(behaviour="ok", hang_seconds=60.0):
    hub = EngineHub(EngineConfig(model_path=behaviour, model_id="fake"), hang_seconds, COMMAND)
    await hub.start()
    try:
        await hub.wait_until_ready()
        service = Pool(hub)
        with service.closing:
            yield service
    finally:
        await hub.stop()


def test_a_front_end_whose_loop_hangs_is_cut_off_and_its_requests_are_aborted():
    async def scenario():
        async with pool("slow") as service:
            remote, healthy = await service.front_end()
            hung, connection = await service.front_end()
            submit(hung, [1, 2], 400)
            await reached(lambda: service.hub.stats.num_running == 1)
            hung._heartbeats.cancel()  # as if its event loop did not run
            service.hub.hang_seconds = 1.0
            await reached(lambda: service.failures)

            assert service.failures[0].startswith("has been silent for 1.")
            await reached(lambda: service.hub.stats.num_running == 0)
            assert not healthy.failed
            assert len(await collect(submit(remote, [3], 3))) == 3
            service.hub.disconnect(connection)

    run(scenario())


def test_a_change_of_adapters_reaches_all_front_ends_and_those_that_start_later():
    async def scenario():
        async with pool() as service:
            first, _ = await service.front_end()
            second, _ = await service.front_end()
            seen = {first: [], second: []}
            for front_end, changes in seen.items():
                front_end.share_adapters((), changes.append)
            loaded = AdapterChange("sql", AdapterRef("sql", "/adapters/sql", "digest"), 8)
            other = AdapterChange("chat", AdapterRef("chat", "/adapters/chat", "other"), 4)

            for change in (loaded, other, AdapterChange("chat")):
                assert await first.change_adapters(change) is None
                assert seen[first][-1] == change
            await reached(lambda: len(seen[second]) == 3)
            assert seen[first] == seen[second] == [loaded, other, AdapterChange("chat")]

            connection, descriptor = service.connect()
            late, found = RemoteEngine(descriptor, connection.first_id), []
            service.closing.callback(late.stop)
            late.share_adapters((), found.append)
            await late.start()
            assert found == [loaded]

    run(scenario())


def test_changes_of_one_name_at_once_leave_all_front_ends_with_the_same_adapters():
    async def scenario():
        async with pool() as service:
            front_ends = [(await service.front_end())[0] for _ in range(3)]
            seen = [[] for _ in front_ends]
            for front_end, changes in zip(front_ends, seen, strict=True):
                front_end.share_adapters((), changes.append)
            loads = [
                AdapterChange("sql", AdapterRef("sql", f"/{digest}", digest), 8) for digest in "abc"
            ]

            def change_all(changes, **more):
                pairs = zip(front_ends, changes, strict=True)
                return asyncio.gather(*(it.change_adapters(one, **more) for it, one in pairs))

            refusals = await change_all(loads)
            assert sorted(refusals, key=str) == [TAKEN, TAKEN, None]
            assert await change_all(loads, replaces=True) == [None] * 3
            refusals = await change_all([AdapterChange("sql")] * 3)
            assert sorted(refusals, key=str) == [UNKNOWN, UNKNOWN, None]
            await reached(lambda: all(len(it) == 5 for it in seen))
            assert seen[0] == seen[1] == seen[2]

    run(scenario())


def test_a_question_about_adapters_ends_with_the_connection_to_the_hub():
    async def scenario():
        async with pool() as service:
            remote, _ = await service.front_end()
            change = remote.change_adapters(AdapterChange("sql"))
            asking = asyncio.ensure_future(change)
            await asyncio.sleep(0)
            remote._lose_hub("test")
            await asyncio.wait([asking])
            assert asking.cancelled()

    run(scenario())


def test_a_front_end_that_never_attaches_has_longer_but_not_for_ever():
    async def scenario():
        async with pool(hang_seconds=1.0) as service:
            connection, descriptor = service.connect()
            service.closing.callback(os.close, descriptor)
            await asyncio.sleep(1.5)
            assert service.failures == []
            service.hub.hang_seconds = 0.2
            await reached(lambda: service.failures)
            service.hub.disconnect(connection)

    run(scenario())


def test_a_front_end_that_does_not_read_is_cut_off_before_much_is_queued(monkeypatch):
    monkeypatch.setattr(hub_module, "_MAX_UNREAD_BYTES", 20_000)

    async def scenario():
        async with pool() as service:
            remote, _ = await service.front_end()
            _, connection = service.raw()
            await reached(lambda: connection.attached)
            connection.requests[0][connection.first_id] = RequestHeader(connection.first_id)
            # One after the other: all at once would be more than a front end that reads may have unread.
            for _ in range(40):
                events = await collect(submit(remote, [1, 2, 3], 10))
                assert [e.token_id for e in events] == expected_tokens([1, 2, 3], 10)

            assert service.failures
            assert "has not read" in service.failures[0]
            assert connection.sent_bytes < 25_000

    # The healthy front end acknowledges too rarely for this limit, unless it is asked to hurry.
    monkeypatch.setattr("server.engine.link.front_end.client.tick_seconds", lambda _: 0.001)
    run(scenario())


@pytest.mark.parametrize("has_statistics", [False, True])
def test_a_front_end_without_requests_gets_only_statistics(has_statistics):
    async def scenario():
        async with pool() as service:
            _, busy = await service.front_end()
            _, idle = await service.front_end()
            busy.requests[0][busy.first_id] = RequestHeader(busy.first_id)
            before = busy.sent_bytes, idle.sent_bytes
            stats = EngineStats() if has_statistics else None
            step = StepMessage(
                request_ids=[busy.first_id], token_ids=[5], finish_reasons=[0], stats=stats
            )
            service.hub.on_steps(0, [(b"bytes of the step", step)])

            assert busy.sent_bytes - before[0] == len(b"bytes of the step")
            assert idle.sent_bytes == before[1]
            if has_statistics:  # a moment later, and without the tokens
                await reached(lambda: idle.sent_bytes > before[1])

    run(scenario())


HOSTILE = [
    (b"\xc1", "cannot be decoded"),
    (b"", "cannot be decoded"),
    (b"\x81\xa4type\xa8generat\xff", "cannot be decoded"),  # not UTF-8
    (msgspec.msgpack.encode({"type": "generate"}), "cannot be decoded"),
    (msgspec.msgpack.encode({"type": "shutdown"}), "cannot be decoded"),
    (msgspec.msgpack.encode({"type": "generate", "request_id": 1}), "another front end"),
    (msgspec.msgpack.encode(AbortRequests([1])), "another front end"),
]


def test_a_hostile_front_end_is_cut_off_and_the_others_go_on():
    async def scenario():
        async with pool() as service:
            remote, _ = await service.front_end()
            for data, reason in HOSTILE:
                service.failures.clear()
                hostile, connection = service.raw()
                hostile.send(data)
                await reached(lambda: service.failures)

                assert reason in service.failures[0], data
                service.hub.disconnect(connection)
                assert len(await collect(submit(remote, [3], 3))) == 3
            assert service.hub.restarts == 0

    run(scenario())


def test_a_request_that_only_the_engine_cannot_decode_ends_with_an_error():
    async def scenario():
        async with pool() as service:
            remote, connection = await service.front_end()
            stream = submit(remote, [5], 400)
            twin = msgspec.to_builtins(
                GenerateRequest(
                    request_id=remote.next_request_id(),
                    prompt_token_ids=[1],
                    sampling=SamplingParams(max_new_tokens=1),
                )
            )
            other = submit(remote, [6], 1)
            await collect(other)
            request_id = twin["request_id"]
            remote._streams[request_id] = type(stream)(request_id, remote.abort, lambda _: None)
            broken = {"type": "generate", "request_id": request_id, "prompt_token_ids": "text"}
            remote._connection.send(msgspec.msgpack.encode(broken))
            events = await collect(remote._streams[request_id])

            assert events[-1].finish_reason is FinishReason.ERROR
            assert "could not decode" in events[-1].error
            assert service.failures == []
            assert len(await collect(stream)) == 400
            assert not connection.all_requests()

    run(scenario())


def test_a_front_end_that_cannot_decode_a_message_of_the_hub_ends_its_requests():
    async def scenario():
        async with pool("slow") as service:
            remote, connection = await service.front_end()
            stream = submit(remote, [1], 400)
            await anext(stream)
            service.hub._send_to(connection, b"\xc1")
            events = await collect(stream)

            assert events[-1].finish_reason is FinishReason.ERROR
            assert remote.state is EngineState.STOPPED
            assert "cannot be decoded" in await remote.hub_lost

    run(scenario())


def test_a_front_end_whose_hub_hangs_ends_its_requests_and_refuses_new_ones():
    async def scenario():
        async with pool("slow") as service:
            remote, _ = await service.front_end(hang_seconds=1.0)
            stream = submit(remote, [1], 400)
            await anext(stream)
            began = time.monotonic()
            service.hub._hang_watch.cancel()  # no heartbeats, and
            service.hub.on_steps = lambda engine, steps: None
            events = await collect(stream)

            assert time.monotonic() - began > 0.8
            assert events[-1].finish_reason is FinishReason.ERROR
            assert remote.state is EngineState.STOPPED
            assert "silent" in await remote.hub_lost
            with pytest.raises(EngineUnavailableError, match="does not respond"):
                submit(remote, [1])

    run(scenario())
