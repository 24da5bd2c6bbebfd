"""FP8 KV cache on the GPU: writes equal the CPU's bitwise, attention agrees with the reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import kernels
from kernels.attention.problem import Phase
from kernels.attention.pytorch.write_kv import write_kv as write_on_cpu
from kernels.attention.registry import REGISTRY
from kernels.fp8 import FP8
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.hub.resolve import BUNDLED, resolve
from model.text.tokenizer import Tokenizer
from tests.gpu.attention_cases import (
    DEVICE,
    LONG_LENGTHS,
    LONG_PAIRS,
    RAGGED_LENGTHS,
    SHORT_PAIRS,
    around_block_boundaries,
    every_launch,
    judge,
    make,
    make_problem,
    named,
    run,
    selection_of,
)
from tests.model.executors.paged import logits_in_chunks

COMBINATIONS = [
    ("bfloat16", 8, 2, 128, 16, {}),
    ("bfloat16", 8, 2, 128, 16, {"lse": True}),
    ("bfloat16", 6, 2, 80, 48, {"sliding_window": 37}),
    ("bfloat16", 8, 2, 96, 256, {"sliding_window": 300, "softcap": 15.0, "lse": True}),
    ("bfloat16", 7, 1, 192, 64, {"softcap": 15.0}),
    ("bfloat16", 8, 1, 256, 256, {}),
    ("float16", 6, 6, 64, 1, {"lse": True}),
    ("float16", 8, 2, 64, 48, {"sliding_window": 1}),
    ("float16", 6, 2, 32, 64, {"softmax_scale": 0.3}),
    ("float16", 8, 1, 128, 256, {"sliding_window": 128}),
]
SEVERAL_QUERIES = ("bfloat16", 8, 2, 128, 16, {"max_query_tokens": 3})


def readers(phase):
    """Return the registry's rows that can read an FP8 cache on this GPU, but for the one that multiplies in FP8."""
    if not torch.cuda.is_available():
        return []
    arch = kernels.detect(DEVICE)
    problem = fp8_problem(phase, COMBINATIONS[0])
    rows = [row for row in REGISTRY if row.phase is phase and row.name != "hopper_fp8_prefill"]
    found = [row for row in rows if not row.unsupported(problem, arch)]
    return [pytest.param(row, id=row.name) for row in found]


def fp8_problem(phase, combination, **more):
    return dataclasses.replace(make_problem(phase, combination), kv_dtype=FP8, **more)


NONE = [
    pytest.param(None, marks=pytest.mark.skip(reason="no kernel of this machine reads such caches"))
]
PREFILL = pytest.mark.parametrize("row", readers(Phase.PREFILL) or NONE)
DECODE = pytest.mark.parametrize("row", readers(Phase.DECODE) or NONE)
BOTH = pytest.mark.parametrize("row", [*readers(Phase.PREFILL), *readers(Phase.DECODE)] or NONE)


def skip_if_unsupported(row, problem):
    if reasons := row.unsupported(problem, kernels.detect(DEVICE)):
        pytest.skip("; ".join(reasons))


def queries_of(phase, count, most):
    if phase is Phase.DECODE:
        return [1] * count
    return [1 + (37 * index) % most for index in range(count)]


def test_our_kernels_support_an_fp8_cache_from_sm_89():
    names = {parameter.id for phase in Phase for parameter in readers(phase)}

    ours = kernels.detect(DEVICE).sm >= 89
    assert ({"portable_prefill", "portable_decode"} <= names) is ours
    assert {"torch_prefill", "torch_decode"} <= names


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "block_size"),
    [
        (torch.bfloat16, 8, 128, 16),
        (torch.float16, 3, 80, 48),
        (torch.float32, 1, 256, 64),
        (torch.bfloat16, 2, 96, 1),
    ],
)
def test_write_kv_writes_the_same_bits_as_on_the_cpu(
    dtype, heads, head_dim, block_size, index_dtype
):
    tokens, blocks = 300, 400 // block_size + 1
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(-20, 12, (tokens, 3 * heads, 1), generator=generator).exp2()
    fused = torch.randn((tokens, 3 * heads, head_dim), generator=generator) * sizes
    fused[7] = 0
    fused = fused.to(dtype)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[::7] = -1
    kv = torch.full((2, blocks, block_size, heads, head_dim), 7.0).to(torch.float8_e4m3fn)
    scale = torch.full((2, blocks, heads, block_size), 7.0)
    gpu_kv, gpu_scale = kv.to(DEVICE), scale.to(DEVICE)
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    write_on_cpu(k, v, kv, slots, scale)

    fused = fused.to(DEVICE)
    k, v = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    kernels.write_kv(k, v, gpu_kv, slots.to(DEVICE, index_dtype), kv_scale=gpu_scale)

    assert torch.equal(gpu_kv.view(torch.uint8).cpu(), kv.view(torch.uint8))
    assert torch.equal(gpu_scale.cpu(), scale)


