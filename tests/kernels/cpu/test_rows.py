"""Norms, activations and adapters of rows in the C library: against float64, and with equal bits beside any rows."""

import pytest
import torch

from kernels.cpu import workers
from kernels.cpu.library import load
from kernels.linear.cpu import lora as library_lora
from kernels.linear.lora import LoraRows, LoraWeights, add_lora
from kernels.norms import cpu_library, pytorch

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason=str(load()))

ROWS = 7


def norms_of(columns):
    weight, bias = torch.randn(2, columns)
    return {
        "rms": lambda by, x: by.rms_norm(x, weight.to(x.dtype), 1e-5),
        "layer": lambda by, x: by.layer_norm(x, weight.to(x.dtype), bias.to(x.dtype), 1e-5),
        "silu gate": lambda by, x: by.activate(x, "silu", gated=True),
        "gelu gate": lambda by, x: by.activate(x, "gelu_tanh", gated=True),
        "gelu": lambda by, x: by.activate(x, "gelu_tanh", gated=False),
        "exact gelu": lambda by, x: by.activate(x, "gelu", gated=False),
        "relu": lambda by, x: by.activate(x, "relu2", gated=False),
        "sigmoid": lambda by, x: by.multiply_by_sigmoid(x, x.roll(1, 0).flip(-1)),
    }


@pytest.mark.parametrize("columns", [16, 40, 96, 160])
@pytest.mark.parametrize("name", norms_of(16))
def test_results_are_those_of_pytorch_in_float64(name, columns):
    torch.manual_seed(0)
    function, x = norms_of(columns)[name], 3 * torch.randn(ROWS, columns)

    expected = function(pytorch, x.double())
    torch.testing.assert_close(function(cpu_library, x).double(), expected, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("columns", [32, 96, 208])
def test_a_row_has_the_same_bits_beside_any_others(columns, threads, monkeypatch):
    monkeypatch.setattr(workers, "_num_threads", threads)
    torch.manual_seed(1)
    x = 4 * torch.randn(301, 2 * columns)
    weight = torch.randn(2 * columns)

    for function in (
        lambda x: cpu_library.rms_norm(x, weight, 1e-6),
        lambda x: cpu_library.activate(x, "silu", gated=True),
        lambda x: cpu_library.activate(x, "gelu_tanh", gated=True),
        lambda x: cpu_library.multiply_by_sigmoid(x[:, :columns], x[:, columns:]),
    ):
        whole = function(x)
        for first, stop in ((0, 1), (3, 4), (7, 12), (100, 301)):
            assert torch.equal(function(x[first:stop]), whole[first:stop])


def adapted(rank, parts, inputs, slots):
    torch.manual_seed(2)
    weights = LoraWeights.zeros(3, rank, parts, inputs, torch.float32, torch.device("cpu"))
    weights.a.normal_()
    weights.b.normal_()
    x, y = torch.randn(len(slots), inputs), torch.randn(len(slots), sum(parts))
    return weights, x, y, LoraRows(torch.tensor(slots, dtype=torch.int32))


@pytest.mark.parametrize("rank", [1, 8, 17])
@pytest.mark.parametrize("parts", [(32,), (64, 16, 16), (48, 16, 16)])
def test_adapters_add_what_float64_does(rank, parts):
    slots = [0, -1, 2, 2, 1, -1, 0]
    weights, x, y, rows = adapted(rank, parts, 80, slots)
    assert library_lora.computes(weights)

    wider = torch.cat((y, torch.full((len(y), 7), 5.0)), 1)
    found = library_lora.begin_lora(x, weights, rows)(wider)[:, : y.shape[1]]
    assert (wider[:, y.shape[1] :] == 5).all()

    bounds = [(i, i + 1, slot) for i, slot in enumerate(slots) if slot >= 0]
    wide = weights._replace(a=weights.a.double(), b=weights.b.double())
    expected = add_lora(x.double(), y.double(), wide, rows._replace(sequences=bounds))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(found[[1, 5]], y[[1, 5]])
    for row in range(len(slots)):
        alone = LoraRows(rows.slots[row : row + 1])
        only = library_lora.begin_lora(x[row : row + 1], weights, alone)(y[row : row + 1].clone())
        assert torch.equal(only[0], found[row])


@pytest.mark.parametrize(("parts", "inputs"), [((20, 16), 64), ((32,), 40), ((16,) * 4, 32)])
def test_other_sizes_of_adapters_are_left_to_pytorch(parts, inputs):
    assert not library_lora.computes(adapted(4, parts, inputs, [0])[0])
