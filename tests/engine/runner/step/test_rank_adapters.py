"""The ranks of a model use an adapter only if all of them have read it, and forget what the leader forgets."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest

from model.errors import AdapterError
from server.engine.core.request import AdapterRef
from server.engine.runner.step.rank_adapters import (
    AdapterCommand,
    AdapterReport,
    DropAdapter,
    FollowingLoader,
    LeadingLoader,
    WriteAdapter,
)
from tests.waiting import GIVE_UP

REF = AdapterRef("sql", "/adapters/sql", "digest")


class Slots:
    """The loader of a rank, whose reads end at once, and fail with an error if there is one."""

    def __init__(self, error=None):
        self.error, self.slots = error, {}
        self._threads = ThreadPoolExecutor(2)

    def submit(self, read):
        return self._threads.submit(read)

    def read_now(self, adapter):
        if self.error is not None:
            raise self.error
        return f"part of {adapter.digest}"

    def read(self, adapter):
        future = Future()
        if self.error is None:
            future.set_result(self.read_now(adapter))
        else:
            future.set_exception(self.error)
        return future

    def write(self, slot, content):
        self.slots[slot] = content

    def num_bytes(self, content):
        return len(content)

    def close(self):
        self._threads.shutdown()


class Ranks:
    """Other ranks in this process, which get commands as bytes at once.

    Attributes:
        commands: that they got.
    """

    def __init__(self, *owns):
        self.size, self.commands, self._sent = 1 + len(owns), [], []
        self.followers = [FollowingLoader(it, self._sent.append) for it in owns]

    def tell(self, command):
        data = msgspec.msgpack.encode(command)
        self.commands.append(command)
        for follower in self.followers:
            follower.run(msgspec.msgpack.decode(data, type=AdapterCommand))

    def reports(self):
        sent, self._sent[:] = list(self._sent), []
        return [
            msgspec.msgpack.decode(msgspec.msgpack.encode(it), type=AdapterReport) for it in sent
        ]


def test_all_ranks_write_what_they_have_read_until_the_leader_forgets_it():
    others = Slots(), Slots()
    ranks = Ranks(*others)
    with closing(Slots()) as slots:
        loader = LeadingLoader(slots, ranks)
        contents = [loader.read(REF).result(GIVE_UP) for _ in range(2)]
        loader.write(1, contents[1])
        assert [it.slots for it in (slots, *others)] == [{1: "part of digest"}] * 3
        assert loader.num_bytes(contents[0]) == len("part of digest")

        loader.drop(contents[1])
        loader.write(0, contents[0])
        assert [type(it) for it in ranks.commands[-2:]] == [DropAdapter, WriteAdapter]
        with pytest.raises(KeyError):
            ranks.followers[0].run(WriteAdapter(contents[1].number, 0))


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ((AdapterError("the files have changed"), None, None), (AdapterError, "have changed")),
        ((None, None, AdapterError("the files have changed")), (AdapterError, "have changed")),
        ((None, OSError("broken"), None), (RuntimeError, "a rank could not read an adapter")),
        ((AdapterError("one"), OSError(), AdapterError("two")), (AdapterError, "one")),
    ],
    ids=str,
)
def test_an_adapter_that_one_rank_cannot_read_is_used_by_none(errors, expected):
    first, *others = map(Slots, errors)
    ranks = Ranks(*others)
    with closing(first):
        loader = LeadingLoader(first, ranks)
        with pytest.raises(expected[0], match=expected[1]):
            loader.read(REF).result(GIVE_UP)
        assert all(not it._reads for it in ranks.followers)
        assert not loader._reports

        for slots in (first, *others):
            slots.error = None
        assert loader.read(REF).result(GIVE_UP).part == "part of digest"
