"""Nemotron 3 and 4, Minitron: layer norms whose weights are stored less 1, the square of ReLU, partial rotation."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.families.tensors import Rewrite
from model.network.spec import Attention, Dense, Layer, Network

_NORMS: Final = ("norm", "input_norm", "mlp_norm")


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    heads, kv_heads, dim = parts.heads(keys)
    bias, norm = keys.flag("attention_bias"), parts.layer_norm(keys)
    rotary = read_rotary(keys, dim, partial=0.5)
    mixer = Attention(heads, kv_heads, dim, dim**-0.5, rotary=rotary, bias=bias, output_bias=bias)
    mlp = Dense(
        parts.inner_size(keys),
        parts.activation(keys, ("relu2",)),
        gated=False,
        bias=keys.flag("mlp_bias"),
    )
    windows = parts.same_windows(keys)
    return parts.decoder(keys, parts.with_windows(Layer(mixer, mlp, norm), windows), norm)


def _rewrites(_: Keys) -> dict[str, Rewrite]:
    return dict.fromkeys(_NORMS, Rewrite(offset=1.0))


FAMILY: Final = Family(
    "NemotronForCausalLM",
    "nemotron",
    network,
    rewrites=_rewrites,
    renamed={"layer_norm_eps": "norm_eps"},
)
