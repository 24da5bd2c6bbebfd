"""Steps of the C library with adapters, beside a PyTorch reference, and the bits of their rows."""

import pytest
import torch

from kernels.cpu.decoder import unsupported
from kernels.linear.lora import LoraWeights
from tests.kernels.cpu.bound import Driver, bind
from tests.kernels.cpu.reference import Decoder
from tests.kernels.cpu.test_decoder import SMALL, VOCAB, assert_close, tokens

pytestmark = pytest.mark.skipif(bool(unsupported(SMALL)), reason="; ".join(unsupported(SMALL)))
WINDOWS = SMALL._replace(windows=(0, 20))
ATTENDED = SMALL.heads * SMALL.head_dim
KEYS = SMALL.kv_heads * SMALL.head_dim
MATRICES = {
    "qkv": ((ATTENDED, KEYS, KEYS), SMALL.hidden),
    "output": ((SMALL.hidden,), ATTENDED),
    "gate_up": ((SMALL.inner, SMALL.inner), SMALL.hidden),
    "down": ((SMALL.hidden,), SMALL.inner),
}


def adapters(shape, rank, ranks):
    """Return the slots of the layers, whose adapters have these ranks; numbers beyond them are not read."""
    generator = torch.Generator().manual_seed(rank)

    def normal(*size, std):
        return torch.randn(size, generator=generator) * std

    layers = [
        {
            name: LoraWeights(
                normal(len(ranks), len(parts), rank, inputs, std=inputs**-0.5),
                normal(len(ranks), rank, sum(parts), std=rank**-0.5),
                parts,
            )
            for name, (parts, inputs) in MATRICES.items()
        }
        for _ in shape.windows
    ]
    for it in (it for layer in layers for it in layer.values()):
        for slot, own in enumerate(ranks):
            it.a[slot, :, own:] = torch.nan
            it.b[slot, own:] = torch.nan
    return layers


def without_nan(layers):
    return [
        {n: it._replace(a=it.a.nan_to_num(), b=it.b.nan_to_num()) for n, it in x.items()}
        for x in layers
    ]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("rank", "ranks"), [(16, (16, 1, 8)), (64, (64, 5, 33))], ids=str)
def test_logits_equal_the_reference_with_an_adapter_for_each_sequence(rank, ranks, bits):
    decoder, bound = Decoder(SMALL, VOCAB, bits), None
    layers, bound = adapters(SMALL, rank, ranks), bind(decoder)
    bound.bind_adapters(layers, torch.tensor(ranks))
    driver, slots = Driver(bound, SMALL), {0: 2, 1: -1, 2: 0, 3: 1}
    ids = {name: tokens(40 + name, name) for name in slots}
    found = {name: [] for name in slots}

    for first, stop in ((0, 20), (20, 39), (39, 50)):
        chunks = {name: it[first:stop] for name, it in ids.items()}
        for name, logits in driver.step(chunks, adapters=slots).items():
            found[name].append(logits)

    for name, slot in slots.items():
        expected = decoder.logits(ids[name], adapters=without_nan(layers), slot=slot)
        assert_close(torch.cat(found[name]), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_beside_any_other_adapters(threads):
    decoder, ranks = Decoder(WINDOWS, VOCAB, 8), (16, 3)
    bound = bind(decoder, threads)
    bound.bind_adapters(adapters(WINDOWS, 16, ranks), torch.tensor(ranks))
    ids = tokens(40)
    alone = Driver(bound, WINDOWS).run(ids, [39, 1], adapters={0: 1})

    for other in (-1, 0, 1):
        driver, slots = Driver(bound, WINDOWS), {0: 1, 1: other, 2: 0}
        first = driver.step({0: ids[:39], 1: ids[:11], 2: ids[:1]}, adapters=slots)
        last = driver.step({1: ids[11:12], 0: ids[39:], 2: ids[1:9]}, adapters=slots)
        assert torch.equal(torch.cat((first[0], last[0])), alone)


def test_a_step_without_adapters_has_the_bits_of_a_library_without_slots():
    decoder, ids = Decoder(SMALL, VOCAB, 8), tokens(40)
    plain = Driver(bind(decoder), SMALL).run(ids, [39, 1])
    bound = bind(decoder)
    bound.bind_adapters(adapters(SMALL, 16, (16,)), torch.tensor([16]))
    driver = Driver(bound, SMALL)
    driver.step({1: ids[:30]}, adapters={1: 0})

    assert torch.equal(driver.run(ids, [39, 1]), plain)
    beside = Driver(bound, SMALL)
    rows = beside.step({0: ids, 1: ids[:3]}, adapters={1: 0})
    assert torch.equal(rows[0][:39], plain[:39])
