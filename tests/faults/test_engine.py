"""Engine processes with injected faults, seen by a front end."""

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from server.engine.core.messages import EngineConfig
from server.engine.core.request import FinishReason
from server.engine.core.results.step_retry import STEP_FAILED
from server.engine.link.front_end.client import EngineClient
from server.engine.link.protocol import EngineState
from tests.engine.link.front_end.test_client import collect, expected_tokens, submit
from tests.faults.engine import COMMAND, FAKE_COMMAND, ONCE_VARIABLE, VARIABLE
from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.waiting import reached


@contextlib.asynccontextmanager
async def running(command=FAKE_COMMAND, hang_seconds=60.0, **config):
    config = {"model_path": "ok", "model_id": "fake", "quantization": "none"} | config
    client = EngineClient(EngineConfig(**config), hang_seconds, command)
    await client.start()
    try:
        await client.wait_until_ready()
        yield client
    finally:
        await client.stop()


@pytest.fixture
def faults(monkeypatch, tmp_path):
    def inject(text, *, once=False):
        monkeypatch.setenv(VARIABLE, text)
        if once:
            monkeypatch.setenv(ONCE_VARIABLE, str(tmp_path / "once"))

    return inject


@pytest.mark.parametrize("fault", ["raise", "oom", "nan"])
def test_a_fault_of_one_sequence_ends_one_request_of_a_process(faults, fault):
    faults(f"{fault}@step=1:row=0")

    async def scenario():
        async with running() as client:
            bad = await collect(submit(client, [1, 2], 5))
            good = await collect(submit(client, [3, 4], 5))
            assert bad[-1].finish_reason is FinishReason.ERROR
            assert [e.token_id for e in good] == expected_tokens([3, 4], 5)
            assert client.restarts == 0
            assert client.stats.num_free_blocks == client.stats.num_blocks

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "fault", ["exit", "segfault", "fatal", pytest.param("hang", marks=pytest.mark.slow)]
)
def test_after_a_fault_that_ends_the_process_the_next_one_serves(faults, fault):
    faults(f"{fault}@step=2", once=True)

    async def scenario():
        async with running(hang_seconds=5.0 if fault == "hang" else 60.0) as client:
            lost = await collect(submit(client, [1, 2], 5))
            assert lost[-1].finish_reason is FinishReason.ERROR
            await reached(lambda: client.state is EngineState.READY and client.restarts == 1)
            again = await collect(submit(client, [1, 2], 5))
            assert [e.token_id for e in again] == expected_tokens([1, 2], 5)

    asyncio.run(scenario())


def test_a_slow_step_only_takes_longer(faults):
    faults("slow@step=2:seconds=0.3")

    async def scenario():
        async with running() as client:
            loop = asyncio.get_running_loop()
            began = loop.time()
            events = await collect(submit(client, [1, 2], 5))
            assert loop.time() - began >= 0.3
            assert [e.token_id for e in events] == expected_tokens([1, 2], 5)

    asyncio.run(scenario())


def test_a_process_of_which_every_step_fails_is_replaced(faults):
    faults("raise@times=0", once=True)

    async def scenario():
        async with running() as client:
            for _ in range(5):
                (event,) = await collect(submit(client, [1], 5))
                assert event.error == STEP_FAILED
            await reached(lambda: client.state is EngineState.READY and client.restarts == 1)
            events = await collect(submit(client, [1], 5))
            assert [e.token_id for e in events] == expected_tokens([1], 5)

    asyncio.run(scenario())


def test_an_idle_process_finds_its_bookkeeping_in_order():
    async def scenario():
        async with running() as client:
            await collect(submit(client, [1] * 40, 5))
            await asyncio.sleep(1.2)  # until it has checked
            await collect(submit(client, [1] * 40, 5))
            assert client.stats.num_invariant_violations == 0

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_real_engine_isolates_nan(faults, tmp_path):
    faults("nan@step=3:row=0")
    folder = write_tiny_checkpoint(tmp_path)

    async def scenario():
        async with running(COMMAND, model_path=str(folder), device="cpu") as client:
            events = await collect(submit(client, [1, 2, 3, 4, 5], 20))
            assert events[-1].finish_reason is FinishReason.ERROR
            assert "finite" in events[-1].error
            assert len(await collect(submit(client, [1, 2, 3, 4, 5], 20))) == 20

    asyncio.run(scenario())


def test_the_command_needs_no_particular_folder():
    assert COMMAND[0] == sys.executable
    assert Path(COMMAND[1]).is_absolute()
