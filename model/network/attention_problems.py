"""The attention problems of a network's layers, as kernels see them. Imports no PyTorch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kernels import AttentionProblem, Phase
from model.network.spec import Rotary

if TYPE_CHECKING:
    from model.network.spec import Attention, Network


def same_problem(mixer: Attention) -> Attention:
    """Return a mixer without what is no part of its attention problem: how its inputs are made, and projections."""
    return dataclasses.replace(
        mixer,
        rotary=Rotary(),
        qk_norm=None,
        joint_qk_norm=False,
        qk_norm_by_head=False,
        late_qk_norm=False,
        query_scale=None,
        value_norm=False,
        tied_values=False,
        kv_layer=None,
        bias=False,
        output_bias=False,
        gate=False,
    )


def attention_problems(network: Network) -> tuple[Attention, ...]:
    """Return a mixer for each distinct attention problem of a network; those without a window first."""
    distinct = dict.fromkeys(map(same_problem, network.attentions))
    return tuple(sorted(distinct, key=lambda mixer: mixer.window or 0))


def attention_problem(
    mixer: Attention, phase: Phase, dtype: str, block_size: int, kv_dtype: str | None = None
) -> AttentionProblem:
    """Return the attention problem of a mixer.

    Args:
        mixer: of a layer.
        phase: prefill or decode.
        dtype: name of the dtype of activations.
        block_size: tokens per cache block.
        kv_dtype: dtype of a quantized cache; None for one of `dtype`.
    """
    return AttentionProblem(
        phase=phase,
        dtype=dtype,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        block_size=block_size,
        softmax_scale=mixer.scale,
        sliding_window=mixer.window,
        softcap=mixer.softcap,
        kv_dtype=kv_dtype,
    )
