"""Maps the tensors of a Hugging Face checkpoint to the parameters of a model.

Most checkpoints store each projection of a layer separately; the model stacks q, k and v, and gate and up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from kernels.weights import Weight
from model.checkpoint.config import ModelConfig
from model.network.decoder import DecoderLM
from model.network.layers import DecoderLayer, stacked_rows
from model.network.matrix import Matrix
from model.network.parallel import shard


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
        parameter: its name in the model.
        values: of the part, views without gradients: a matrix, or a vector.
        transposed: whether the checkpoint stores the transpose.
        stored_less: the checkpoint stores the values less this number.
    """

    parameter: str
    values: Weight | Tensor
    transposed: bool = False
    stored_less: float = 0.0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        shape = tuple(self.values.shape)
        return shape[::-1] if self.transposed else shape

    def of_rank(self, stored: Weight, rank: int) -> Weight:
        """Return the part of a matrix of the checkpoint that a rank has, with its outputs first."""
        part = shard(stored, self.stored_shape, rank)
        return Weight.full(part.dequantize().t()) if self.transposed else part

    def load(self, stored: Weight | Tensor, rank: int) -> None:
        """Copy a matrix or vector of the checkpoint, or a rank's part, to the parameter, rounded to its format.

        Raises:
            ValueError: numbers that would have to be rounded are not finite.
        """
        if isinstance(self.values, Weight):
            assert isinstance(stored, Weight)
            self.values.copy_(self.of_rank(stored, rank))
        else:
            assert isinstance(stored, Tensor)
            part = shard(stored, self.stored_shape, rank)
            self.values.copy_(part.float() + self.stored_less if self.stored_less else part)

    def to_stored(self, dtype: torch.dtype) -> Tensor:
        """Return a copy as the checkpoint stores it, on the CPU."""
        matrix = self.values
        values = (matrix.dequantize() if isinstance(matrix, Weight) else matrix).cpu()
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

    def add(name: str, parameter: str) -> None:
        values = network[parameter].detach()
        parts[name] = ParameterPart(
            parameter,
            values if values.ndim == 1 else Weight.full(values),
            stored_less=_stored_less(config, parameter),
        )

    for parameter in ("embed_tokens", "embed_positions"):
        if parameter in network:
            add(names.prefix + names.network[parameter], parameter)
    for index, layer in enumerate(model.decoder_layers):
        for name, part in _layer_parts(config, names, layer, f"layers.{index}."):
            parts[f"{names.prefix}{names.layer}{index}.{name}"] = part
    for parameter in ("norm", "norm_bias"):
        if parameter in network:
            add(names.prefix + names.network[parameter], parameter)
    if model.lm_head is not None:
        add(_HEAD, "lm_head")
    return parts


def full_names(config: ModelConfig, stored: Iterable[str]) -> dict[str, str]:
    """Map the names in a checkpoint's files to those with the name of the base model, which the files may omit."""
    base = _NAMES.get(config.architecture, _LLAMA).prefix.partition(".")[0] + "."
    names = list(stored)
    omitted = not any(name.startswith(base) for name in names)
    return {name: base + name if omitted and name != _HEAD else name for name in names}


def _layer_parts(
    config: ModelConfig, names: TensorNames, layer: DecoderLayer, prefix: str
) -> Iterator[tuple[str, ParameterPart]]:
    """Yield the name of each tensor of a layer after the layer's index, and the part of the model that holds it."""
    for key, tensor in layer.named_parameters():
        parameter = key.removesuffix(".numbers")
        matrix = getattr(layer, parameter)
        values = matrix.weight.detach() if isinstance(matrix, Matrix) else tensor.detach()
        listed = names.layers[parameter]
        stacked = None if len(listed) == 1 else stacked_rows(layer.spec, parameter)
        sizes = stacked or [values.shape[0]]
        for name, part in zip(listed, values.split(sizes), strict=True):
            yield (
                name,
                ParameterPart(
                    prefix + parameter,
                    part,
                    transposed=names.transposed and isinstance(part, Weight),
                    stored_less=_stored_less(config, parameter),
                ),
            )


def _stored_less(config: ModelConfig, parameter: str) -> float:
    return 1.0 if config.norms_add_one and parameter.endswith("norm") else 0.0
