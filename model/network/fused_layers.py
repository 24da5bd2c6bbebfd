"""The layers of a decoder on a GPU in few launches: what `model.network.layers` computes, for a cached pass.

    norm, qkv | norms per head, rotation, cache | attention | output, residual | norm, gate, up, SiLU | down, residual

That is for up to four rows. With more, on Hopper's tensor cores (`kernels.linear.matrix`), a norm is a launch of its
own; with still more, or elsewhere, the library multiplies, and so is the gate of a product. A GPU takes longer to
begin a kernel than to compute a small one. Knows no sequences.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kernels.linear.matrix import (
    FEWEST_ROWS,
    ROW_COUNTS,
    MatrixLayer,
    bind_layer,
    most_rows,
    objection,
)
from kernels.linear.projection import FusedLinear, FusedNorm, may_depend

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from kernels import GPUArch
    from model.network.attention import PagedAttention
    from model.network.layers import DecoderLayer

_logger = logging.getLogger(__name__)

_LITTLE_BYTES: Final = 16 << 20
"""Keys and values of a layer up to which its weights, fetched before them, are still in the cache behind them."""
_FEW_ROWS: Final = 64
"""Tokens up to which a step is bound by its weights; with more they are not what it waits for."""


class FusedOps(NamedTuple):
    """One layer, each norm bound to the projection behind it."""

    qkv: FusedLinear
    head_norms: tuple[FusedNorm, FusedNorm] | None
    output: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear


class FusedLayers:
    """All layers of a model, the norm behind them and its head; their parameters must not be replaced.

    Args:
        layers: in their order.
        norm: weight of the norm behind them.
        head: [V, hidden_size].
        eps: of all norms.
        arch: of the device that all lie on.
    """

    def __init__(
        self, layers: Iterable[DecoderLayer], norm: Tensor, head: Tensor, eps: float, arch: GPUArch
    ) -> None:
        self._pdl = may_depend(arch, norm.device)
        self._ops = [fused_ops(layer, eps, arch) for layer in layers]
        self._fetches = self._pdl
        self._norm = FusedNorm(norm, eps)
        self._head = FusedLinear(head, None, arch)
        products = [(ops.qkv, ops.output, ops.gate_up, ops.down) for ops in self._ops]
        self._matrix: list[MatrixLayer] = []
        self._matrix_rows = 0
        reason = next((why for layer in products if (why := objection(layer, arch))), "")
        if reason:
            _logger.debug("products of %d rows and more are the library's: %s", FEWEST_ROWS, reason)
        elif self._pdl:
            self._matrix = [bind_layer(layer) for layer in products]
            self._matrix_rows = most_rows(sum(linear.weight.numel() for linear in products[0]))

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows, more than one, whose products have kernels of their own."""
        return (2, 4, *(count for count in ROW_COUNTS if count <= self._matrix_rows))

    @torch.no_grad()
    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: PagedAttention,
    ) -> Tensor:
        """Compute the hidden states after the last norm.

        Args:
            hidden: [T, hidden_size] contiguous, the embeddings; is overwritten.
            positions: [T] int64.
            rope: cos and sin of all positions, as `RotaryEmbedding.tables`.
            attention: of this step.

        Returns:
            [T, hidden_size], a new tensor.
        """
        if FEWEST_ROWS <= len(hidden) <= self._matrix_rows:
            return self._compute_by_matrix(hidden, positions, rope, attention)
        pdl = self._pdl
        fetches = self._fetches and len(hidden) <= _FEW_ROWS
        fetches = fetches and attention.most_bytes <= _LITTLE_BYTES
        for layer, ops in enumerate(self._ops):
            qkv = ops.qkv(hidden, pdl=pdl)
            ahead = (ops.output.weight, ops.gate_up.weight) if fetches else None
            attended = attention.attend_projected(
                layer, qkv, positions, rope, ops.head_norms, ahead, pdl=pdl
            )
            ops.output(attended.flatten(-2), hidden, pdl=pdl)
            ops.down(ops.gate_up(hidden, pdl=pdl), hidden, pdl=pdl)
        return self._norm(hidden, pdl=pdl)

    def _compute_by_matrix(
        self,
        hidden: Tensor,
        positions: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: PagedAttention,
    ) -> Tensor:
        """Compute a step of few rows; as `__call__`."""
        pdl = self._pdl
        norms = [_norm_of(ops.qkv) for ops in self._ops]
        normed = norms[0](hidden, pdl=pdl)
        for layer, (ops, products) in enumerate(zip(self._ops, self._matrix, strict=True)):
            qkv = products.qkv(normed, pdl=pdl)
            attended = attention.attend_projected(
                layer, qkv, positions, rope, ops.head_norms, None, pdl=pdl
            )
            parts = products.output(attended.flatten(-2), pdl=pdl)
            normed = _norm_of(ops.gate_up)(hidden, parts, pdl=pdl)
            parts = products.down(products.gate_up(normed, pdl=pdl), pdl=pdl)
            following = self._norm if layer + 1 == len(norms) else norms[layer + 1]
            normed = following(hidden, parts, pdl=pdl)
        return normed

    @torch.no_grad()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Score the vocabulary: [T, hidden_size] to [T, V], in `out` where it is given."""
        return self._head(hidden, out=out, pdl=self._pdl)

    @torch.no_grad()
    def most_likely(
        self, hidden: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor
    ) -> Tensor | None:
        """As `DecoderLM.most_likely`; None, and nothing is computed, where the library multiplies."""
        return self._head.most_likely(hidden, out, tokens, logprobs, pdl=self._pdl)


def fused_ops(layer: DecoderLayer, eps: float, arch: GPUArch) -> FusedOps:
    """Bind a layer's parameters."""
    head_norms = None
    if layer.q_norm is not None and layer.k_norm is not None:
        head_norms = FusedNorm(layer.q_norm, eps), FusedNorm(layer.k_norm, eps)
    return FusedOps(
        qkv=FusedLinear(
            layer.qkv,
            layer.qkv_bias,
            arch,
            FusedNorm(layer.input_norm, eps),
            scale=layer.qkv_scale,
        ),
        head_norms=head_norms,
        output=FusedLinear(layer.output, layer.output_bias, arch, scale=layer.output_scale),
        gate_up=FusedLinear(
            layer.gate_up,
            layer.gate_up_bias,
            arch,
            FusedNorm(layer.mlp_norm, eps),
            gated=True,
            scale=layer.gate_up_scale,
        ),
        down=FusedLinear(layer.down, layer.down_bias, arch, scale=layer.down_scale),
    )


def _norm_of(linear: FusedLinear) -> FusedNorm:
    assert linear.norm is not None, "the projections of a layer have norms"
    return linear.norm
