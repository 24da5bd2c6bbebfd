"""A decode step of one sequence as a single launch: from its last token to the next one.

In a small model, separate kernels spend more time waiting for each other than reading their weights. In this kernel
each SM runs one program for the whole step. Its producer streams weights through shared memory without a pause. Its
consumers synchronize with those of the other programs where an operation depends on the results of others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.step.gpu.consumer import consume
from kernels.step.gpu.grid_barrier import COUNTER_LINE, HEAD_READY, MISSING
from kernels.step.gpu.producer import produce
from kernels.step.gpu.ring import make_ring
from kernels.step.gpu.step_constants import FIELDS, INT4, MOST_PROGRAMS, StepConstants
from kernels.step.packed_scales import MIDDLE, packed_scales
from kernels.step.sizes import ROWS, part_scales, step_sizes
from kernels.step.weights import MATRICES, StepWeights

if TYPE_CHECKING:
    from kernels.arch import GPUArch

_HEAD_FLYING: Final = 4
_LITTLE_HIDDEN: Final = 1024
"""Up to this hidden size, programs wait more for each other than for memory."""


@gluon.jit
def whole_step(
    table, embedding, norm, head, ids, positions, slots, block_table, cos, sin, local_cos, local_sin, hidden, between,
    qkv, inner, parts, logs, best, totals, counters, logits, tokens, logprobs, sampled, eps, scale,
    LAYERS: gl.constexpr, HIDDEN: gl.constexpr, INNER: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP_SPLITS: gl.constexpr, HELD: gl.constexpr, HELD_P: gl.constexpr, D: gl.constexpr, DP: gl.constexpr,
    BLOCK_D: gl.constexpr, INPUTS: gl.constexpr, VOCAB: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr,
    FLYING: gl.constexpr, HEAD_FLYING: gl.constexpr, EARLY: gl.constexpr, SPLITS: gl.constexpr, NORMS: gl.constexpr,
    BIAS: gl.constexpr, WINDOWS: gl.constexpr, FP8: gl.constexpr, HIDDEN_TILES: gl.constexpr, FP8_WEIGHTS: gl.constexpr,
    POST_NORMS: gl.constexpr, GELU_TANH: gl.constexpr, LOCAL_ROPE: gl.constexpr,
    EMBEDDING_FACTOR: gl.constexpr, PART_SCALES: gl.constexpr, WEIGHT_OFFSET: gl.constexpr,
    WEIGHT_SHIFTS: gl.constexpr,
):  # fmt: skip
    """Compute a step with one program per SM; all programs must be resident at once, else they deadlock.

    Programs exchange their results through the buffers from `hidden` to `totals`. Layers alternate between the two
    halves of all buffers up to `logs` (in a step of rows to `mixed`), which hold the bits of `MISSING` before the first
    launch.

    Args:
        table: [LAYERS, fields] int64, the fields that `kernels.step.gpu.step_constants.FIELDS` names; with FP8_WEIGHTS
            or POST_NORMS followed by as many second rows.
        ids: as in `StepKernel`, as are `positions`, `slots`, `block_table`, `cos`, `sin`, `logits`, `tokens`,
            `logprobs` and `sampled`.
        local_cos: of layers with a sliding window, as is `local_sin`; None without LOCAL_ROPE.
        hidden: [2, HIDDEN], the hidden state after a layer; with POST_NORMS the output of its MLP.
        between: [2, HIDDEN], the hidden state between attention and MLP; with POST_NORMS the output of attention.
        qkv: [2, (HEADS + 2 * KV_HEADS) * D].
        inner: [2, INNER].
        parts: [2, SPLITS, HEADS, D] in the model's dtype.
        logs: [2, SPLITS, HEADS] float32.
        best: [MOST_PROGRAMS] int64, the largest key of a program's logits.
        totals: [MOST_PROGRAMS] float32, the sum of their exp(logit - largest).
        counters: [HEAD_READY + KV_HEADS * COUNTER_LINE] int32, 0 before the first launch.
        eps: of all norms.
        scale: of the attention scores, in units of log2.
    """
    c = StepConstants(
        LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, GROUP_SPLITS, HELD, HELD_P, D, DP, BLOCK_D, INPUTS, VOCAB, BLOCK_SIZE,
        STAGES, FLYING, HEAD_FLYING, EARLY, SPLITS, NORMS, BIAS, WINDOWS, FP8, HIDDEN_TILES, FP8_WEIGHTS=FP8_WEIGHTS,
        POST_NORMS=POST_NORMS, GELU_TANH=GELU_TANH, LOCAL_ROPE=LOCAL_ROPE,
        EMBEDDING_FACTOR=EMBEDDING_FACTOR, PART_SCALES=PART_SCALES, WEIGHT_OFFSET=WEIGHT_OFFSET,
        WEIGHT_SHIFTS=WEIGHT_SHIFTS,
    )  # fmt: skip
    ring = make_ring(embedding.dtype.element_ty, c)
    ropes = (cos, sin, local_cos, local_sin)
    buffers = (hidden, between, qkv, inner, parts, logs, best, totals)
    gl.warp_specialize([
        (consume, (
            ring, table, embedding, norm, ids, positions, slots, ropes, buffers, counters, logits, tokens, logprobs,
            sampled, eps, scale, c,
        )),
        (produce, (ring, table, head, positions, block_table, c)),
    ], [4], [64])  # fmt: skip


class BoundStep:
    """What the launches of a step have in common. All use the same buffers, so they must be ordered on one stream.

    Args:
        weights: as in `kernels.step.single_launch.bind_step`.
        caches: as in `bind_step`.
        scales: as in `bind_step`.
        arch: of their device.
        rows: of a step, 1 or one of `kernels.step.sizes.ROW_COUNTS`.

    Attributes:
        of_rows: whether one row is computed as one of several is.
    """

    of_rows: ClassVar = False

    def __init__(
        self,
        weights: StepWeights,
        caches: tuple[Tensor, ...],
        scales: tuple[Tensor | None, ...],
        arch: GPUArch,
        rows: int = 1,
    ) -> None:
        self._weights = weights
        packed = packed_scales(weights)
        self._in_table = caches, scales, packed
        self._grid = (arch.num_sms,)
        self._table = address_table(weights, caches, scales, packed)
        self._buffers = exchange_buffers(weights, arch, rows, of_rows=self.of_rows)
        self._constants = step_constants(weights, caches, scales, arch, rows, of_rows=self.of_rows)


class StepKernel(BoundStep):
    """The decode steps of one sequence; arguments as for `BoundStep`."""

    def __init__(
        self,
        weights: StepWeights,
        caches: tuple[Tensor, ...],
        scales: tuple[Tensor | None, ...],
        arch: GPUArch,
    ) -> None:
        super().__init__(weights, caches, scales, arch)
        form, factor = weights.layers[0].qkv.format, weights.shape.embedding_factor
        self._constants |= {
            "FP8_WEIGHTS": INT4.value if form.bits == 4 else form.is_quantized,
            "PART_SCALES": part_scales(form),
            "WEIGHT_OFFSET": MIDDLE if form.shifts else form.offset,
            "WEIGHT_SHIFTS": form.shifts,
            "POST_NORMS": weights.shape.post_norms,
            "GELU_TANH": weights.shape.activation == "gelu_tanh",
            # Rounded to the dtype, as in training.
            "EMBEDDING_FACTOR": torch.tensor(factor, dtype=weights.embedding.dtype).item(),
        }

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        rope: tuple[Tensor, ...],
        logits: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        sampled: Tensor,
    ) -> None:
        """Write a token's key and value to the cache, and compute the logits and their argmax.

        Args:
            ids: [1] int64, the token; -1 - i selects `sampled[i]`.
            positions: [1] int64, its position; all before it are in the cache.
            slots: [1] int32, the cache slot of its key and value; -1 writes none.
            block_table: [1, columns] int32, blocks of the positions before it.
            rope: cos and sin of all positions, [positions, 1, D] contiguous each, as `rope_tables` returns them; then
                those of layers with a sliding window, if they have a rotation of their own.
            logits: [1, V] contiguous; written.
            tokens: [1] int64; written, the argmax of the logits, -1 where the largest logit is not finite.
            logprobs: [1] float32; written, its natural log-probability, undefined where `tokens` is -1.
            sampled: [capacity] int64; its first element is written, as `tokens` but always a valid id.
        """
        weights = self._weights
        whole_step[self._grid](
            self._table, weights.embedding, weights.norm, weights.head, ids, positions, slots, block_table,
            *rope, *(None,) * (4 - len(rope)), *self._buffers, logits, tokens, logprobs, sampled,
            weights.shape.eps, weights.shape.softmax_scale * math.log2(math.e),
            LOCAL_ROPE=len(rope) > 2, **self._constants,
        )  # fmt: skip


def exchange_buffers(
    weights: StepWeights, arch: GPUArch, rows: int = 1, *, of_rows: bool = False
) -> tuple[Tensor, ...]:
    """Allocate the buffers through which programs exchange their results, as before the first launch.

    Args:
        weights: of the model.
        arch: of their device.
        rows: of the step; all sizes that `whole_step` documents are multiplied by it.
        of_rows: as for `BoundStep`.

    Returns:
        The arguments of `whole_step` from `hidden` to `counters`, or of `step_of_rows`.
    """
    shape, device = weights.shape, weights.embedding.device
    queries = shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    splits = step_sizes(shape, arch, rows).splits

    def missing(size: int, kind: torch.dtype = weights.embedding.dtype) -> Tensor:
        halves = 2 * rows * size * kind.itemsize // torch.int16.itemsize
        return torch.full((halves,), MISSING.value, dtype=torch.int16, device=device).view(kind)

    best = torch.empty(rows * MOST_PROGRAMS.value, dtype=torch.int64, device=device)
    counters = HEAD_READY.value + shape.num_kv_heads * COUNTER_LINE.value
    return (
        missing(shape.hidden_size),
        missing(shape.hidden_size),
        missing(queries + 2 * keys),
        missing(shape.inner_size),
        missing(splits * queries),
        missing(splits * shape.num_heads, torch.float32),
        *((missing(queries),) if of_rows else ()),
        best,
        torch.empty_like(best, dtype=torch.float32),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def step_constants(
    weights: StepWeights,
    caches: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    arch: GPUArch,
    rows: int = 1,
    *,
    of_rows: bool = False,
) -> dict[str, Any]:
    """Return the constants and options of a launch; arguments as for `BoundStep` and `exchange_buffers`."""
    shape, first = weights.shape, weights.layers[0]
    form = first.qkv.format
    sizes = step_sizes(shape, arch, rows, of_rows=of_rows, weight_format=form)
    little = shape.hidden_size <= _LITTLE_HIDDEN
    constants = {
        "LAYERS": len(weights.layers),
        "HIDDEN": shape.hidden_size,
        "INNER": shape.inner_size,
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "GROUP_SPLITS": sizes.group_splits,
        "HELD": sizes.heads,
        "HELD_P": sizes.padded_heads,
        "D": shape.head_dim,
        "DP": sizes.padded_dim,
        "BLOCK_D": sizes.block_dim,
        "INPUTS": sizes.inputs,
        "VOCAB": len(weights.head),
        "BLOCK_SIZE": caches[0].shape[2],
        "STAGES": sizes.stages,
        "FLYING": 1 if little else 2,
        "HEAD_FLYING": _HEAD_FLYING,
        "EARLY": little,
        "SPLITS": sizes.splits,
        "NORMS": first.q_norm is not None,
        "BIAS": first.qkv_bias is not None,
        "WINDOWS": any(layer.window for layer in weights.layers),
        "FP8": scales[0] is not None,
        "HIDDEN_TILES": -(-shape.hidden_size // (ROWS * arch.num_sms)),
        "num_warps": 8,
        "launch_cooperative_grid": True,
    }
    if of_rows:
        constants |= {"BATCH": rows, "LOCAL": sizes.local}
    return constants


def address_table(
    weights: StepWeights,
    caches: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    packed: list[dict[str, Tensor]],
) -> Tensor:
    """Return the table of a step on the weights' device; 0 for tensors that a layer does not have."""
    addresses = [
        [field.data_ptr() if isinstance(field, torch.Tensor) else field or 0 for field in row]
        for row in table_rows(weights, caches, scales, packed)
    ]
    return torch.tensor(addresses, dtype=torch.int64).to(weights.embedding.device)


def table_rows(
    weights: StepWeights,
    caches: tuple[Tensor, ...],
    scales: tuple[Tensor | None, ...],
    packed: list[dict[str, Tensor]],
) -> list[tuple[Tensor | int | None, ...]]:
    """Return the tensors and numbers to which the rows of the table of a step refer."""
    rows = []
    for layer, kv, scale in zip(weights.layers, caches, scales, strict=True):
        numbers = {name: getattr(layer, name).numbers for name in MATRICES}
        tensors = {**layer._asdict(), **numbers, "keys": kv[0], "values": kv[1]}
        tensors["key_scales"], tensors["value_scales"] = (None, None) if scale is None else scale
        rows.append(tensors)
    for layer, own_scales in zip(weights.layers, packed, strict=True):
        second: dict[str, Tensor | None] = {**own_scales}
        if layer.output_norm is not None:
            second |= {"input_norm": layer.output_norm, "mlp_norm": layer.down_norm}
        rows += [second] if second else []
    return [tuple(row.get(name) for name in FIELDS) for row in rows]
