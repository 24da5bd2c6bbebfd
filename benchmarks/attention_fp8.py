"""Times prefill and decode over an FP8 cache, next to the same calls in half precision.

It times the inputs of `benchmarks.attention`. Prefill errors are measured against float64 on one long sequence in which
one number in a thousand is ten times as large, for three computations: our kernels in half precision, our kernels over
an FP8 cache, and PyTorch in FP8 with one scale per tensor.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

import kernels
from benchmarks.attention_inputs import BLOCK_SIZE, arch_of, time_call
from benchmarks.attention_shapes import DECODE, PREFILL
from kernels.attention.problem import PackedBatch, PagedBatch
from kernels.fp8 import FP8
from kernels.hadamard import hadamard_transform
from server.cli.bench.result import number
from tests.kernels.references import reference, reference_fp8

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchmarks.attention_inputs import Inputs
    from benchmarks.attention_shapes import Shape
    from kernels.attention.problem import AttentionProblem

FA3 = MappingProxyType(
    {
        ((32, 8, 128), 4, 4096): 561.0,
        ((32, 8, 128), 1, 16384): 689.0,
        ((16, 8, 128), 4, 4096): 511.0,
        ((16, 8, 128), 1, 16384): 652.0,
    }
)
"""TFLOP/s of FA3 in FP8 by (heads, batch, length), without quantizing the operands; from `PEERS_SOURCE`."""
_HEADS = 2
_MOST_TOKENS = 8 * 8192
_BLOCKS_AT_ONCE = 4096
_FP8_DIFFERENCE = 0.06
"""Largest relative difference: e4m3 rounds by up to a sixteenth, and the errors of values partly cancel."""
_SEEDS = range(2)


def has_fp8_row(shape: Shape) -> bool:
    """Whether a prefill is also measured in FP8; true for the long shapes of the peers' tables."""
    return shape in PREFILL and _key(shape) in FA3


def has_fp8_cache_row(shape: Shape) -> bool:
    """Whether a decode is also measured over an FP8 cache; true for the shapes that read the most tokens."""
    return shape in DECODE and shape.batch * shape.length >= _MOST_TOKENS


def time_fp8_cache(inputs: Inputs, half_us: float) -> dict[str, Any]:
    """Time a decode over the same keys and values in FP8. Returns entries of a record.

    Args:
        inputs: in half precision, with their output in `out`.
        half_us: microseconds of the same call without FP8.

    Raises:
        AssertionError: the output differs from the half-precision output by more than rounding to FP8 explains.
    """
    device = inputs.q.device
    problem = dataclasses.replace(inputs.problem, kv_dtype=FP8)
    selection = kernels.select(problem, arch_of(device))
    numbers, scale = (part.contiguous() for part in _quantized(inputs.kv))
    expected = inputs.out.float()
    plan = kernels.plan_attention(problem, inputs.batch, selection=selection)

    def call() -> None:
        kernels.decode_attention(inputs.q, numbers, plan, inputs.out, kv_scale=scale)

    call()
    difference = float((inputs.out.float() - expected).norm() / expected.norm())
    assert difference <= _FP8_DIFFERENCE, f"differs by {difference:.2g} from half precision"
    timing = time_call(call, device)
    figures: dict[str, Any] = {
        "kernel": selection.spec.name,
        **timing.record(),
        "gain": number(half_us / timing.median),
        "difference": number(difference),
    }
    if selection.launches:
        shape = inputs.shape
        launch = selection.launch_for(shape.length, shape.batch)
        figures["launch"] = dataclasses.asdict(launch)
    return {"fp8_cache": figures}


