"""Attention of this package for models of `transformers`, in training and generation.

    from kernels.attention import huggingface
    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tessera")

Padded batches are packed before attention and unpacked after it, so that padding costs nothing; sequences that are
packed already (`position_ids` that start again, or `cu_seq_lens_q`) stay so. Key-value heads are not repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from kernels.attention.autograd import flash_attention
from kernels.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor

NAME: Final = "tessera"


def register() -> None:
    """Make `attn_implementation="tessera"` known to `transformers`. Calling it again does nothing.

    Raises:
        ImportError: `transformers` is not installed, or older than 4.54.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - optional

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    kv_length: int, attention_mask: Tensor | None = None, **_others: object
) -> Tensor | None:
    """Return the mask that `attention` takes; see `transformers.AttentionMaskInterface`.

    Args:
        kv_length: keys of this layer, of which a layer with a sliding window may have fewer than others.
        attention_mask: [B, n], true for tokens that are not padding; None if none is.

    Returns:
        [B, kv_length] bool, or None if there is no padding.
    """
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].bool()
    return None if mask.shape[1] == kv_length and bool(mask.all()) else mask


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of a layer; see `transformers.AttentionInterface`.

    Args:
        module: the layer; its `is_causal` is the default.
        query: [B, H, S, D].
        key: [B, K, S_k, D].
        value: [B, K, S_k, D].
        attention_mask: [B, S_k] bool, true for tokens that are not padding; None for no padding.
        dropout: probability with which a weight is dropped.
        scaling: factor on the scores; None for 1 / sqrt(D).
        sliding_window: keys that a query sees at most; None for all.
        softcap: c in c * tanh(score / c); None for none.
        is_causal: whether a query sees only keys up to its own.
        others: `position_ids`, and `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` of packed
            sequences; the rest has no effect.

    Returns:
        [B, S, H, D], and None in place of the weights.

    Raises:
        ShapeError: a layer has attention sinks, or a mask of another form.
    """
    if others.get("s_aux") is not None:
        raise ShapeError(
            "attention sinks (s_aux) are not supported; use another attn_implementation"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "sliding_window": sliding_window if causal else None,
        "causal": causal,
        "softcap": softcap,
        "dropout_p": dropout,
        "dropout_seed": int(torch.randint(1 << 62, ())) if dropout else 0,
    }
    q, k, v = (it.transpose(1, 2) for it in (query, key, value))
    packed = _packed(q, k, attention_mask, others)
    if packed is None:
        return flash_attention(q, k, v, return_lse=False, **options), None
    rows = (packed.queries(q), packed.keys(k), packed.keys(v))
    out = flash_attention(*rows, return_lse=False, **(options | packed.arguments))
    if packed.index_q is None:
        return out.view(q.shape), None
    whole = out.new_zeros(q.shape[0] * q.shape[1], *q.shape[2:])
    return whole.index_copy(0, packed.index_q, out).view(q.shape), None


class _Packed(NamedTuple):
    """How a batch becomes packed sequences.

    Attributes:
        arguments: of `flash_attention`.
        index_q: rows of the flattened queries that are not padding; None for all.
        index_k: the same for keys.
    """

    arguments: dict[str, Any]
    index_q: Tensor | None = None
    index_k: Tensor | None = None

    def queries(self, x: Tensor) -> Tensor:
        return _take(x, self.index_q)

    def keys(self, x: Tensor) -> Tensor:
        return _take(x, self.index_k)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    rows = x.flatten(0, 1)
    return rows if index is None else rows.index_select(0, index)


def _packed(q: Tensor, k: Tensor, mask: Tensor | None, others: dict[str, Any]) -> _Packed | None:
    """Return how to pack a batch; None if all of its sequences have the same length."""
    if others.get("cu_seq_lens_q") is not None:
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        starts_q, starts_k, most_q, most_k = (others.get(name) for name in names)
        return _starts(starts_q, starts_q if starts_k is None else starts_k, most_q, most_k)
    if mask is None:
        return _by_position(q, k, others.get("position_ids"))
    if mask.shape != (k.shape[0], k.shape[1]):
        raise ShapeError(
            f"the mask is {list(mask.shape)}; expected [B, S_k] = {list(k.shape[:2])}; "
            "a static cache is not supported"
        )
    mask_q = mask[:, -q.shape[1] :]
    starts_q, starts_k = (_cumulated(it.sum(1)) for it in (mask_q, mask))
    index_q, index_k = (it.flatten().nonzero()[:, 0] for it in (mask_q, mask))
    packed = _starts(starts_q, starts_k, q.shape[1], k.shape[1])
    return packed._replace(index_q=index_q, index_k=index_k)


def _by_position(q: Tensor, k: Tensor, position_ids: Tensor | None) -> _Packed | None:
    """Return the packing of a row of several sequences, whose positions start again at 0."""
    if position_ids is None or q.shape[0] > 1 or q.shape[1] != k.shape[1] or q.shape[1] == 1:
        return None
    positions = position_ids.reshape(-1)
    if len(positions) != q.shape[1]:
        return None
    firsts = (positions == 0).nonzero()[:, 0]
    if len(firsts) <= 1:
        return None
    ends = torch.cat([firsts, firsts.new_tensor([len(positions)])]).to(torch.int32)
    return _starts(ends, ends, None, None)


def _cumulated(lengths: Tensor) -> Tensor:
    starts = lengths.new_zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = lengths.cumsum(0)
    return starts


def _starts(
    starts_q: Tensor | None, starts_k: Tensor | None, most_q: int | None, most_k: int | None
) -> _Packed:
    assert starts_q is not None
    assert starts_k is not None
    return _Packed(
        {
            "cu_seqlens_q": starts_q.to(torch.int32),
            "cu_seqlens_k": starts_k.to(torch.int32),
            "max_seqlen_q": most_q,
            "max_seqlen_k": most_k,
        }
    )
