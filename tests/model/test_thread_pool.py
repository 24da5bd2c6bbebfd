"""Pools whose threads run before they are needed."""

import threading

import pytest

from model.thread_pool import ThreadStartError, started_pool


def test_all_threads_run_before_there_is_work(monkeypatch):
    with started_pool(3, "pool") as pool:
        names = {it.name for it in threading.enumerate() if it.name.startswith("pool")}
        assert len(names) == 3
        monkeypatch.setattr(threading.Thread, "start", None)
        together = threading.Barrier(3)
        for future in [pool.submit(together.wait, 60) for _ in range(3)]:
            future.result(60)


@pytest.mark.parametrize("granted", [0, 1, 2])
def test_a_thread_that_the_system_refuses_is_an_error_and_the_others_end(monkeypatch, granted):
    start, before = threading.Thread.start, set(threading.enumerate())
    started = []

    def refuse(thread):
        if len(started) == granted:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ThreadStartError, match="3 threads of the name `pool`"):
        started_pool(3, "pool")

    for thread in started:
        thread.join(60)
    assert set(threading.enumerate()) == before