def _quantized(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a cache [2, N, S, K, D]. Returns it and its scales [2, N, K, S], one for each key and each value."""
    blocks = kv.flatten(0, 1)
    numbers = torch.empty_like(blocks, dtype=torch.float8_e4m3fn)
    scale = torch.empty(blocks.shape[:-1], device=kv.device)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        some = slice(start, start + _BLOCKS_AT_ONCE)
        numbers[some], scale[some] = reference.quantize_kv(blocks[some])
    return numbers.view(kv.shape), scale.view(kv.shape[:-1]).transpose(2, 3)


def time_fp8(inputs: Inputs, bf16_us: float) -> dict[str, Any]:
    """Time a prefill of the same queries, keys and values over an FP8 cache. Returns entries of a record.

    Args:
        inputs: in half precision, packed.
        bf16_us: microseconds of the same call without FP8.
    """
    device, shape = inputs.q.device, inputs.shape
    problem = dataclasses.replace(inputs.problem, kv_dtype=FP8, block_size=BLOCK_SIZE)
    selection = kernels.select(problem, arch_of(device))
    call = _prefill(problem, inputs.q, inputs.kv, shape.seq_lens[0], inputs.out)
    timing = time_call(call, device)
    figures: dict[str, Any] = {
        "kernel": selection.spec.name,
        **timing.record(),
        "tflops": number(shape.flops / timing.median / 1e6),
        "gain": number(bf16_us / timing.median),
        "fa3_tflops_elsewhere": FA3.get(_key(shape)),
    }
    if selection.launches:
        launch = selection.launch_for(shape.length, shape.batch)
        figures["launch"] = dataclasses.asdict(launch)
    return {"fp8_prefill": figures | {"rmse": measure_errors(inputs.problem, shape.length, device)}}


def _prefill(
    problem: AttentionProblem, q: Tensor, kv: Tensor, length: int, out: Tensor
) -> Callable[[], None]:
    """Return a prefill of sequences of equal length, whose keys and values [2, T, K, D] are written to a cache first.

    Raises:
        AssertionError: the length is no multiple of a block.
    """
    assert length % BLOCK_SIZE == 0, f"{length} tokens are no multiple of {BLOCK_SIZE}"
    count = len(q) // length
    keys, values = kv
    rows = torch.stack((hadamard_transform(keys), values))
    numbers, scale = _quantized(rows.view(2, -1, BLOCK_SIZE, *rows.shape[2:]))
    offsets = torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=q.device)
    table = torch.arange(len(q) // BLOCK_SIZE, dtype=torch.int32, device=q.device).view(count, -1)
    batch = PagedBatch(offsets, offsets.diff(), table, len(q), length, length)
    plan, queries, scale = (
        kernels.plan_attention(problem, batch),
        hadamard_transform(q),
        scale.contiguous(),
    )

    def call() -> None:
        kernels.prefill_attention(queries, numbers, plan, out, kv_scale=scale)

    return call


def measure_errors(
    problem: AttentionProblem, length: int, device: torch.device
) -> dict[str, float | None]:
    """Return root mean square errors over a sequence with outliers, over two heads and two seeds."""
    asked = dataclasses.replace(problem, num_heads=_HEADS, num_kv_heads=_HEADS)
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    squares = dict.fromkeys(("half", "per_tensor", "fp8"), 0.0)
    for seed in _SEEDS:
        q, kv = _outliers(asked, length, seed, device)
        truth = reference.attention(q, *kv, **options, dtype=torch.float64)
        plain = reference_fp8.per_tensor(q, *kv, **options)
        squares["per_tensor"] += float((plain - truth).square().mean())
        del plain
        for name, kv_dtype in (("half", None), ("fp8", FP8)):
            out = _attend(
                dataclasses.replace(asked, kv_dtype=kv_dtype, block_size=BLOCK_SIZE), q, kv
            )
            squares[name] += float((out.double() - truth).square().mean())
    errors = {name: (total / len(_SEEDS)) ** 0.5 for name, total in squares.items()}
    found: dict[str, float | None] = {name: number(value) for name, value in errors.items()}
    return found | {"per_tensor_over_fp8": number(errors["per_tensor"] / errors["fp8"])}


def _outliers(
    problem: AttentionProblem, length: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random queries [n, H, D], and keys and values [2, n, K, D]: N(0, 1), plus N(0, 100) for one in 1000.

    Source: Shah et al., "FlashAttention-3", 2024, section 4.3.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        x, far = torch.randn((2, *shape), generator=generator, device=device)
        rare = torch.rand(shape, generator=generator, device=device) < 1e-3
        dtype: torch.dtype = getattr(torch, problem.dtype)
        return torch.add(x, far * rare, alpha=10).to(dtype)

    return (
        numbers(length, problem.num_heads, problem.head_dim),
        numbers(2, length, problem.num_kv_heads, problem.head_dim),
    )


def _attend(problem: AttentionProblem, q: Tensor, kv: Tensor) -> Tensor:
    """Compute the attention of one sequence through the public API: over an FP8 cache if the problem has one."""
    length = q.shape[0]
    out = torch.full_like(q, float("nan"))
    if problem.kv_dtype is not None:
        _prefill(problem, q, kv, length, out)()
        return out
    offsets = torch.tensor([0, length], dtype=torch.int32, device=q.device)
    batch = PackedBatch(offsets, offsets, length, length, length)
    plan = kernels.plan_attention(dataclasses.replace(problem, block_size=None), batch)
    kernels.prefill_attention(q, kv, plan, out)
    return out


def _key(shape: Shape) -> tuple[tuple[int, int, int], int, int]:
    return (shape.hq, shape.hkv, shape.d), shape.batch, shape.length
