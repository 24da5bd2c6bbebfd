"""Maps the tensor names of a Hugging Face checkpoint to the parameters of a model.

A checkpoint stores each projection of a layer separately; the model stacks q, k and v, and gate and up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import Tensor

from model.checkpoint.config import ModelConfig
from model.network.decoder import DecoderLM
from model.network.layers import DecoderLayer

# For each parameter of a layer, the names of the stacked tensors, after "model.layers.{i}.".
_LAYER_NAMES: Final = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "qkv_bias": tuple(f"self_attn.{part}_proj.bias" for part in "qkv"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}


def named_slices(model: DecoderLM) -> dict[str, Tensor]:
    """Map every tensor name of the checkpoint to the part of the model that holds it.

    Returns:
        Contiguous views of the parameters without gradients, in layer order.
    """
    assert not model.is_packed, "packed weights cannot be split: load with pack=False"
    slices = {"model.embed_tokens.weight": model.embed_tokens.detach()}
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        slices |= _layer_slices(model.config, index, layer.named_parameters())
    slices["model.norm.weight"] = model.norm.detach()
    if model.lm_head is not None:
        slices["lm_head.weight"] = model.lm_head.detach()
    return slices


def named_scales(model: DecoderLM) -> dict[str, Tensor]:
    """Map the checkpoint names of quantized tensors to their scales.

    Returns:
        Views of the buffers, [rows] float32 each; empty if the model is not quantized.
    """
    scales: dict[str, Tensor] = {}
    for index, layer in enumerate(model.layers):
        matrices = ((name.removesuffix("_scale"), scale) for name, scale in layer.named_buffers())
        scales |= _layer_slices(model.config, index, matrices)
    return scales


def _layer_slices(
    config: ModelConfig, index: int, stacked: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Map checkpoint names to rows of a layer's stacked tensors."""
    kv_rows = config.num_kv_heads * config.head_dim
    rows = {
        2: [config.intermediate_size, config.intermediate_size],
        3: [config.num_heads * config.head_dim, kv_rows, kv_rows],
    }
    slices = {}
    for parameter, weight in stacked:
        names = _LAYER_NAMES[parameter]
        whole = weight.detach()
        parts = (whole,) if len(names) == 1 else whole.split_with_sizes(rows[len(names)])
        for name, part in zip(names, parts, strict=True):
            slices[f"model.layers.{index}.{name}"] = part
    return slices
