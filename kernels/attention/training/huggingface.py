"""Attention of this package for models of `transformers`, in training and generation.

    from tessera.kernels.attention.training import huggingface
    huggingface.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tessera")

Padded batches are packed before attention and unpacked after it, so that padding costs nothing; sequences that are
packed already (`position_ids` that start again, or `cu_seq_lens_q`) stay so. Key-value heads are not repeated. Of a
static cache only the keys that exist are read. Gradients have the same bits in every run only with
`torch.use_deterministic_algorithms(True)`.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernels.attention.training.autograd import flash_attention
from kernels.attention.training.drop_in import dropout_seed, in_one_head_dim
from kernels.errors import ShapeError

NAME: Final = "tessera"
_WITH_EFFECT: Final = (
    "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices", "output_attentions",
)  # fmt: skip
"""Arguments of layers that would change the result."""
_PACKED: Final = "packed_sequence_mask_function.<locals>.inner_mask"
_PARTS: Final = frozenset(
    {
        "causal_mask_function",
        "bidirectional_mask_function",
        "and_masks.<locals>.and_mask",
        "sliding_window_overlay.<locals>.inner_mask",
        "sliding_window_bidirectional_overlay.<locals>.inner_mask",
        _PACKED,
        "remap_positions_for_packed_sequence.<locals>.inner_mask",
    }
)
"""Mask functions of `transformers` that other arguments of `attention` describe too."""


def register() -> None:
    """Make `attn_implementation="tessera"` known to `transformers`. Calling it again does nothing.

    Raises:
        ImportError: `transformers` is not installed, or older than 4.54.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415 - optional

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    batch_size: int,
    kv_length: int,
    q_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: FunctionType | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    device: torch.device | str | None = None,
    **_others: object,
) -> Tensor | None:
    """Return the mask that `attention` takes; see `transformers.AttentionMaskInterface`.

    Args:
        batch_size: B.
        kv_length: keys of this layer, of which a layer with a sliding window may have fewer than others.
        q_length: queries.
        q_offset: position of the first query; reading a tensor waits for a GPU.
        kv_offset: position of the first key of this layer.
        mask_function: what `transformers` makes of a causal or full mask, with a window and packed sequences, which
            other arguments of `attention` describe.
        attention_mask: [B, n], true for tokens that are not padding; None if none is.
        cache_position: positions of the queries, in place of `q_length` and `q_offset`, as version 5.0 gives them.
        device: of a new mask.

    Returns:
        [B, n] bool for the first n keys, after which a static cache has none yet; or [B, n] integers, the sequence of
        each token, if several are packed into a row; or None if all keys are there and none is padding.

    Raises:
        ShapeError: `mask_function` is another one, such as of chunks or of blocks that see themselves whole.
    """
    parts = _parts(mask_function) if mask_function is not None else {"causal_mask_function": None}
    if unknown := parts.keys() - _PARTS:
        raise ShapeError(
            f"a mask with {', '.join(sorted(unknown))} is not supported; use another attn_implementation"
        )
    if packed := parts.get(_PACKED):
        sequences: Tensor = inspect.getclosurevars(packed).nonlocals["packed_sequence_mask"]
        return sequences
    length = kv_length
    if "causal_mask_function" in parts:
        last = int(q_offset) + q_length if cache_position is None else int(cache_position[-1]) + 1
        length = min(kv_length, last - kv_offset)
    if attention_mask is None:
        if length == kv_length:
            return None
        return torch.ones(batch_size, length, dtype=torch.bool, device=device)
    mask = attention_mask[:, kv_offset : kv_offset + length].bool()
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
        value: [B, K, S_k, D_v].
        attention_mask: what `padding_mask` returned.
        dropout: probability with which a weight is dropped.
        scaling: factor on the scores; None for 1 / sqrt(D).
        sliding_window: keys that a query sees at most; None for all.
        softcap: c in c * tanh(score / c); None for none.
        is_causal: whether a query sees only keys up to its own.
        others: `position_ids`, and `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` of packed
            sequences; those of `_WITH_EFFECT` must be absent, and the rest has no effect.

    Returns:
        [B, S, H, D_v], and None in place of the weights.

    Raises:
        ShapeError: a layer has attention sinks, position biases, a window without a causal mask or a mask of another
            form, or its weights are requested.
    """
    for name in _WITH_EFFECT:
        given = others.get(name)
        if given is not None and given is not False:
            raise ShapeError(f"{name} is not supported; use another attn_implementation")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None and attention_mask.ndim == 2:
        key, value = (it[:, :, : attention_mask.shape[1]] for it in (key, value))
    if sliding_window is not None and not causal:
        if key.shape[2] > sliding_window:
            raise ShapeError(
                f"a sliding window of {sliding_window} on {key.shape[2]} keys without a causal mask is not supported; "
                "use another attn_implementation"
            )
        sliding_window = None
    options: dict[str, Any] = {
        "softmax_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "sliding_window": sliding_window,
        "causal": causal,
        "softcap": softcap,
        "dropout_p": dropout,
        "dropout_seed": dropout_seed(dropout),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    q, k, v = (it.transpose(1, 2) for it in in_one_head_dim(query, key, value))
    packed = _packed(q, k, attention_mask, others)
    if packed is None:
        out = flash_attention(q, k, v, return_lse=False, **options)
        return out[..., : value.shape[-1]], None
    rows = (packed.queries(q), packed.keys(k), packed.keys(v))
    out = flash_attention(*rows, return_lse=False, **(options | packed.arguments))
    if packed.index_q is not None:
        whole = out.new_zeros(q.shape[0] * q.shape[1], *q.shape[2:])
        out = whole.index_copy(0, packed.index_q, out)
    return out.view(q.shape)[..., : value.shape[-1]], None


def _parts(function: FunctionType) -> dict[str, FunctionType | None]:
    """Return a mask function of `transformers` and those that it combines, by their names."""
    found: dict[str, FunctionType | None] = {function.__qualname__: function}
    for cell in function.__closure__ or ():
        content = cell.cell_contents
        for it in content if isinstance(content, tuple) else (content,):
            if isinstance(it, FunctionType):
                found |= _parts(it)
    return found


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
            f"the mask is {list(mask.shape)}; expected [B, S_k] = {list(k.shape[:2])} of tokens that are not padding"
        )
    if mask.dtype is not torch.bool:
        return _at(mask.diff(dim=1) != 0)
    mask_q = mask[:, -q.shape[1] :]
    starts_q, starts_k = (_cumulated(it.sum(1)) for it in (mask_q, mask))
    index_q, index_k = (it.flatten().nonzero()[:, 0] for it in (mask_q, mask))
    packed = _starts(starts_q, starts_k, q.shape[1], k.shape[1])
    return packed._replace(index_q=index_q, index_k=index_k)


def _by_position(q: Tensor, k: Tensor, position_ids: Tensor | None) -> _Packed | None:
    """Return the packing of rows of several sequences, at whose first tokens the positions do not go on."""
    batch, length = q.shape[:2]
    if position_ids is None or position_ids.ndim != 2 or length == 1 or length != k.shape[1]:
        return None
    if position_ids.shape not in ((batch, length), (1, length)):
        return None
    begins = position_ids.diff(dim=1) != 1
    return _at(begins.expand(batch, -1)) if bool(begins.any()) else None


def _at(begins: Tensor) -> _Packed:
    """Return the packing of rows in which sequences begin.

    Args:
        begins: [B, S - 1] bool, whether one begins at each token but the first of a row, where one always does.
    """
    firsts = torch.nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero()[:, 0]
    ends = torch.cat([firsts, firsts.new_tensor([begins.shape[0] * (begins.shape[1] + 1)])])
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
