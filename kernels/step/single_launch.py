"""A decode step of one or a few rows in a single launch: all layers, the output head and the argmax of the logits.

Dimensions: V vocabulary, C hidden size, H query heads, K key-value heads, D head dim, N blocks, S block size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from kernels.arch import BLACKWELL, HOPPER, NEVER_RUN, GPUArch
from kernels.linear import group_tiles
from kernels.step.sizes import (
    COLUMNS,
    FP8_GROUP,
    LEAST_STAGES,
    PARTS,
    ROW_COUNTS,
    part_columns,
    step_sizes,
)
from kernels.step.weights import LayerWeights, StepShape, StepWeights
from kernels.weight_format import FP8_ROWS, WeightFormat

__all__ = [
    "ROW_COUNTS", "LayerWeights", "StepShape", "StepWeights", "bind_step", "computed_as_rows", "has_run",
    "launch_refusal", "unsupported",
]  # fmt: skip

_ARCHES: Final = HOPPER | BLACKWELL
_DTYPES: Final = (torch.bfloat16, torch.float16)
_HEAD_DIM_UNIT: Final = 16
_MOST_HEAD_DIM: Final = 256
_UNIT: Final = 64
"""Of which hidden and intermediate sizes are multiples."""
_MOST_HIDDEN: Final = 4096
_MOST_HIDDEN_OF_ROWS: Final = 3072
"""Largest measured hidden sizes of one sequence and of several."""
_MOST_HIDDEN_OF_FP8_ROWS: Final = {2: 2048, 4: 2048, 8: 1536}
"""As above, of several sequences with weights in FP8. On an H100 8 sequences of Qwen3-0.6B, 1024, make 10 780 tokens/s
and 8447 layer by layer, those of Llama-3.2-1B, 2048, 8258 and 8659."""
_STAGE: Final = PARTS * COLUMNS
"""Columns of weights in a stage; twice as many of FP8 weights."""
_MOST_SMS: Final = 256
"""Programs whose results the argmax reduces, at most."""
_REFUSALS: Final = ("too many blocks in cooperative launch", "operation not supported")
"""The driver's texts of CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE and CUDA_ERROR_NOT_SUPPORTED, part of Triton's."""


StepKernel: TypeAlias = Callable[..., None]
"""A bound step; called as `kernels.step.gpu.kernel_rows.RowsKernel` documents if `computed_as_rows`, else as
`kernels.step.gpu.kernel.StepKernel`."""


def unsupported(
    shape: StepShape,
    dtype: torch.dtype,
    arch: GPUArch,
    rows: int = 1,
    weight_format: WeightFormat | None = None,
    *,
    unmeasured: bool = False,
) -> tuple[str, ...]:
    """List why the decode steps of a model cannot be single launches; empty if they can.

    Args:
        shape: sizes of the model.
        dtype: of its weights unless they are quantized, and of its KV cache unless that is in FP8.
        arch: of its device.
        rows: of a step, 1 or one of `ROW_COUNTS`.
        weight_format: of the layers' matrices; None for full numbers.
        unmeasured: whether architectures are allowed on which no GPU has run the kernel.
    """
    of_arch = arch.unsupported(_ARCHES if rows == 1 else HOPPER)
    if arch.is_cpu:
        return of_arch
    in_fp8 = weight_format == FP8_ROWS
    in_groups = weight_format is not None and group_tiles.reads(weight_format)
    most_hidden = _MOST_HIDDEN if rows == 1 else _MOST_HIDDEN_OF_ROWS
    if rows > 1 and in_fp8:
        most_hidden = _MOST_HIDDEN_OF_FP8_ROWS[rows]
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    of_rows = computed_as_rows(shape, rows, weight_format)
    divided = step_sizes(shape, arch, rows, of_rows=of_rows, weight_format=weight_format)
    units = rows * kv_heads * divided.group_splits
    in_int4 = in_groups and weight_format is not None and not weight_format.float
    part = part_columns(weight_format) if in_groups and weight_format is not None else COLUMNS
    group = weight_format.group if in_groups and weight_format is not None else part
    row_stages = -(-divided.inputs // (2 * PARTS * part)) if in_int4 else 0
    # Of rows, gate and up are multiplied together.
    least = max(LEAST_STAGES, 2 * -(-shape.hidden_size // _STAGE) if of_rows else row_stages)
    tests = (
        (
            weight_format is not None
            and weight_format.is_quantized
            and not (in_fp8 or (in_groups and rows == 1)),
            f"no weights in {weight_format and weight_format.name}",
        ),
        (
            in_int4 and (heads * dim % part > 0 or (part % group > 0 and group % part > 0)),
            f"{heads * dim} queries in groups of {group}, not in parts of {part}",
        ),
        (
            in_groups and not in_int4 and group % FP8_GROUP > 0,
            f"FP8 in groups of {group}, not of a multiple of {FP8_GROUP}",
        ),
        *((rows > 1, f"no {what} for several sequences") for what in _only_alone(shape)),
        (dtype not in _DTYPES, f"no {str(dtype).removeprefix('torch.')}"),
        (
            not units <= arch.num_sms <= _MOST_SMS,
            f"{arch.num_sms} SMs for {units} groups of query heads; from {units} to {_MOST_SMS}",
        ),
        (
            dim % _HEAD_DIM_UNIT > 0 or not 2 * _HEAD_DIM_UNIT <= dim <= _MOST_HEAD_DIM,
            f"head_dim {dim} is not a multiple of {_HEAD_DIM_UNIT} from {2 * _HEAD_DIM_UNIT} to {_MOST_HEAD_DIM}",
        ),
        (
            shape.hidden_size > most_hidden,
            f"a hidden size of {shape.hidden_size}, at most {most_hidden}",
        ),
        *(
            (size % _UNIT > 0, f"{name} of {size}, not a multiple of {_UNIT}")
            for name, size in (
                ("a hidden size", shape.hidden_size),
                ("an intermediate size", shape.inner_size),
            )
        ),
        (heads % kv_heads > 0, f"{heads} query heads for {kv_heads} key-value heads"),
        (
            divided.stages < least,
            f"{arch.shared_memory_bytes} bytes of shared memory hold {max(divided.stages, 0)} stages beside vectors "
            f"of {divided.inputs} elements, at least {least}",
        ),
    )
    if not (of_arch or unmeasured or has_run(arch)):
        of_arch = (NEVER_RUN,)
    return of_arch + tuple(reason for fails, reason in tests if fails)


def computed_as_rows(
    shape: StepShape, rows: int = 1, weight_format: WeightFormat | None = None
) -> bool:
    """Return whether a step is computed by `kernels.step.gpu.kernel_rows`.

    If that is so for one row, each row of a step has the same bits in a step of 1 row and of any of `ROW_COUNTS` that
    is supported. Arguments as for `unsupported`.
    """
    quantized = weight_format is not None and weight_format.is_quantized
    return rows > 1 or not (quantized or any(_only_alone(shape)))


def _only_alone(shape: StepShape) -> Iterator[str]:
    """Yield what a model has that is computed for one sequence only."""
    if shape.post_norms:
        yield "norms after attention and MLP"
    if shape.activation != "silu":
        yield f"{shape.activation} activation"
    if shape.embedding_factor != 1.0:
        yield "factor on embeddings"
    if shape.float32_norms:
        yield "norms in float32"
    if shape.local_rope:
        yield "other rotation for layers with a window"


def has_run(arch: GPUArch) -> bool:
    """Whether a GPU of an architecture has run the kernel."""
    return not arch.unsupported(HOPPER)


def launch_refusal(error: RuntimeError) -> str | None:
    """Return why the driver has refused the launch, None if the error is another one.

    The kernel's programs wait for each other, so all must run at once. Where other processes may use a part of the GPU
    (MPS, MIG, limited SMs), the driver does not promise that. The refusal leaves the device as it was.
    """
    for text in _REFUSALS:
        if text in str(error):
            return f"the driver refuses the launch ({text})"
    return None


def bind_step(
    weights: StepWeights,
    caches: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    arch: GPUArch,
    rows: int = 1,
) -> StepKernel:
    """Bind the decode steps of a number of rows to a model and a cache.

    Args:
        weights: of a model for which `unsupported` lists nothing.
        caches: [2, N, S, K, D] contiguous for each layer, in the weights' dtype or float8_e4m3fn; neither they nor
            `scales` may be replaced.
        scales: [2, N, K, S] float32 contiguous for each layer of a cache in float8_e4m3fn, None for others.
        arch: of their device.
        rows: of a step, 1 or one of `ROW_COUNTS`.
    """
    from kernels.step.gpu.kernel import StepKernel as Kernel  # noqa: PLC0415 - Triton is not everywhere
    from kernels.step.gpu.kernel_rows import RowsKernel  # noqa: PLC0415 - likewise

    if computed_as_rows(weights.shape, rows, weights.layers[0].qkv.format):
        return RowsKernel(weights, caches, scales, arch, rows)
    return Kernel(weights, caches, scales, arch)
