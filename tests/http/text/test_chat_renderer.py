"""Conversations are rendered in processes that clients share."""

import asyncio

import pytest

from model.text.rendering.renderer import MOST_PROCESSES
from server.http.text.chat_renderer import ChatRenderer
from server.http.text.tokenizing import TokenizerThreads
from tests.waiting import reached

pytestmark = pytest.mark.anyio

ENOUGH = 60.0
ALL_OF_A_CLIENT = MOST_PROCESSES // 2


class Slow:
    """A conversation whose rendering ends when it is let go."""

    def __init__(self):
        self.num_started, self.may_end = 0, asyncio.Event()

    async def render(self):
        self.num_started += 1
        await self.may_end.wait()


class Quick:
    """A conversation that fails, or not."""

    def __init__(self, error=None):
        self.error = error

    async def render(self):
        if self.error is not None:
            raise self.error
        return "done"


@pytest.fixture
async def renderer(anyio_backend):
    threads = TokenizerThreads(1)
    renderer = ChatRenderer(threads)
    yield renderer
    renderer.close()
    threads.close()


def ask(renderer, client, conversation=None, given=()):
    it = Quick() if conversation is None else conversation
    return asyncio.ensure_future(renderer.render(lambda: it, given, client))


async def test_one_client_never_has_all_processes(renderer):
    slow = Slow()
    asking = [ask(renderer, "slow", slow) for _ in range(50)]
    await reached(lambda: slow.num_started == ALL_OF_A_CLIENT)

    async with asyncio.timeout(ENOUGH):
        assert (await ask(renderer, "other"))[1] == "done"
    assert slow.num_started == ALL_OF_A_CLIENT

    slow.may_end.set()
    await asyncio.gather(*asking)
    assert slow.num_started == 50


async def test_clients_take_turns_where_all_processes_are_in_use(renderer):
    slow, order = Slow(), []
    held = [ask(renderer, f"held {i}", slow) for i in range(MOST_PROCESSES)]
    await reached(lambda: slow.num_started == MOST_PROCESSES)
    waiting = [ask(renderer, client) for client in ["many"] * 20 + ["few"]]
    for client, it in zip(["many"] * 20 + ["few"], waiting, strict=True):
        it.add_done_callback(lambda _, client=client: order.append(client))
    await asyncio.sleep(0)
    slow.may_end.set()
    await asyncio.gather(*held, *waiting)
    await reached(lambda: len(order) == 21)

    assert order.index("few") <= MOST_PROCESSES


async def test_a_caller_that_is_cancelled_leaves_its_place(renderer):
    slow = Slow()
    held = [ask(renderer, "a", slow) for _ in range(10)]
    await reached(lambda: slow.num_started == ALL_OF_A_CLIENT)
    for task in reversed(held):
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)

    for _ in range(2 * MOST_PROCESSES):
        async with asyncio.timeout(ENOUGH):
            assert (await ask(renderer, "a"))[1] == "done"


async def test_an_error_of_a_conversation_is_the_caller_s(renderer):
    for _ in range(2 * MOST_PROCESSES):
        with pytest.raises(KeyError):
            await ask(renderer, "a", Quick(KeyError("x")))
    assert (await ask(renderer, "a"))[1] == "done"


@pytest.mark.parametrize("size", [10, 1_000_000])
async def test_conversations_of_any_size_are_prepared_before_they_wait(renderer, size):
    assert (await ask(renderer, "a", given=["x" * size]))[1] == "done"
