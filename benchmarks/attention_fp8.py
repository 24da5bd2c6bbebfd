"""The prefill that multiplies in FP8, and the decode over a cache in FP8, beside ours in half precision.

Times are of the benchmark's own inputs. The prefill's errors are those of one long sequence with outliers, a number
in a thousand ten times as large, against float64: ours in half precision, ours in FP8, and the plainest FP8 as
PyTorch computes it, with one scale per tensor. Knows nothing of which shapes are of interest but their
length.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

import kernels
from benchmarks.attention_inputs import arch_of, time_call
from benchmarks.attention_shapes import DECODE, PREFILL
from kernels.attention.problem import PackedBatch
from kernels.fp8 import FP8
from kernels.testing import reference, reference_fp8

if TYPE_CHECKING:
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
"""TFLOP/s of FA3 in FP8 on operands that are quantized already: (heads, batch, length); as `PEERS_SOURCE`."""
_HEADS = 2
_MOST_TOKENS = 8 * 8192
_BLOCKS_AT_ONCE = 4096
_FP8_DIFFERENCE = 0.06
"""Relative: e4m3 rounds by up to a sixteenth, a value's errors have either sign."""
_DRAWS = 2


def has_fp8_row(shape: Shape) -> bool:
    """Whether a shape is also measured in FP8: the long ones of the peers' tables, where our kernel takes them."""
    return shape in PREFILL and _key(shape) in FA3


def has_fp8_cache_row(shape: Shape) -> bool:
    """Whether a decode is also measured over a cache in FP8: those of the peers' tables that read the most."""
    return shape in DECODE and shape.batch * shape.length >= _MOST_TOKENS


def time_fp8_cache(inputs: Inputs, half_us: float) -> dict[str, Any]:
    """Time a decode over the same keys and values in FP8, as a record's entries.

    Args:
        inputs: in half precision, with their output in `out`.
        half_us: what the same call took without FP8.

    Raises:
        AssertionError: the output differs by more than FP8 explains.
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
        "us": round(timing.median, 2),
        "us_p20_p80": [round(timing.low, 2), round(timing.high, 2)],
        "gain": _four_digits(half_us / timing.median),
        "difference": _four_digits(difference),
    }
    if selection.launches:
        shape = inputs.shape
        launch = selection.launch_for(shape.length, shape.batch)
        figures["launch"] = dataclasses.asdict(launch)
    return {"fp8_cache": figures}


def _quantized(kv: Tensor) -> tuple[Tensor, Tensor]:
    """A cache [2, N, S, K, D] in FP8 and its scales [2, N, K, S], one key or value of a head each."""
    blocks = kv.flatten(0, 1)
    numbers = torch.empty_like(blocks, dtype=torch.float8_e4m3fn)
    scale = torch.empty(blocks.shape[:-1], device=kv.device)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        some = slice(start, start + _BLOCKS_AT_ONCE)
        numbers[some], scale[some] = reference.quantise(blocks[some])
    return numbers.view(kv.shape), scale.view(kv.shape[:-1]).transpose(2, 3)


def time_fp8(inputs: Inputs, bf16_us: float) -> dict[str, Any]:
    """Time packed inputs with FP8 allowed, as a record's entries; none where no row multiplies in it.

    Args:
        inputs: in half precision.
        bf16_us: what the same call took without FP8.
    """
    device = inputs.q.device
    problem = dataclasses.replace(inputs.problem, fp8=True)
    selection = kernels.select(problem, arch_of(device))
    if not selection.spec.fp8 or device.type != "cuda":
        return {}
    from kernels.attention.hopper.fp8_prefill import HopperFP8Prefill  # noqa: PLC0415  # needs Triton

    assert isinstance(inputs.batch, PackedBatch)
    kernel = HopperFP8Prefill(problem, inputs.batch, selection)
    quantized = kernel.quantize(inputs.q, inputs.kv)
    whole = time_call(lambda: kernel(inputs.q, inputs.kv, inputs.out), device)
    attention = time_call(lambda: kernel.attend(*quantized, inputs.out), device)
    shape = inputs.shape
    figures = {
        "kernel": selection.spec.name,
        "launch": dataclasses.asdict(selection.launch_for(shape.length, shape.batch)),
        "us": round(whole.median, 2),
        "us_p20_p80": [round(whole.low, 2), round(whole.high, 2)],
        "tflops": _four_digits(shape.flops / whole.median / 1e6),
        "gain": _four_digits(bf16_us / whole.median),
        "attention_us": round(attention.median, 2),
        "attention_tflops": _four_digits(shape.flops / attention.median / 1e6),
        "attention_gain": _four_digits(bf16_us / attention.median),
        "fa3_tflops_elsewhere": FA3.get(_key(shape)),
    }
    return {"fp8": figures | {"rmse": measure_errors(problem, shape.length, device)}}


def measure_errors(
    problem: AttentionProblem, length: int, device: torch.device
) -> dict[str, float | None]:
    """Root mean square errors over a sequence with outliers, two heads and two draws together."""
    asked = dataclasses.replace(problem, num_heads=_HEADS, num_kv_heads=_HEADS)
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "causal": problem.causal}
    squares = dict.fromkeys(("half", "per_tensor", "fp8"), 0.0)
    for seed in range(_DRAWS):
        q, kv = _draw(asked, length, seed, device)
        truth = reference.attention(q, *kv, **options, dtype=torch.float64)
        plain = reference_fp8.per_tensor(q, *kv, **options)
        squares["per_tensor"] += float((plain - truth).square().mean())
        del plain
        for name, fp8 in (("half", False), ("fp8", True)):
            out = _attend(dataclasses.replace(asked, fp8=fp8), q, kv)
            squares[name] += float((out.double() - truth).square().mean())
    errors = {name: (total / _DRAWS) ** 0.5 for name, total in squares.items()}
    found: dict[str, float | None] = {name: _four_digits(value) for name, value in errors.items()}
    return found | {"per_tensor_over_fp8": _four_digits(errors["per_tensor"] / errors["fp8"])}


def _draw(
    problem: AttentionProblem, length: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Queries [n, H, D], and keys and values [2, n, K, D]: N(0, 1), plus N(0, 100) for one in 1000.

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
    """Attend one sequence through the door."""
    length = q.shape[0]
    offsets = torch.tensor([0, length], dtype=torch.int32, device=q.device)
    plan = kernels.plan_attention(problem, PackedBatch(offsets, offsets, length, length, length))
    out = torch.full_like(q, float("nan"))
    kernels.prefill_attention(q, kv, plan, out)
    return out


def _four_digits(value: float) -> float:
    return float(f"{value:.4g}")


def _key(shape: Shape) -> tuple[tuple[int, int, int], int, int]:
    return (shape.hq, shape.hkv, shape.d), shape.batch, shape.length
