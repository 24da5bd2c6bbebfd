"""Checks of constraints whose workers are killed, stopped or cannot start, and clients that share the workers."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from model.helper_process.process import HelperProcess
from server.errors import OverloadedError, StoppingError, UnavailableError
from server.http.text import grammar_compiler
from server.http.text.grammar_compiler import Constraint, GrammarCompiler
from tests.http.text import toy_grammar_worker
from tests.waiting import reached

pytestmark = pytest.mark.anyio

VOCAB_SIZE = 260
GOOD = Constraint("regex", "[a-z]+")
SECONDS = 0.3
TOY = (sys.executable, "-I", "-S", toy_grammar_worker.__file__)


@pytest.fixture
async def compiler(tokenizer, anyio_backend):
    found = GrammarCompiler(str(tokenizer.folder), (256,))
    yield found
    found.close()


@pytest.fixture
async def toys(compiler, monkeypatch, tmp_path):
    """A compiler whose workers do what the constraint says; see `toy_grammar_worker`."""
    monkeypatch.setattr(grammar_compiler, "_COMMAND", TOY)
    monkeypatch.setattr(grammar_compiler, "SECONDS", SECONDS)
    (tmp_path / "workers").mkdir()
    compiler._folder = str(tmp_path / "workers")
    compiler._pool._pauses = (0.0, 0.0, 0.01, 0.01)
    return compiler


def check(compiler, what, client=""):
    return asyncio.ensure_future(compiler.check(Constraint("toy", what), VOCAB_SIZE, client))


def starts(compiler):
    """Return how many workers have started."""
    return len(list(Path(compiler._folder).iterdir()))


def num_tasks(compiler):
    """Return how many tasks they have started."""
    return sum(int(file.read_text() or 0) for file in Path(compiler._folder).iterdir())


def pids(compiler):
    return compiler._pool.pids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
async def test_a_valid_grammar_is_compiled_although_each_idle_worker_is_hit_before(
    compiler, number
):
    for i in range(2):
        for pid in pids(compiler):
            os.kill(pid, number)
        verdict = await compiler.check(Constraint("regex", f"[a-z]{{{i + 1}}}"), VOCAB_SIZE)
        assert verdict.grammar
        assert not verdict.error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS, signal.SIGXCPU, signal.SIGSTOP])
async def test_a_worker_that_is_hit_during_a_check_is_replaced_and_the_check_made_again(
    toys, number
):
    made = check(toys, {"wait once": True})
    await reached(lambda: num_tasks(toys) == 1)

    os.kill(pids(toys)[0], number)

    assert (await made).grammar == "compiled"


async def test_workers_that_are_always_killed_are_an_outage_and_nothing_is_cached(toys):
    made = check(toys, {"signal": signal.SIGKILL, "times": 5})

    with pytest.raises(UnavailableError) as error:
        await made
    assert error.value.retry_after
    assert (await check(toys, {"signal": signal.SIGKILL, "times": 5})).grammar == "compiled"


async def test_four_killed_workers_are_no_outage(toys):
    assert (await check(toys, {"signal": signal.SIGKILL, "times": 4})).grammar == "compiled"


@pytest.mark.parametrize(
    "end", [{"signal": signal.SIGSEGV}, {"signal": signal.SIGABRT}, {"exit": 70}], ids=str
)
async def test_a_task_that_crashes_two_fresh_workers_is_at_fault_and_that_is_cached(toys, end):
    await check(toys, {})  # the first worker is not fresh then
    before = starts(toys)
    what = {**end, "times": 99}

    verdict = await check(toys, what)

    assert verdict.error == "is too complex to compile"
    assert starts(toys) == before + 2
    assert await check(toys, what) == verdict
    assert starts(toys) == before + 2


async def test_a_single_crash_is_no_verdict(toys):
    assert (await check(toys, {"signal": signal.SIGSEGV, "times": 1})).grammar == "compiled"


async def test_a_crash_between_other_ends_is_no_verdict(toys):
    assert (await check(toys, {"signals": [9, 11, 24, 9]})).grammar == "compiled"


async def test_processor_time_is_a_verdict_at_once(toys):
    verdict = await check(toys, {"spin": True})

    assert verdict.error == "takes longer than 0.3 seconds to compile"
    assert starts(toys) == 1
    assert await check(toys, {"spin": True}) == verdict


async def test_a_worker_that_waits_for_the_processor_is_not_too_slow(toys):
    assert (await check(toys, {"sleep": 3 * SECONDS})).grammar == "compiled"
    assert starts(toys) == 1


async def test_workers_that_cannot_start_are_an_outage_until_they_can(toys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(grammar_compiler, "_COMMAND", ("/no/such/program",))
        with pytest.raises(UnavailableError):
            await check(toys, {})

    assert (await check(toys, {})).grammar == "compiled"


async def test_a_system_that_refuses_processes_for_a_moment_is_no_outage(toys, monkeypatch):
    start = HelperProcess._start
    refusals = [BlockingIOError(11, "no process"), OSError(24, "files")]

    def refuse(process):
        if refusals:
            raise refusals.pop()
        return start(process)

    monkeypatch.setattr(HelperProcess, "_start", refuse)

    assert (await check(toys, {})).grammar == "compiled"


async def test_a_check_without_an_end_is_an_outage(toys, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_CHECK_SECONDS", 0.5)

    with pytest.raises(UnavailableError):
        await check(toys, {"wait": True})
    await reached(lambda: not toys._pool.pids)
    assert (await check(toys, {})).grammar == "compiled"


async def test_closing_ends_checks_that_run_and_wait_and_all_workers(toys):
    made = [check(toys, {"wait": True, "id": i}, f"client {i % 3}") for i in range(9)]
    await reached(lambda: starts(toys) == 3)

    toys.close()

    assert all(
        isinstance(it, StoppingError) for it in await asyncio.gather(*made, return_exceptions=True)
    )
    await reached(lambda: not toys._pool.pids)
    with pytest.raises(StoppingError):
        await check(toys, {})
    assert starts(toys) == 3


async def test_closing_ends_a_stopped_worker(toys):
    made = check(toys, {"signal": signal.SIGSTOP, "times": 99})
    await reached(lambda: starts(toys) == 1 and pids(toys))

    toys.close()

    with pytest.raises(StoppingError):
        await made
    await reached(lambda: not toys._pool.pids)


async def test_callers_with_equal_constraints_share_one_check(toys):
    made = [check(toys, {"sleep": 0.2}, "a") for _ in range(5)]

    assert len({(await it).grammar for it in made}) == 1
    assert starts(toys) == 1


async def test_a_check_whose_callers_have_left_is_not_made_unless_it_has_begun(toys):
    started = [check(toys, {"wait": True, "id": i}, "a") for i in range(2)]
    await reached(lambda: num_tasks(toys) == 2)
    waiting = [check(toys, {"id": i}, "a") for i in range(2, 50)]
    await asyncio.sleep(0)
    assert len(toys._checks) == 50

    for it in (*started, *waiting):
        it.cancel()
    await asyncio.gather(*started, *waiting, return_exceptions=True)

    await reached(lambda: not toys._places.num_waiting("a"))
    assert len(toys._checks) == 2
    assert (await check(toys, {}, "b")).grammar == "compiled"
    assert num_tasks(toys) == 3


async def test_a_constraint_that_everybody_gave_up_can_be_asked_for_again_at_once(toys):
    started = [check(toys, {"wait once": True, "id": i}, "a") for i in range(2)]
    await reached(lambda: num_tasks(toys) == 2)
    given_up = check(toys, {"x": 1}, "a")
    await asyncio.sleep(0)

    given_up.cancel()
    await asyncio.sleep(0)
    again = check(toys, {"x": 1}, "a")
    for pid in pids(toys):
        os.kill(pid, signal.SIGKILL)
    for it in started:
        it.cancel()

    assert (await check(toys, {"x": 1}, "b")).grammar == "compiled"
    assert (await again).grammar == "compiled"


async def test_a_client_whose_checks_are_long_leaves_a_worker_to_others(toys):
    long = [check(toys, {"wait": True, "id": i}, "a") for i in range(150)]
    await reached(lambda: starts(toys) == 2)

    for client in ("b", "c", "b", "b"):
        assert (await check(toys, {"client": client}, client)).grammar == "compiled"

    assert not any(it.done() for it in long)


async def test_clients_take_turns_when_all_workers_are_busy(toys):
    started = []

    async def attempt(_, line):
        started.append(json.loads(line)["constraint"]["value"][0])
        for _ in range(5):
            await asyncio.sleep(0)
        return b'{"grammar": "compiled"}'

    toys._attempt = attempt
    heavy = [check(toys, [client, i], client) for i in range(50) for client in "ab"]
    await reached(lambda: len(started) >= 10)
    before = len(started)
    await check(toys, ["c", 0], "c")

    assert started.index("c") < before + 20  # of the 100 that came earlier
    await asyncio.gather(*heavy)


async def test_a_client_that_waits_too_long_is_told_so_and_holds_nothing(toys, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_QUEUE_SECONDS", 0.05)
    long = [check(toys, {"wait": True, "id": i}, "a") for i in range(2)]
    await reached(lambda: starts(toys) == 2)

    with pytest.raises(OverloadedError):
        await check(toys, {}, "a")
    assert (await check(toys, {}, "b")).grammar == "compiled"
    for pid in pids(toys):
        os.kill(pid, signal.SIGKILL)
    for it in long:
        it.cancel()


async def test_no_client_sweeps_the_verdicts_of_another(toys, monkeypatch):
    monkeypatch.setattr(toys._cache, "_most", 20)
    await check(toys, {"of": "b"}, "b")
    for i in range(60):
        await check(toys, {"of": i}, "a")
    toys._attempt = None  # nothing is computed again

    assert (await check(toys, {"of": "b"}, "c")).grammar == "compiled"
    assert (await check(toys, {"of": 59}, "c")).grammar == "compiled"
