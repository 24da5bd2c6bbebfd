"""Steps of the C library beside a PyTorch reference that rounds the same numbers."""

import random

import pytest
import torch

from kernels.cpu.decoder import DecoderShape, unsupported
from tests.kernels.cpu.bound import Driver, bind
from tests.kernels.cpu.reference import Decoder

VOCAB = 300
SMALL = DecoderShape(128, 192, 4, 2, 32, 1e-6, 32**-0.5, (0,))

pytestmark = pytest.mark.skipif(bool(unsupported(SMALL)), reason="; ".join(unsupported(SMALL)))


def shape(heads, kv_heads, head_dim, windows=(0,)):
    return SMALL._replace(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        windows=windows,
    )


def tokens(count, seed=0):
    return random.Random(seed).choices(range(VOCAB), k=count)


def assert_close(found, expected):
    """Compare the logits of a decoder with one layer.

    Most rows are equal up to float32. In the others a number at a rounding boundary was rounded to the other side,
    which later roundings amplify to the size of their own error.
    """
    error, size = (found - expected).abs().amax(1), expected.std()
    assert error.median() < 1e-4 * size, error.median() / size
    assert error.max() < 0.15 * size, error.max() / size


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(2, 2, 32), (6, 2, 32), (4, 1, 64), (5, 1, 64), (6, 1, 96), (7, 1, 64), (8, 1, 128), (16, 1, 32), (2, 1, 256)],
)  # fmt: skip
def test_logits_equal_the_reference_for_every_ratio_of_heads(heads, kv_heads, head_dim, bits):
    of = shape(heads, kv_heads, head_dim)
    decoder = Decoder(of, VOCAB, bits)
    ids = tokens(70)

    found = Driver(bind(decoder), of).run(ids, [50, 1, 1, 17, 1])

    assert_close(found, decoder.logits(ids))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "options", [{"head_norms": True}, {"bias": True}, {"tied": False}], ids=lambda o: next(iter(o))
)
def test_logits_equal_the_reference_with_the_parts_of_each_family(options, bits):
    decoder = Decoder(SMALL, VOCAB, bits, **options)
    ids = tokens(40)

    found = Driver(bind(decoder), SMALL).run(ids, [39, 1])

    assert_close(found, decoder.logits(ids))


def test_layers_follow_each_other():
    of = shape(4, 2, 32, windows=(0, 20, 0))
    decoder = Decoder(of, VOCAB, 8)
    ids = tokens(40)

    found, expected = Driver(bind(decoder), of).run(ids, [39, 1]), decoder.logits(ids)

    assert (found - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [65504.0, 65520.0, 1e5, 1e30, -65520.0, -1e9])
def test_keys_and_values_above_the_largest_float16_are_limited_to_it(size, bits):
    """Of the second head, two dimensions of the keys, which a rotation mixes, and one of the values."""
    decoder = Decoder(SMALL, VOCAB, bits, bias=True)
    keys = SMALL.heads * SMALL.head_dim
    values = keys + SMALL.kv_heads * SMALL.head_dim
    second = SMALL.head_dim
    decoder.layers[0]["qkv_bias"][[keys + second + 3, keys + second + 19]] = size
    decoder.layers[0]["qkv_bias"][values + second + 5] = size
    driver = Driver(bind(decoder), SMALL)

    found = driver.run(tokens(40), [33, 1, 6])

    assert found.isfinite().all()
    cache = driver.caches[0].float()
    written = cache[~cache.isnan()]
    limited = written.abs() == 65504
    assert written.isfinite().all()
    assert written.abs().max() == 65504
    # Once for the value of each token, and for its keys where the rotation leaves them so large.
    assert 40 <= (limited & (written.sign() == torch.tensor(size).sign())).sum() <= 40 + 80


def test_a_value_that_is_not_a_number_stays_so_in_a_cache_of_float16():
    decoder = Decoder(SMALL, VOCAB, 8, bias=True)
    values = (SMALL.heads + SMALL.kv_heads) * SMALL.head_dim
    decoder.layers[0]["qkv_bias"][values + 5] = torch.nan

    found = Driver(bind(decoder), SMALL).run(tokens(20), [17, 1, 2])

    assert found.isnan().all()


