"""The door to the operations of a decoder layer between its attentions, with few launches on a GPU.

`kernels` has the same ones in PyTorch, for every device, differentiably. These multiply on the kernel that suits the
number of rows (`kernels.linear.select`) and start before the kernel before them has ended where the GPU can.

Dimensions: T tokens, H query heads, K key-value heads, D head dim, N blocks, S block size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels import write_kv
from kernels.arch import TENSOR_CORES
from kernels.fp8 import FP8
from kernels.gpu.dependent_launch import may_depend
from kernels.linear.select import LinearProblem, select_linear
from kernels.tuning.linear import tuned_linear

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.arch import GPUArch
    from kernels.linear.select import LinearChoice

__all__ = ["CacheSlots", "FusedLinear", "FusedNorm", "may_depend", "objection", "rope_and_write_kv"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def objection(arch: GPUArch, dtype: torch.dtype) -> str:
    """Say why a model's layers cannot be computed by the operations of this file; empty where they can.

    Args:
        arch: of the model's device.
        dtype: of its weights and activations.
    """
    if arch.is_cpu:
        return "a CPU has no kernels of ours for them"
    if reasons := arch.unsupported(TENSOR_CORES):
        return f"a layer's kernel {reasons[0]}"
    return "" if dtype in _DTYPES else f"no {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """An RMS norm, bound to its weight.

    Attributes:
        weight: [C].
        eps: added to the mean square.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, parts: Tensor | None = None, *, pdl: bool) -> Tensor:
        """Normalise rows, once parts of sums are added to them.

        Args:
            x: [T, C], contiguous in C; becomes the sum where there are parts.
            parts: [S, T, C] float32 contiguous; None for none.
            pdl: launch before the kernel before has ended.

        Returns:
            [T, C], a new tensor.
        """
        from kernels.elementwise.gpu.norm_and_gate import add_rms_norm  # noqa: PLC0415 - Triton is not everywhere

        return add_rms_norm(x, self.weight, self.eps, parts=parts, pdl=pdl)


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear layer with what surrounds it, bound to its weights, which are read where they are at each call.

        y = x' W^T * scale + bias   x' = norm(x), or x
        y = silu(gate) * up         where gated: W is gate above up

    Attributes:
        weight: [N, C] contiguous; [2 * N, C] where gated.
        bias: of as many as `weight` has rows; None for none.
        arch: of the device that it lies on.
        norm: of the input; None takes it as it is.
        gated: see above.
        scale: of weights in float8_e4m3fn, float32, one for each of their rows; None for others. Many rows of x are
            then quantised too.
    """

    weight: Tensor
    bias: Tensor | None
    arch: GPUArch
    norm: FusedNorm | None = None
    gated: bool = False
    scale: Tensor | None = None

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, out: Tensor | None = None, pdl: bool
    ) -> Tensor:
        """Compute the layer.

        Args:
            x: [T, C], contiguous in C.
            residual: [T, N] contiguous; the result is added to it in place. Not where gated.
            out: [T, N] contiguous, where the result is to lie; not with a residual.
            pdl: launch before the kernel before has ended.

        Returns:
            [T, N]: `residual` or `out` if it is given, else a new tensor.

        Raises:
            ShapeError: a shape differs from the above.
        """
        # Imported here: Triton is not there on a host without a GPU.
        from kernels.linear.gpu.linear import LinearArguments, Norm, linear  # noqa: PLC0415

        choice = self.choose(len(x), x.dtype)
        out = out if residual is None else residual
        if out is None:
            out = torch.empty((len(x), choice.problem.outputs), dtype=x.dtype, device=x.device)
        norm = None if self.norm is None else Norm(self.norm.weight, self.norm.eps)
        arguments = LinearArguments(
            scale=self.scale, bias=self.bias, norm=norm, residual=residual, pdl=pdl
        )
        linear(x, self.weight, choice, out, arguments)
        return out

    def most_likely(
        self, x: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor, *, pdl: bool
    ) -> Tensor | None:
        """Compute the layer, and which output of each row is the largest, without reading them again.

        Args:
            x: [T, C], contiguous in C.
            out: [T, N] contiguous, where the result is to lie.
            tokens: [T] int64 contiguous; the number of the largest output, the smallest among equals, or -1 where it
                is no finite number.
            logprobs: [T] float32 contiguous; the logarithm of that output's share of the sum of all exponentials,
                anything where `tokens` is -1.
            pdl: launch before the kernel before has ended.

        Returns:
            [T] int64, a new tensor: `tokens` with valid numbers in the place of -1; None, and nothing is computed,
            where the library multiplies.
        """
        from kernels.linear.gpu.linear import LinearArguments, TileBest, linear  # noqa: PLC0415
        from kernels.sampling.gpu.best_token import best_tokens  # noqa: PLC0415 - as above

        choice = self.choose(len(x), x.dtype)
        if not choice.tiles:
            return None
        best = TileBest.empty(len(x), choice.tiles, x.device)
        ids = torch.empty_like(tokens)
        arguments = LinearArguments(scale=self.scale, bias=self.bias, best=best, pdl=pdl)
        linear(x, self.weight, choice, out, arguments)
        best_tokens(best, ids, tokens, logprobs, pdl=pdl)
        return ids

    def choose(self, rows: int, dtype: torch.dtype) -> LinearChoice:
        """Choose what computes so many rows of a dtype."""
        stacked, inputs = self.weight.shape
        outputs = stacked // 2 if self.gated else stacked
        name = str(dtype).removeprefix("torch.")
        weight_dtype = None if self.scale is None else FP8
        problem = LinearProblem(rows, outputs, inputs, name, self.gated, weight_dtype)
        return _choose(problem, self.arch)


@functools.lru_cache(maxsize=4096)
def _choose(problem: LinearProblem, arch: GPUArch) -> LinearChoice:
    """Choose once for each number of rows."""
    return select_linear(problem, arch, tuned_linear)


class CacheSlots(NamedTuple):
    """Where the keys and values of a step go.

    Attributes:
        kv: [2, N, S, K, D] contiguous, in the queries' dtype or float8_e4m3fn; index 0 keys, 1 values.
        slots: [T] int32; -1 skips a token.
        scale: of a float8_e4m3fn cache, as `kernels.write_kv` takes it.
    """

    kv: Tensor
    slots: Tensor
    scale: Tensor | None


def rope_and_write_kv(
    qkv: Tensor,
    cache: CacheSlots,
    rope: tuple[Tensor, Tensor],
    positions: Tensor,
    *,
    norms: tuple[FusedNorm, FusedNorm] | None,
    ahead: tuple[Tensor, Tensor] | None = None,
    pdl: bool,
) -> Tensor:
    """Normalise queries and keys per head, rotate them, and write keys and values to their slots.

    Args:
        qkv: [T, (H + 2 * K) * D] contiguous; is overwritten.
        cache: where keys and values go; in FP8 by a second launch.
        rope: cos and sin of all positions, [positions, 1, D] contiguous each, as `rope_tables` makes them, in
            qkv's dtype.
        positions: [T] int64, rows of `rope`.
        norms: of queries and keys, over D; None where the family has none.
        ahead: weights that are multiplied by next, of more than 127 bytes each: the second-level cache fetches as
            many of them as it has room for. Pays where what lies between reads little.
        pdl: launch before the kernel before has ended. `positions` and slots are then read early: what wrote
            them must be followed by a launch without `pdl` before this one.

    Returns:
        The queries [T, H, D], a view of `qkv`.
    """
    from kernels.rope.gpu import rope_cache  # noqa: PLC0415 - as above

    kv, slot_mapping, kv_scale = cache
    q = rope_cache.rope_and_write_kv(
        qkv,
        kv,
        rope,
        positions,
        slot_mapping,
        norms=None if norms is None else (norms[0].weight, norms[1].weight),
        eps=0.0 if norms is None else norms[0].eps,
        write=kv_scale is None,
        ahead=ahead,
        pdl=pdl,
    )
    if kv_scale is not None:
        kv_heads, head_dim = kv.shape[3:]
        k, v = qkv[:, q[0].numel() :].view(len(qkv), 2, kv_heads, head_dim).unbind(1)
        write_kv(k, v, kv, slot_mapping, kv_scale=kv_scale)
    return q
