"""Texts wait for memory, and are refused where there is none."""

import asyncio

import pytest

from server.errors import BodyTooLargeError, OverloadedError
from server.http.text import tokenizer_memory
from server.http.text.tokenizer_memory import BYTES_PER_BYTE, TokenizerMemory
from server.http.text.tokenizing import LONG, TokenizerThreads

pytestmark = pytest.mark.anyio
MIB = 1 << 20


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """A host with 1,000 MiB, of which 500 are free; may be changed."""
    sizes = {"free": 500 * MIB, "total": 1000 * MIB}
    monkeypatch.setattr(tokenizer_memory, "free_host_bytes", lambda: sizes["free"])
    monkeypatch.setattr(tokenizer_memory, "total_host_bytes", lambda: sizes["total"])
    return sizes


def text_of(mib):
    """Return the size of a text that takes so much memory."""
    return mib * MIB // BYTES_PER_BYTE


async def waiting(memory, mib):
    task = asyncio.ensure_future(memory.acquire(text_of(mib)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_texts_that_fit_together_are_tokenized_together():
    memory = TokenizerMemory(1.0)

    await memory.acquire(text_of(200))
    await memory.acquire(text_of(199))
    await waiting(memory, 10)


async def test_a_text_waits_for_memory_in_the_order_of_arrival():
    memory = TokenizerMemory(1.0)
    held = await memory.acquire(text_of(300))
    large = await waiting(memory, 350)
    small = await waiting(memory, 20)

    memory.release(held)
    memory.release(await large)
    memory.release(await small)

    await memory.acquire(text_of(399))


async def test_a_text_whose_client_left_waits_no_more():
    memory = TokenizerMemory(1.0)
    held = await memory.acquire(text_of(300))
    gone = await waiting(memory, 350)
    next_one = await waiting(memory, 90)

    gone.cancel()

    await asyncio.wait_for(next_one, 60)
    memory.release(held)


async def test_a_text_for_which_too_little_is_free_is_refused_for_the_moment():
    with pytest.raises(OverloadedError, match=r"may take 450 MiB .* and 400 MiB are free"):
        await TokenizerMemory(1.0).acquire(text_of(451))


async def test_a_text_that_never_fits_is_refused_for_good():
    with pytest.raises(BodyTooLargeError, match=r"may take 899 MiB .* may use 800 MiB"):
        await TokenizerMemory(1.0).acquire(text_of(900))


async def test_a_tokenizer_that_lengthens_texts_needs_more():
    with pytest.raises(OverloadedError, match="may take 599 MiB"):
        await TokenizerMemory(6.0).acquire(text_of(200))


async def test_memory_that_others_take_meanwhile_is_not_given_to_a_text(host):
    memory = TokenizerMemory(1.0)
    await memory.acquire(text_of(100))
    host["free"] = 200 * MIB

    await waiting(memory, 100)


async def test_a_thread_holds_the_memory_until_its_work_ends_although_its_caller_left(host):
    host["free"] = 20 * MIB  # enough for one text
    threads = TokenizerThreads(3)
    loop, started, may_end = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def work():
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result()

    first = asyncio.ensure_future(threads.run(work, LONG))
    await started.wait()
    first.cancel()
    second = asyncio.ensure_future(threads.run(lambda: "done", LONG))
    await asyncio.sleep(0.05)
    assert not second.done()

    may_end.set()

    assert await asyncio.wait_for(second, 60) == "done"
    threads.close()


async def test_a_short_text_needs_no_memory_of_its_own(host):
    host["free"] = 0
    threads = TokenizerThreads(2)

    assert await threads.run(lambda: "done", LONG - 1) == "done"
    with pytest.raises(OverloadedError):
        await threads.run(lambda: "never", LONG)
    threads.close()
