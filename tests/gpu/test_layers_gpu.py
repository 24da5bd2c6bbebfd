"""Packed layers with fused kernels on a GPU against layers computed operation by operation."""

import gc

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from kernels.linear import projection
from kernels.rope.registry import TRITON
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.decoder import DecoderLM
from model.executors.layers import attention as model_attention
from model.executors.layers import bind as bound_network
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.gpu.python_headers import HEADERS
from tests.model.executors import paged
from tests.model.executors.paged import PagedDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

FOLDER = resolve(BUNDLED)
COUNTS = (1, 2, 3, 4, 5, 17, 1)
"""Sequences of each decode step: within and beyond the rows of the vector kernel."""


@pytest.fixture
def blocks_of_16(monkeypatch):
    """Use a block size that the Hopper kernels support."""
    monkeypatch.setattr(paged, "BLOCK_SIZE", 16)


def load(dtype, *, fused):
    model = load_model(FOLDER, ModelConfig.from_folder(FOLDER), dtype, "cuda", pack=fused)
    assert (model.executors.layers.bound.rotation is TRITON) == fused
    return model


def drive(model, **changes):
    """Return the logits of the last token of each sequence and step, float32."""
    driver, generator = PagedDriver(model, **changes), torch.Generator().manual_seed(1)

    def tokens(count):
        return torch.randint(5, 500, (count,), generator=generator).tolist()

    rows = []
    driver.step({name: tokens(20 + name) for name in range(17)})
    for count in COUNTS:
        found = driver.step({name: tokens(1) for name in range(count)})
        rows += [found[name][-1].float() for name in range(count)]
    found = driver.step({0: tokens(1), 1: tokens(1), 2: tokens(9)})
    return torch.stack([*rows, *(found[name][-1].float() for name in range(3))])


def test_fused_layers_in_float32_agree_with_separate_operations(blocks_of_16):
    expected = drive(load(torch.float32, fused=False))

    found = drive(load(torch.float32, fused=True))

    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_fused_layers_over_an_fp8_cache_are_as_accurate_as_separate_operations(blocks_of_16):
    truth = drive(load(torch.float32, fused=False))

    plain, fused = (
        drive(load(torch.bfloat16, fused=on), cache_dtype=torch.float8_e4m3fn)
        for on in (False, True)
    )

    assert float((fused - truth).abs().max()) <= 2 * float((plain - truth).abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_layers_in_half_precision_are_as_accurate_as_separate_operations(
    blocks_of_16, dtype, record_property
):
    truth = drive(load(torch.float32, fused=False))
    plain, fused = (drive(load(dtype, fused=on)) for on in (False, True))
    errors = [(x - truth).abs().amax(-1) for x in (plain, fused)]

    assert float(errors[1].max()) <= 2 * float(errors[0].max()) + 1e-5
    # Where float32's best token leads by more than twice the larger error, both must choose it.
    first, second = truth.topk(2, -1).values.unbind(-1)
    sure = first - second > 2 * torch.maximum(*errors)
    assert torch.equal(fused.argmax(-1)[sure], truth.argmax(-1)[sure])
    record_property("proof", f"{int(sure.sum())} of {len(sure)} tokens have a clear winner")
    assert int(sure.sum()) > len(sure) // 2


def test_dependent_launches_and_their_prefetches_change_no_bit(blocks_of_16, monkeypatch):
    model = load(torch.bfloat16, fused=True)
    first = drive(model)

    again = drive(model)
    monkeypatch.setattr(model_attention, "_FEW_ROWS", 0)
    without_prefetch = drive(model)
    for module in (projection, bound_network):
        monkeypatch.setattr(module, "may_depend", lambda *_: False)
    model.optimize()
    without = drive(model)

    assert torch.equal(again, first)
    assert torch.equal(without_prefetch, first)
    assert torch.equal(without, first)


@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["", "graphs"])
def test_greedy_tokens_in_float32_are_the_same_with_fusion_on_and_off(monkeypatch, cuda_graphs):
    prompts = [[ord(letter) % 500 + 5 for letter in header] for header in HEADERS[:9]]

    def answers(graphs):
        config = EngineConfig(
            model_path=str(FOLDER),
            model_id=BUNDLED,
            device="cuda",
            dtype="float32",
            kv_cache_tokens=20480,
            cuda_graphs=graphs,
        )
        engine = LocalEngine(config)
        while engine.engine._runner.use_idle_time():
            pass
        found = []
        # One prompt, then several within the rows of the vector kernel, then all.
        for chosen in (prompts[:1], prompts[:3], prompts):
            sampling = SamplingParams(max_new_tokens=64, temperature=0.0)
            asked = [
                GenerateRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling)
                for i, prompt in enumerate(chosen)
            ]
            found.append([[e.token_id for e in events] for events in engine.generate(asked)])
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        return found

    fused = answers(cuda_graphs)
    monkeypatch.setattr(DecoderLM, "optimize", lambda *_arguments: None)

    assert answers(graphs=False) == fused
