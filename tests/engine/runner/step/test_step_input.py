"""The packed arrays of a step for any mix of sequences, in its exact bucket and in larger ones."""

import random
import weakref

import msgspec
import numpy as np
import pytest
import torch

from model.executors.columns import Bucket
from model.executors.step import StepInput
from model.sampling.parameters import SamplingParams
from server.engine.core.request import GenerateRequest
from server.engine.core.sequence import Sequence
from server.engine.core.step import DecodeBatch, DecodeRows, ScheduledSequence
from server.engine.runner.step.sampled_tokens import SampledTokens
from server.engine.runner.step.step_input import PackedStep, exact_bucket

CPU = torch.device("cpu")
S = 4


def sequence(name, num_tokens, first_block):
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=[100 * name + i for i in range(num_tokens)],
        sampling=SamplingParams(max_new_tokens=4),
    )
    made = Sequence(request)
    made.block_table = [first_block + 7 * i for i in range(-(-num_tokens // S) + 1)]
    return made


def scheduled(name, start, num_tokens, num_logits=1):
    owner = sequence(name, start + num_tokens, 10 * name)
    return ScheduledSequence(owner, start, num_tokens, num_logits)


def pack(decode, prefill, bucket=None, first_sampled=0):
    decode = DecodeRows.of(decode)
    packed = PackedStep(bucket or exact_bucket(decode, prefill, S), S, CPU)
    packed.pack(decode, prefill, SampledTokens(20, CPU), first_sampled)
    return packed


def expected_tokens(it):
    """(id, position, slot) of each token."""
    table = it.sequence.block_table
    return [
        (it.sequence.token_ids[p], p, table[p // S] * S + p % S)
        for p in range(it.start, it.start + it.num_tokens)
    ]


DECODE = (scheduled(1, 8, 1), scheduled(3, 0, 1), scheduled(2, 3, 1, num_logits=0))
GROWING = ("rows", "prompt_tokens", "prompt_seqs", "columns", "num_logits")
PREFILL = (scheduled(4, 0, 6), scheduled(5, 5, 4, num_logits=3), scheduled(6, 2, 2, num_logits=0))


@pytest.mark.parametrize("decode", [DECODE, ()], ids=["decode", ""])
@pytest.mark.parametrize("prefill", [PREFILL, ()], ids=["prompts", ""])
@pytest.mark.parametrize("spare", [0, 2], ids=["exact", "larger"])
def test_a_packed_step_has_exactly_the_tokens_of_its_sequences(decode, prefill, spare):
    if not decode and not prefill:
        return
    exact = exact_bucket(DecodeRows.of(decode), prefill, S)
    sizes = msgspec.structs.asdict(exact) | {"deterministic": False}
    grown = {name: size + spare for name, size in sizes.items() if size and name in GROWING}
    bucket = msgspec.structs.replace(exact, **grown)
    host = pack(decode, prefill, bucket, first_sampled=2).input.host

    rows = bucket.rows
    tokens = list(zip(host.token_ids, host.positions, host.slot_mapping, strict=True))
    assert tokens[: len(decode)] == [expected_tokens(it)[0] for it in decode]
    prompts = [token for it in prefill for token in expected_tokens(it)]
    assert tokens[rows : rows + len(prompts)] == prompts
    unused = tokens[len(decode) : rows] + tokens[rows + len(prompts) :]
    assert set(unused) <= {(0, 0, -1)}
    for group, lens, table in (
        (decode, host.seq_lens, host.block_table),
        (prefill, host.prompt_seq_lens, host.prompt_block_table),
    ):
        ends = [it.start + it.num_tokens for it in group]
        assert lens.tolist() == ends + [0] * (len(lens) - len(ends))
        for row, it in enumerate(group):
            count = -(-ends[row] // S)
            assert table[row, :count].tolist() == it.sequence.block_table[:count]
    counts = [it.num_tokens for it in prefill]
    starts = np.cumsum([0, *counts]).tolist()
    assert host.prompt_cu_seqlens.tolist() == starts + [starts[-1]] * (
        len(host.prompt_cu_seqlens) - len(starts)
    )
    scored = [row for row, it in enumerate(decode) if it.num_logits]
    for it, end in zip(prefill, starts[1:], strict=True):
        scored += range(rows + end - it.num_logits, rows + end)
    assert host.logits_rows[: len(scored)].tolist() == scored
    assert host.sampled_rows[: len(scored)].tolist() == [2 + i for i in range(len(scored))]
    # Unused rows write to an index that is never read.
    assert set(host.sampled_rows[len(scored) :].tolist()) <= {19}


def drafted(name, start, *draft):
    """A row with a draft; its tokens have known blocks."""
    row = scheduled(name, start, 1)
    row.sequence.block_table += [900 + 10 * name, 901 + 10 * name]
    count = 1 + len(draft)
    return msgspec.structs.replace(row, num_tokens=count, num_logits=count, draft=draft)


DRAFTED = (drafted(1, 8, 5, 6), drafted(3, 0), drafted(2, 3, 7, 8, 9), DECODE[2])


@pytest.mark.parametrize("prefill", [PREFILL, ()], ids=["prompts", ""])
@pytest.mark.parametrize("larger", [{}, {"rows": 6, "queries": 8, "num_logits": 50}], ids=str)
@pytest.mark.parametrize("rows", [DRAFTED, DRAFTED[:1], DRAFTED[2:]], ids=len)
def test_the_tokens_of_rows_with_drafts_follow_each_other(rows, prefill, larger):
    exact = exact_bucket(DecodeRows.of(rows), prefill, S)
    bucket = msgspec.structs.replace(exact, **larger)
    packed = pack(rows, prefill, bucket, first_sampled=2)
    host, used = packed.input.host, sum(row.num_tokens for row in rows)

    assert (exact.rows, exact.queries) == (len(rows), max(row.num_tokens for row in rows))
    assert exact.num_logits == sum(row.num_logits for row in (*rows, *prefill))
    tokens = list(zip(host.token_ids, host.positions, host.slot_mapping, strict=True))
    expected = []
    for row in rows:
        table = row.sequence.block_table
        ids = (row.sequence.token_ids[row.start], *row.draft)
        expected += [(t, p, table[p // S] * S + p % S) for p, t in enumerate(ids, row.start)]
    assert tokens[:used] == expected
    assert set(tokens[used : bucket.decode_tokens]) <= {(0, 0, -1)}
    prompts = [token for it in prefill for token in expected_tokens(it)]
    assert tokens[bucket.decode_tokens :][: len(prompts)] == prompts
    ends = np.cumsum([0, *(row.num_tokens for row in rows)]).tolist()
    assert host.cu_seqlens.tolist() == ends + [used] * (bucket.rows - len(rows))
    lengths = [row.start + row.num_tokens for row in rows]
    assert host.seq_lens.tolist() == lengths + [0] * (bucket.rows - len(rows))
    for line, row, length in zip(host.block_table, rows, lengths, strict=False):
        count = -(-length // S)
        assert line[:count].tolist() == row.sequence.block_table[:count]
    num_scored = sum(row.num_logits for row in rows)
    assert host.logits_rows[:num_scored].tolist() == list(range(num_scored))
    assert host.sampled_rows[: exact.num_logits].tolist() == [
        2 + i for i in range(exact.num_logits)
    ]
    # As an input that had another step before.
    packed.pack(DecodeRows.of(DRAFTED[1:2]), (), SampledTokens(60, CPU))
    packed.pack(DecodeRows.of(rows), prefill, SampledTokens(20, CPU), 2)
    again = list(zip(host.token_ids, host.positions, host.slot_mapping, strict=True))
    assert again == tokens


def test_the_own_token_of_a_row_with_a_draft_is_known():
    row = drafted(1, 4, 5)
    sampled = SampledTokens(20, CPU)
    sampled.note(DecodeRows.of([row]), ())
    later = msgspec.structs.replace(row, start=5)
    packed = PackedStep(exact_bucket(DecodeRows.of([later]), (), S), S, CPU)

    with pytest.raises(AssertionError):
        packed.pack(DecodeRows.of([later]), (), sampled)


def test_a_sequence_may_have_several_rows_of_logits():
    verifying = scheduled(1, 7, 4, num_logits=4)
    bucket = exact_bucket(DecodeRows.of(()), (verifying,), S)

    assert bucket == Bucket(rows=0, prompt_tokens=4, prompt_seqs=1, columns=3, num_logits=4)
    assert pack((), (verifying,)).input.host.logits_rows.tolist() == [0, 1, 2, 3]


def test_rows_without_logits_come_last():
    with pytest.raises(AssertionError, match="come last"):
        DecodeRows.of((DECODE[2], DECODE[0]))


def test_a_repacked_input_equals_a_new_one():
    rng = random.Random(0)
    bucket = Bucket(rows=4, prompt_tokens=12, prompt_seqs=3, columns=8, num_logits=5)
    again = PackedStep(bucket, S, CPU)
    sampled = SampledTokens(20, CPU)
    for _ in range(50):
        decode = tuple(
            scheduled(rng.randrange(1, 9), rng.randrange(20), 1) for _ in range(rng.randrange(5))
        )
        prefill = tuple(
            scheduled(rng.randrange(1, 9), rng.randrange(9), rng.randint(2, 4))
            for _ in range(rng.randrange(4))
        )
        if len(decode) + len(prefill) > 5:
            continue
        again.pack(DecodeRows.of(decode), prefill, sampled)
        new = PackedStep(bucket, S, CPU)
        new.pack(DecodeRows.of(decode), prefill, sampled)
        for name, theirs in vars(new.input.host).items():
            ours = getattr(again.input.host, name)
            if name == "block_table":
                for row, it in enumerate(decode):
                    count = it.start // S + 1
                    assert ours[row, :count].tolist() == theirs[row, :count].tolist()
            elif name == "prompt_block_table":
                for row, it in enumerate(prefill):
                    count = -(-(it.start + it.num_tokens) // S)
                    assert ours[row, :count].tolist() == theirs[row, :count].tolist()
            else:
                assert ours.tolist() == theirs.tolist(), name


def test_a_block_table_is_updated_after_growth_and_for_another_sequence():
    first = scheduled(1, 7, 1)
    packed = PackedStep(Bucket(rows=1, columns=6, num_logits=1), S, CPU)
    rows = DecodeRows.of([first])
    packed.pack(rows, (), SampledTokens(4, CPU))
    first.sequence.block_table.append(99)
    packed.pack(rows, (), SampledTokens(4, CPU))
    assert packed.input.host.block_table[0, :4].tolist() == [10, 17, 24, 99][:4]

    packed.pack(DecodeRows.of([scheduled(2, 3, 1)]), (), SampledTokens(4, CPU))

    assert packed.input.host.block_table[0, :2].tolist() == [20, 27]


def test_rows_keep_their_blocks_while_sequences_end_begin_and_grow():
    rng = random.Random(1)
    bucket = Bucket(rows=6, columns=12, num_logits=6)
    again, sampled = PackedStep(bucket, S, CPU), SampledTokens(20, CPU)
    alive, batch = [], None
    for name in range(200):
        changes = rng.random() < 0.6
        if changes and alive:
            alive.pop(rng.randrange(len(alive)))
        if changes and len(alive) < 6:
            alive.insert(rng.randrange(len(alive) + 1), sequence(name, rng.randrange(1, 9), name))
        for it in alive:
            it.token_ids.append(7)
            if it.num_tokens > S * len(it.block_table):
                it.block_table.append(1000 * name + rng.randrange(1000))
        alive = [it for it in alive if it.num_tokens < 12 * S]
        if batch is None or batch.sequences != alive:
            batch = DecodeBatch(list(alive))
        starts = [it.num_tokens - 1 for it in alive]

        again.pack(DecodeRows(batch, starts, len(starts)), (), sampled)

        host = again.input.host
        for row, it in enumerate(alive):
            table = it.block_table[:12]
            assert host.block_table[row, : len(table)].tolist() == table
            assert host.slot_mapping[row] == table[starts[row] // S] * S + starts[row] % S


def test_an_input_does_not_keep_the_sequences_of_its_last_step():
    packed = PackedStep(Bucket(rows=1, columns=6, num_logits=1), S, CPU)
    decode = DecodeRows.of([scheduled(1, 7, 1)])
    packed.pack(decode, (), SampledTokens(4, CPU))
    batch = weakref.ref(decode.batch)

    del decode

    assert batch() is None


def test_an_unknown_token_is_referred_to_by_its_row():
    known, unknown = scheduled(1, 4, 1), scheduled(2, 4, 1)
    sampled = SampledTokens(4, CPU)
    sampled.note(DecodeRows.of([known, unknown]), ())
    later = ScheduledSequence(unknown.sequence, 5, 1, 1)
    packed = PackedStep(Bucket(rows=2, columns=2, num_logits=2), S, CPU)

    packed.pack(DecodeRows.of([known, later]), (), sampled)

    assert packed.input.host.token_ids.tolist() == [104, -2]
    assert packed.reads_sampled


def test_the_first_of_several_forced_tokens_is_read_and_not_the_last():
    plain, forced = scheduled(1, 4, 1), scheduled(2, 4, 1)
    batch = DecodeBatch([plain.sequence, forced.sequence])
    sampled = SampledTokens(4, CPU)
    sampled.note(DecodeRows(batch, [4, 4], 2), ())
    for row, new in ((plain, [7]), (forced, [8, 9, 10])):
        row.sequence.token_ids[5:] = new
    # The budget leaves one token for the second sequence, so the step samples none for it.
    decode = DecodeRows(batch, [5, 5], 1)
    packed = PackedStep(Bucket(rows=2, columns=2, num_logits=1), S, CPU)

    packed.pack(decode, (), sampled)

    assert packed.input.host.token_ids.tolist() == [7, 8]


def test_a_step_can_be_rebuilt_from_its_bytes():
    ours = pack(DECODE, PREFILL).input
    theirs = StepInput(ours.bucket, S, CPU)

    for name, here in vars(ours.host).items():
        getattr(theirs.host, name)[...] = np.frombuffer(here.tobytes(), here.dtype).reshape(
            here.shape
        )

    assert vars(ours.device).keys() == vars(theirs.device).keys()
    for name, tensor in vars(ours.device).items():
        assert torch.equal(tensor, getattr(theirs.device, name)), name
    assert ours.decode.max_seqlen_k == theirs.decode.max_seqlen_k == 3 * S


@pytest.mark.parametrize("spare", [0, 1], ids=["exact", "larger"])
def test_few_tokens_with_drafts_are_rows_that_follow_each_other(spare):
    rows = (drafted(1, 8, 5, 6), drafted(3, 0), drafted(2, 3, 7, 8))
    decode = DecodeRows.of(rows)
    bucket = exact_bucket(decode, (), S, 3, exact_rows=8)
    assert (bucket.rows, bucket.queries, bucket.num_logits) == (7, 1, 7)
    assert bucket.chained
    assert bucket.has_all_logits
    assert bucket.shared_blocks == 0
    bucket = msgspec.structs.replace(bucket, rows=7 + spare, num_logits=7 + spare)
    packed = PackedStep(bucket, S, CPU)
    for _ in range(2):  # the second time, rows keep their block tables
        packed.pack(decode, (), SampledTokens(20, CPU))
        host = packed.input.host
        expected = []
        for row in rows:
            table = row.sequence.block_table
            ids = (row.sequence.token_ids[row.start], *row.draft)
            for i, token in enumerate(ids):
                at = row.start + i
                expected.append(
                    (token, at, table[at // S] * S + at % S, i, at + 1, table[: at // S + 1])
                )
        found = [
            (
                int(host.token_ids[i]), int(host.positions[i]), int(host.slot_mapping[i]), int(host.earlier[i]),
                int(host.seq_lens[i]), host.block_table[i, : int(host.positions[i]) // S + 1].tolist(),
            )
            for i in range(7)
        ]  # fmt: skip
        assert found == expected
        assert host.slot_mapping[7:].tolist() == [-1] * spare
        assert host.seq_lens[7:].tolist() == [0] * spare


def test_more_tokens_with_drafts_are_rows_of_several():
    bucket = exact_bucket(DecodeRows.of((drafted(1, 8, 5, 6),)), (), S, exact_rows=2)

    assert (bucket.rows, bucket.queries, bucket.chained) == (1, 3, False)