@pytest.mark.parametrize("window", [1, 5, 32, 33, 64])
def test_a_sliding_window_hides_the_keys_before_it(window):
    of = shape(4, 2, 32, windows=(window,))
    decoder = Decoder(of, VOCAB, 8)
    ids = tokens(130)

    found = Driver(bind(decoder), of).run(ids, [100, 1, 28, 1])

    assert_close(found, decoder.logits(ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("block_size", [1, 8, 16, 100])
def test_the_cache_may_have_blocks_of_any_size_in_both_dtypes(block_size, dtype):
    decoder = Decoder(SMALL, VOCAB, 8, seed=1)
    ids = tokens(66)

    found = Driver(bind(decoder), SMALL, block_size=block_size, dtype=dtype).run(ids, [64, 1, 1])

    assert_close(found, decoder.logits(ids, dtype))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_result_depends_neither_on_chunks_nor_on_other_rows_nor_on_threads(bits):
    of = shape(6, 2, 64, windows=(0, 70))
    decoder = Decoder(of, VOCAB, bits)
    ids = tokens(200)
    alone = Driver(bind(decoder, threads=1), of).run(ids, [200])

    for threads, chunks in ((2, [1] * 200), (5, [31, 1, 32, 1, 64, 71]), (3, [199, 1])):
        driver = Driver(bind(decoder, threads=threads), of, num_blocks=400)
        others = {name: tokens(1 + 7 * name, seed=name) for name in range(1, 18)}
        driver.step(others)
        at, parts = 0, []
        for size in chunks:
            beside = {name: [5] for name in range(1, at % 18)}
            parts.append(driver.step({0: ids[at : at + size], **beside})[0])
            at += size
        assert torch.equal(torch.cat(parts), alone), (threads, chunks)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("heads", [(6, 2), (16, 1)], ids=str)
def test_decode_rows_of_several_tokens_have_the_bits_of_steps_of_one(bits, heads):
    of = shape(*heads, 64, windows=(0, 40))
    decoder = Decoder(of, VOCAB, bits)
    texts = {name: tokens(90, seed=name) for name in range(4)}
    alone = {name: Driver(bind(decoder), of).run(text, [90]) for name, text in texts.items()}
    driver = Driver(bind(decoder, threads=3), of, num_blocks=400)
    at = dict.fromkeys(texts, 0)

    for step in range(12):
        # Decode rows of 1 to 8 tokens, in a step with a prompt at times; rows with fewer leave tokens unused.
        counts = {name: 1 + (3 * name + 5 * step) % 8 for name in texts}
        counts[step % 4] += 9 * (step % 3 == 0)
        chunks = {name: text[at[name] : at[name] + counts[name]] for name, text in texts.items()}
        found = driver.step({name: it for name, it in chunks.items() if it}, queries=8)
        for name, part in found.items():
            stop = at[name] + len(part)
            assert torch.equal(part, alone[name][at[name] : stop]), (step, name)
            at[name] = stop
    assert min(at.values()) > 40


def test_hidden_states_give_the_logits_of_the_step():
    decoder = Decoder(SMALL, VOCAB, 8)
    ids = tokens(33)
    bound = bind(decoder)

    direct = Driver(bound, SMALL).step({0: ids})[0]
    projected = Driver(bound, SMALL).step({0: ids}, hidden=True)[0]

    assert torch.equal(direct, projected)


def test_tokens_are_the_first_of_the_largest_logits():
    decoder = Decoder(SMALL, VOCAB, 8)
    driver = Driver(bind(decoder), SMALL)
    logits = driver.step({0: tokens(33)})[0]

    assert torch.equal(driver.best, logits.argmax(-1))

    decoder.head[7:] = decoder.head[VOCAB - 1]
    decoder.head[:7] = 0
    driver = Driver(bind(decoder), SMALL)
    logits = driver.step({0: tokens(33)})[0]

    assert (logits[:, 7:] == logits[:, 7:8]).all()
    assert torch.equal(driver.best, torch.where(logits[:, 7] > 0, 7, 0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sequence_whose_numbers_are_not_finite_disturbs_no_other(value):
    decoder = Decoder(SMALL, VOCAB, 8)
    bound = bind(decoder)
    sound = Driver(bound, SMALL).run(tokens(20), [19, 1])
    driver = Driver(bound, SMALL)
    driver.step({0: tokens(19), 1: tokens(9, seed=1)})
    for cache in driver.caches:
        cache[0, driver._blocks[1][0], 0] = value

    logits = driver.step({0: tokens(20)[19:], 1: [3]})

    assert torch.equal(logits[0], sound[19:])
    assert not logits[1].isfinite().any()
    assert driver.best.tolist() == [int(logits[0].argmax()), -1]


def test_a_row_without_a_slot_writes_nothing_and_an_unused_row_reads_nothing():
    decoder = Decoder(SMALL, VOCAB, 8)
    driver = Driver(bind(decoder), SMALL)
    driver.step({0: tokens(5)})
    before = [cache.clone() for cache in driver.caches]
    step = driver.last._replace(rows=1, prompt_seqs=0)
    arrays = step.arrays
    arrays.token_ids, arrays.positions = torch.tensor([1]), torch.tensor([0])
    arrays.slot_mapping = torch.tensor([-1], dtype=torch.int32)
    arrays.cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
    arrays.seq_lens = torch.tensor([0], dtype=torch.int32)
    arrays.block_table = arrays.prompt_block_table

    logits, _ = driver.bound.logits(step, None, 1)

    assert logits.isfinite().all()
    for cache, old in zip(driver.caches, before, strict=True):
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": 100}, "100 is not a multiple of 32"),
        ({"inner": 48}, "48 is not a multiple of 32"),
        ({"head_dim": 48}, "heads of 48"),
        ({"windows": (0,) * 401}, "401 layers"),
        ({"head_dim": 288}, "more than 256"),
        ({"heads": 34}, "17 query heads"),
    ],
)
def test_a_shape_that_the_library_cannot_compute_is_refused_with_the_reason(change, reason):
    assert any(reason in text for text in unsupported(SMALL._replace(**change)))
