"""Llama, SmolLM2, TinyLlama and others."""

from __future__ import annotations

from typing import Final

from msgspec import Meta

from model.errors import UnsupportedModelError
from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import POSITIONS, read_rotary
from model.network.spec import Attention, Dense, Layer, Network

_WINDOW: Final = Meta(ge=0, le=2**31)


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    window = keys.optional_integer("sliding_window", _WINDOW)
    if window and _is_used(keys, window):
        raise UnsupportedModelError(
            f"sliding_window = {window} is not supported with model_type 'llama';"
            " MistralForCausalLM is the Llama architecture with a sliding window"
        )
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.rms_norm(keys)
    rotary = read_rotary(keys, dim)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    mlp = Dense(parts.inner_size(keys), parts.activation(keys), bias=keys.flag("mlp_bias"))
    windows = parts.same_windows(keys)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


def _is_used(keys: Keys, window: int) -> bool:
    """Whether a window changes what a token attends to."""
    kinds = keys.texts("layer_types") or [parts.SLIDING]
    if window >= keys.integer("max_position_embeddings", POSITIONS) or set(kinds) == {parts.FULL}:
        return False
    if keys.flag("use_sliding_window", default=True):
        return True
    keys.note(f"sliding_window = {window} has no effect, since use_sliding_window is false")
    return False


FAMILY: Final = Family("LlamaForCausalLM", "llama", network, also=("LLaMAForCausalLM",))
