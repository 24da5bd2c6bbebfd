"""The columns of a step: a new one is a record, from which input, sizes and messages follow."""

from operator import attrgetter

import msgspec
import numpy as np
import pytest
import torch

from model.executors import columns
from model.executors.columns import Bucket, Column, columns_of, input_bytes, per_sequence
from model.executors.step import StepInput
from server.engine.core.limits import SchedulerConfig
from server.engine.core.sequence import Sequence
from server.engine.core.step import DecodeBatch, DecodeRows, ScheduledSequence
from server.engine.runner.step.buckets import BucketGrid
from server.engine.runner.step.ranks import RankCommand
from server.engine.runner.step.sampled_tokens import SampledTokens
from server.engine.runner.step.step_input import PackedStep, exact_bucket
from tests.engine.core.bookkeeping import make_request

CPU = torch.device("cpu")
S = 4
ADAPTERS = Column("adapters", np.int32, per_sequence, fill=-1, value=attrgetter("adapter"))


class Adapted(Sequence):
    """A sequence with a value of its own."""

    def __init__(self, name, num_tokens, adapter=-1):
        super().__init__(make_request(name, num_tokens))
        self.adapter = adapter
        self.block_table = [8 * name + i for i in range(4)]

    @property
    def last(self):
        """Its last token as the row of a step."""
        return ScheduledSequence(self, self.num_tokens - 1, 1, 1)

    @property
    def whole(self):
        """All of its tokens as a chunk."""
        return ScheduledSequence(self, 0, self.num_tokens, 1)


@pytest.fixture
def _adapters(monkeypatch):
    monkeypatch.setattr(columns, "COLUMNS", (*columns.COLUMNS, ADAPTERS))


def packed_step(decode, prefill, bucket=None):
    packed = PackedStep(bucket or exact_bucket(decode, prefill, S), S, CPU)
    packed.pack(decode, prefill, SampledTokens(20, CPU))
    return packed


def test_the_columns_are_the_arrays_of_an_input_on_host_and_device():
    bucket = Bucket(rows=2, queries=3, prompt_tokens=5, prompt_seqs=2, columns=4, num_logits=6)
    step = StepInput(bucket, S, CPU)

    for column in columns_of(bucket):
        array, tensor = getattr(step.host, column.name), getattr(step.device, column.name)
        assert array.shape == tensor.shape == column.size(bucket)
        assert array.dtype == column.dtype
    assert len(vars(step.host)) == len(columns_of(bucket))
    assert step.host.token_ids.shape == (2 * 3 + 5,)
    assert (step.decode.num_tokens, step.decode.max_seqlen_q) == (6, 3)
    assert input_bytes(bucket) == sum(array.nbytes for array in vars(step.host).values())


@pytest.mark.usefixtures("_adapters")
def test_a_record_is_all_that_a_column_with_a_value_per_sequence_needs():
    plain, one, two = Adapted(1, 3), Adapted(2, 5, adapter=7), Adapted(3, 6, adapter=9)
    decode, prefill = DecodeRows.of([plain.last, one.last]), (two.whole,)
    exact = exact_bucket(decode, prefill, S)
    larger = msgspec.structs.replace(exact, rows=4, prompt_seqs=3)

    assert exact.extra_columns == ("adapters",)
    assert packed_step(decode, prefill).input.host.adapters.tolist() == [-1, 7, 9]
    packed = packed_step(decode, prefill, larger)
    assert packed.input.host.adapters.tolist() == [-1, 7, -1, -1, 9, -1, -1]
    assert packed.input.device.adapters.dtype is torch.int32
    assert (
        input_bytes(larger) - input_bytes(msgspec.structs.replace(larger, extra_columns=())) == 28
    )
    # The other ranks get it with the others.
    command = msgspec.msgpack.decode(
        msgspec.msgpack.encode(RankCommand(packed.input.to_bytes(), 0, larger)),
        type=RankCommand,
    )
    theirs = StepInput(command.bucket, S, CPU)
    theirs.load(command.data)
    assert command.bucket == larger
    assert theirs.host.adapters.tolist() == packed.input.host.adapters.tolist()
    # So do recordings, which have their own buckets.
    grid = BucketGrid(SchedulerConfig(4, 64, 64), S)
    assert all(it.extra_columns == ("adapters",) for it in grid.fitting(exact))


@pytest.mark.usefixtures("_adapters")
def test_a_step_without_values_lacks_the_column():
    decode, prefill = DecodeRows.of([Adapted(1, 3).last]), (Adapted(2, 5).whole,)

    assert exact_bucket(decode, prefill, S).extra_columns == ()
    assert "adapters" not in vars(packed_step(decode, prefill).input.host)


@pytest.mark.usefixtures("_adapters")
@pytest.mark.parametrize("in_prompt", [False, True])
def test_a_single_sequence_with_a_value_gives_the_step_the_column(in_prompt):
    one, other = Adapted(1, 3, adapter=0), Adapted(2, 5)
    decode = DecodeRows.of([(other if in_prompt else one).last])
    prefill = ((one if in_prompt else other).whole,)

    assert exact_bucket(decode, prefill, S).extra_columns == ("adapters",)
    assert (
        packed_step(decode, prefill).input.host.adapters.tolist() == [[0, -1], [-1, 0]][in_prompt]
    )


@pytest.mark.usefixtures("_adapters")
def test_the_values_of_a_batch_are_read_once():
    read = []
    members = [Adapted(1, 3, adapter=4), Adapted(2, 5, adapter=5)]
    batch = DecodeBatch(members)
    decode = DecodeRows(batch, [2, 4], 2)
    packed, sampled = packed_step(decode, ()), SampledTokens(20, CPU)
    column = ADAPTERS._replace(value=lambda it: read.append(it) or it.adapter)
    again = PackedStep(packed.input.bucket, S, CPU)
    again._of_sequences = [(again.input.host.adapters, column.value, column.fill)]
    for _ in range(3):
        again.pack(decode, (), sampled)

    assert again.input.host.adapters.tolist() == [4, 5]
    assert read == members
    again.pack(DecodeRows.of([members[1].last]), (), sampled)
    assert again.input.host.adapters.tolist() == [5, -1]
