"""Maps the tensors of a Hugging Face checkpoint to the parameters of a model.

Most checkpoints store each projection of a layer separately; the model stacks q, k and v, and gate and up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from kernels.fp8 import quantize_rows
from model.checkpoint.config import ModelConfig
from model.network.decoder import DecoderLM
from model.network.layers import DecoderLayer, stacked_rows


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """The names of a family's tensors.

    Attributes:
        prefix: of all tensors but the head. A file may omit its first component, the name of the base model.
        layer: of a layer's tensors, after `prefix` and before the layer's index.
        network: the names of the parameters outside the layers, after `prefix`.
        layers: for each parameter of a layer, the names of the stacked tensors, after the layer's index.
        transposed: whether matrices of layers are stored [inputs, outputs].
    """

    prefix: str
    layer: str
    network: dict[str, str]
    layers: dict[str, tuple[str, ...]]
    transposed: bool = False


def _with_biases(names: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """Name the weight and the bias of each projection or norm; commas separate stacked tensors."""
    found = {}
    for parameter, listed in names.items():
        parts = listed.split(",")
        found[parameter] = tuple(f"{part}.weight" for part in parts)
        found[f"{parameter}_bias"] = tuple(f"{part}.bias" for part in parts)
    return found


_QKV: Final = "self_attn.q_proj,self_attn.k_proj,self_attn.v_proj"
_LLAMA: Final = TensorNames(
    prefix="model.",
    layer="layers.",
    network={"embed_tokens": "embed_tokens.weight", "norm": "norm.weight"},
    layers=_with_biases(
        {
            "input_norm": "input_layernorm",
            "qkv": _QKV,
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            "output": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "gate_up": "mlp.gate_proj,mlp.up_proj",
            "down": "mlp.down_proj",
        }
    ),
)
_GEMMA: Final = dataclasses.replace(
    _LLAMA,
    layers=_LLAMA.layers
    | {
        "output_norm": ("post_attention_layernorm.weight",),
        "mlp_norm": ("pre_feedforward_layernorm.weight",),
        "down_norm": ("post_feedforward_layernorm.weight",),
    },
)
_GPT2: Final = TensorNames(
    prefix="transformer.",
    layer="h.",
    network={
        "embed_tokens": "wte.weight",
        "embed_positions": "wpe.weight",
        "norm": "ln_f.weight",
        "norm_bias": "ln_f.bias",
    },
    layers=_with_biases(
        {
            "input_norm": "ln_1",
            "qkv": "attn.c_attn",
            "output": "attn.c_proj",
            "mlp_norm": "ln_2",
            "gate_up": "mlp.c_fc",
            "down": "mlp.c_proj",
        }
    ),
    transposed=True,
)
_OPT: Final = TensorNames(
    prefix="model.decoder.",
    layer="layers.",
    network={
        "embed_tokens": "embed_tokens.weight",
        "embed_positions": "embed_positions.weight",
        "norm": "final_layer_norm.weight",
        "norm_bias": "final_layer_norm.bias",
    },
    layers=_with_biases(
        {
            "input_norm": "self_attn_layer_norm",
            "qkv": _QKV,
            "output": "self_attn.out_proj",
            "mlp_norm": "final_layer_norm",
            "gate_up": "fc1",
            "down": "fc2",
        }
    ),
)
_NAMES: Final = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "GPT2LMHeadModel": _GPT2,
    "OPTForCausalLM": _OPT,
}
"""By architecture; the others have Llama's."""
_HEAD: Final = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class ParameterPart:
    """The part of a model's parameter that one tensor of a checkpoint holds.

    Attributes:
        values: a contiguous view of the parameter, without gradients.
        scale: the scales of its rows, float32, if the parameter is quantized; else None.
        transposed: whether the checkpoint stores the transpose.
        stored_less: the checkpoint stores the values less this number.
    """

    values: Tensor
    scale: Tensor | None = None
    transposed: bool = False
    stored_less: float = 0.0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        shape = tuple(self.values.shape)
        return shape[::-1] if self.transposed else shape

    def load(self, stored: Tensor) -> bool:
        """Copy a tensor of the checkpoint to the parameter, quantized if the parameter is.

        Returns:
            Whether that was possible: quantized weights must be finite.
        """
        if self.transposed:
            stored = stored.t()
        if self.scale is None:
            self.values.copy_(stored.float() + self.stored_less if self.stored_less else stored)
            return True
        rows = stored.to(self.values.device)
        if not bool(rows.isfinite().all()):
            return False
        numbers, scale = quantize_rows(rows)
        self.values.copy_(numbers)
        self.scale.copy_(scale)
        return True

    def to_stored(self, dtype: torch.dtype) -> Tensor:
        """Return a copy as the checkpoint stores it, on the CPU."""
        values = self.values.cpu()
        if self.stored_less:
            values = values - self.stored_less
        # A copy, because safetensors rejects tensors that share memory, as parts of a stacked tensor do.
        return (values.t() if self.transposed else values).to(dtype, copy=True).contiguous()


def named_parts(model: DecoderLM) -> dict[str, ParameterPart]:
    """Map every tensor name of the checkpoint to the part of the model that holds it, in layer order."""
    assert not model.is_packed, "packed weights cannot be split: load with pack=False"
    config = model.config
    names = _NAMES.get(config.architecture, _LLAMA)
    parts = {}
    network = dict(model.named_parameters(recurse=False))
    for parameter in ("embed_tokens", "embed_positions"):
        if parameter in network:
            name = names.prefix + names.network[parameter]
            parts[name] = ParameterPart(network[parameter].detach())
    for index, layer in enumerate(model.decoder_layers):
        for name, part in _layer_parts(config, names, layer):
            parts[f"{names.prefix}{names.layer}{index}.{name}"] = part
    for parameter in ("norm", "norm_bias"):
        if parameter in network:
            name = names.prefix + names.network[parameter]
            parts[name] = ParameterPart(
                network[parameter].detach(), stored_less=_stored_less(config, parameter)
            )
    if model.lm_head is not None:
        parts[_HEAD] = ParameterPart(model.lm_head.detach())
    return parts


def full_names(config: ModelConfig, stored: Iterable[str]) -> dict[str, str]:
    """Map the names in a checkpoint's files to those with the name of the base model, which the files may omit."""
    base = _NAMES.get(config.architecture, _LLAMA).prefix.partition(".")[0] + "."
    names = list(stored)
    omitted = not any(name.startswith(base) for name in names)
    return {name: base + name if omitted and name != _HEAD else name for name in names}


def _layer_parts(
    config: ModelConfig, names: TensorNames, layer: DecoderLayer
) -> Iterator[tuple[str, ParameterPart]]:
    """Yield the name of each tensor of a layer, and the rows of the layer's stacked parameters."""
    buffers = dict(layer.named_buffers())
    for parameter, tensor in layer.named_parameters():
        listed = names.layers[parameter]
        scale = buffers.get(f"{parameter}_scale")
        stacked = None if len(listed) == 1 else stacked_rows(layer.spec, parameter)
        sizes = stacked or [len(tensor)]
        parts = tensor.detach().split_with_sizes(sizes)
        scales = [None] * len(sizes) if scale is None else scale.split_with_sizes(sizes)
        for name, values, its_scale in zip(listed, parts, scales, strict=True):
            yield (
                name,
                ParameterPart(
                    values,
                    its_scale,
                    transposed=names.transposed and tensor.ndim > 1,
                    stored_less=_stored_less(config, parameter),
                ),
            )


def _stored_less(config: ModelConfig, parameter: str) -> float:
    return 1.0 if config.norms_add_one and parameter.endswith("norm") else 0.0