@PREFILL
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_prefill_agrees_over_ragged_queries_and_keys(row, combination):
    problem = fp8_problem(Phase.PREFILL, combination)
    skip_if_unsupported(row, problem)
    pairs = [pair for pair in SHORT_PAIRS if row.launch or pair[0] <= pair[1]]
    case = make(problem, *(list(side) for side in zip(*pairs, strict=True)))

    judge(case, *run(row, case))


@PREFILL
@pytest.mark.parametrize("combination", named([COMBINATIONS[0], COMBINATIONS[5]]))
def test_prefill_agrees_over_long_sequences(row, combination):
    problem = fp8_problem(Phase.PREFILL, combination)
    skip_if_unsupported(row, problem)
    case = make(problem, *(list(side) for side in zip(*LONG_PAIRS, strict=True)))

    judge(case, *run(row, case))


@DECODE
@pytest.mark.parametrize("combination", named(COMBINATIONS))
def test_decode_agrees_around_block_and_tile_boundaries_and_over_long_sequences(row, combination):
    problem = fp8_problem(Phase.DECODE, combination)
    skip_if_unsupported(row, problem)
    lengths = [0, *around_block_boundaries(combination[4]), *LONG_LENGTHS]
    case = make(problem, [1] * len(lengths), lengths)

    judge(case, *run(row, case))


@DECODE
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_tuned_decode_launch_agrees(row, head_dim):
    problem = fp8_problem(Phase.DECODE, ("bfloat16", 24, 8, head_dim, 16, {}))
    case = make(problem, [1] * len(RAGGED_LENGTHS), RAGGED_LENGTHS)

    for selection in every_launch(selection_of(row, problem)):
        judge(case, *case.attend(selection))


@DECODE
@pytest.mark.parametrize("length", [1, 63, 1025, 32767])
def test_decode_agrees_for_a_single_sequence(row, length):
    case = make(fp8_problem(Phase.DECODE, COMBINATIONS[0]), [1], [length])

    judge(case, *run(row, case))


@DECODE
def test_decode_agrees_with_several_queries_per_sequence(row):
    problem = fp8_problem(Phase.DECODE, SEVERAL_QUERIES)
    skip_if_unsupported(row, problem)
    case = make(problem, [3, 1, 2, 3, 2, 1], [3, 1, 2, 100, 513, 4097])

    judge(case, *run(row, case))


@BOTH
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4])
def test_values_of_any_size_agree(row, size):
    case = make(
        fp8_problem(row.phase, COMBINATIONS[0]), queries_of(row.phase, 4, 90), [200, 1000, 333, 160]
    )
    case.kv_scale[1] *= size
    out, _ = run(row, case)
    truth, plain = case.expected(torch.float64), case.expected(out.dtype)

    error, allowed = (float((x.double() - truth).abs().max()) for x in (out, plain))
    assert error <= 2 * allowed


@BOTH
def test_repeats_and_a_captured_graph_give_the_same_bits(row):
    problem = fp8_problem(row.phase, COMBINATIONS[0])
    if row.launch is None:
        pytest.skip("plans on the host")
    case = make(problem, queries_of(row.phase, 20, 100), [100 + 97 * i for i in range(20)])
    selection = kernels.select(problem, kernels.detect(DEVICE), registry=(row,))
    first, _ = case.attend(selection)
    plan = kernels.plan_attention(problem, case.batch, selection=selection)
    out = torch.empty_like(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(case.q, case.kv, out, kv_scale=case.kv_scale)

    for _ in range(100):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize("combination", named([COMBINATIONS[0], COMBINATIONS[1], COMBINATIONS[5]]))
def test_cascade_decode_over_an_fp8_cache_agrees(combination):
    problem = fp8_problem(Phase.DECODE, combination)
    if not kernels.takes_shared_prefix(problem, kernels.detect(DEVICE)):
        pytest.skip("no row supports a shared prefix on this GPU")
    lengths = [4096 + 1 + 13 * i for i in range(20)]
    prefix = 4096 // combination[4] * combination[4]
    case = make(problem, [1] * 20, lengths, shared_prefix=prefix)
    plan = kernels.plan_attention(problem, case.batch)

    out, lse = case.attend()

    assert plan.prefix is not None
    judge(case, out, lse)


@pytest.mark.parametrize("chunk", [300, 37, 1], ids=["at once", "in chunks", "token by token"])
def test_an_fp8_cache_changes_the_bundled_model_s_logits_by_less_than_6_percent(chunk):
    folder = resolve(BUNDLED)
    config = ModelConfig.from_folder(folder)
    model = load_model(folder, config, torch.bfloat16, torch.device(DEVICE))
    tokens = Tokenizer.from_folder(folder).encode(Path(__file__).read_text(encoding="utf-8"))[:300]

    exact, rounded = (
        logits_in_chunks(model, tokens, chunk, dtype).float()
        for dtype in (None, torch.float8_e4m3fn)
    )

    # On a CPU in float32 the error is 2.7 % and 97 % of tokens agree: docs/decisions/0016-fp8-kv-cache.md.
    assert (rounded - exact).square().mean().sqrt() < 0.06 * exact.std()
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.92
