"""How the checkpoints of a family store the parameters of a network, as data; `model.checkpoint` reads and writes so.

A module of a layer, such as a projection, has one name here for its weight and its bias:

    input_norm, mlp_norm        norms before the mixer and before the MLP
    output_norm, down_norm      norms of their results
    q, k, v, output             projections of attention;  q_norm, k_norm: norms of queries and keys
    gate, up, down              matrices of the MLP; without a gate only up and down
    q_gate                      the gate of attention's result, whose rows stand behind those of each head's query in q
    mixed_in, z, beta, alpha    projections of the gated delta rule: to its convolution, its gate, its rate, its decay
    z, x, b, c, dt              rows of the input projection of Mamba-2
    input, conv, mixed          input projection of other recurrent mixers; convolution and output projection of all
    gated_norm, a_log, dt_bias, d  their other parameters, of which the last three have no `.weight` after the name
    alpha_p, alpha_n            the parameters of xIELU, which have none either
    scale                       of the stream after the layer, likewise
    per_layer_gate, per_layer_output, per_layer_output_norm     of per-layer inputs
    laurel_in, laurel_out, laurel_out_norm                      of LAuReL
    altup_norm, altup_router, altup_predict, altup_correct, altup_scale     of AltUp; the last one without `.weight`

Outside the layers there are embed_tokens, embed_positions, norm and lm_head; embed_per_layer, per_layer_projection and
per_layer_norm; streams_in and streams_out, whose modules have a number after the name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

HEAD: Final = "lm_head"
CONVOLUTION: Final = "conv"


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What loading changes in a module, so that the network computes the function of the checkpoint.

    Attributes:
        factor: multiplies weight and bias.
        offset: added to the weight, after the factor.
        bias: multiplies the bias; None for `factor`.
    """

    factor: float = 1.0
    offset: float = 0.0
    bias: float | None = None


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a family's checkpoints.

    Attributes:
        modules: the names of the modules outside the layers, without `.weight` and `.bias`.
        layer_modules: the names of the modules of a layer, after its index. Modules of the same name are rows of one
            tensor, in the order of this mapping.
        prefix: of all tensors but lm_head's. Files may omit its first component, the name of the base model.
        layers: of a layer's tensors, after `prefix` and before its index.
        transposed: whether matrices of layers are stored [inputs, outputs].
        interleaved_rotary: whether the pairs of dimensions that rotate are stored beside each other, rather than half
            of the rotating dimensions apart.
        grouped_qkv: whether a tensor of q, k and v has the rows of each key-value head together: those of its queries,
            then its own of k and of v.
        aliases: other prefixes that names in files have, and those that they stand for.
        layer_aliases: other names that modules of a layer have in some files, and those that they stand for.
        constants: names of tensors of a layer with one number, and that number, which the network has without them.
        ignored: prefixes of tensors that the network does not have, such as those of an image encoder.
    """

    modules: Mapping[str, str]
    layer_modules: Mapping[str, str]
    prefix: str = "model."
    layers: str = "layers."
    transposed: bool = False
    interleaved_rotary: bool = False
    grouped_qkv: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()


LLAMA: Final = Tensors(
    {"embed_tokens": "embed_tokens", "norm": "norm", HEAD: HEAD},
    {
        "input_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
)
"""The tensors of Llama's checkpoints and of those like them."""

MAMBA2: Final[Mapping[str, str]] = {
    **dict.fromkeys(("z", "x", "b", "c", "dt"), "mamba.in_proj"),
    "conv": "mamba.conv1d",
    "a_log": "mamba.A_log",
    "dt_bias": "mamba.dt_bias",
    "d": "mamba.D",
    "gated_norm": "mamba.norm",
    "mixed": "mamba.out_proj",
}
"""The modules of Mamba-2 in a layer of hybrids that have attention too."""
