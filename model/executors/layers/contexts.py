"""What the mixers of a kind have in common in a step, made once for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from model.executors.layers.attention import BoundAttention, DenseAttention, PagedAttention
from model.executors.layers.attention_plans import AttentionPlanner
from model.executors.layers.recurrent import (
    BoundRecurrent,
    PagedStates,
    compute_dense,
    step_segments,
)

if TYPE_CHECKING:
    from torch import Tensor

    from model.executors.layers.attention import Attend
    from model.executors.layers.forward import Contexts
    from model.executors.layers.network import PagedStep
    from model.executors.layers.recurrent import Recur
    from model.network.parameters import DecoderParameters


def begin_attention(model: DecoderParameters, it: PagedStep) -> Attend:
    """Return attention of the layers of a step, over the KV cache."""
    metadata = it.metadata
    if metadata is None:
        assert it.step is not None
        planner = AttentionPlanner(it.bound.attentions, model.dtype_name, model.unmeasured_kernels)
        metadata = planner.plan_step(it.step, it.state)
    return PagedAttention(
        it.state,
        metadata,
        model.ropes,
        it.positions,
        rotation=it.bound.rotation,
        pdl=it.bound.pdl,
        batch_invariant=it.deterministic,
    )


def begin_dense_attention(model: DecoderParameters, positions: Tensor, hidden: Tensor) -> Attend:
    """Return attention of the layers for whole sequences, [B, L, C] at positions [L]."""
    ropes = [it.dense(positions, hidden.dtype) for it in model.ropes]
    sources = {it.kv_layer for it in model.network.attentions if it.kv_layer is not None}
    return DenseAttention(ropes, positions, sources)


def begin_recurrences(_model: DecoderParameters, it: PagedStep) -> Recur:
    """Return the recurrences of the layers of a step, over the states in slots."""
    if it.step is None:
        assert it.segments is not None, "the caller states the sequences"
        return PagedStates(it.state, it.segments)
    return PagedStates(it.state, step_segments(it.step))


def begin_dense_recurrences(
    _model: DecoderParameters, _positions: Tensor, _hidden: Tensor
) -> Recur:
    """Return the recurrences of the layers for whole sequences."""
    return compute_dense


def begin_both(model: DecoderParameters, it: PagedStep) -> Contexts:
    """Return the contexts of attention and of a recurrence beside it."""
    return {
        BoundAttention: begin_attention(model, it),
        BoundRecurrent: begin_recurrences(model, it),
    }


def begin_dense_both(model: DecoderParameters, positions: Tensor, hidden: Tensor) -> Contexts:
    """Return the same for whole sequences."""
    return {
        BoundAttention: begin_dense_attention(model, positions, hidden),
        BoundRecurrent: compute_dense,
    }
