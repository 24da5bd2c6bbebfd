"""The parameters of recurrent mixers in a decoder layer; see `kernels.recurrent.problem.RecurrentWeights`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from model.network.mixers import GatedDelta, Mamba2, ShortConv
    from model.network.new_parameters import NewParameters


def add_short_conv(layer: nn.Module, mixer: ShortConv, new: NewParameters) -> None:
    """Add the parameters of a gated short convolution."""
    _add_products(layer, mixer, new, input=mixer.bias, mixed=mixer.bias)
    layer.conv = new.vector(mixer.channels, mixer.width)
    layer.register_parameter("conv_bias", new.vector(mixer.channels) if mixer.bias else None)


def add_gated_delta(layer: nn.Module, mixer: GatedDelta, new: NewParameters) -> None:
    """Add the parameters of the gated delta rule."""
    _add_products(layer, mixer, new)
    layer.conv = new.vector(mixer.channels, mixer.width)
    layer.a_log = new.float32(mixer.num_heads)
    layer.dt_bias = new.float32(mixer.num_heads)
    layer.gated_norm = new.vector(mixer.value_dim)


def add_mamba2(layer: nn.Module, mixer: Mamba2, new: NewParameters) -> None:
    """Add the parameters of Mamba-2."""
    _add_products(layer, mixer, new, input=mixer.bias, mixed=mixer.output_bias)
    layer.conv = new.vector(mixer.channels, mixer.width)
    bias = new.vector(mixer.channels) if mixer.conv_bias else None
    layer.register_parameter("conv_bias", bias)
    layer.a_log = new.float32(mixer.num_heads)
    layer.dt_bias = new.float32(mixer.num_heads)
    layer.d = new.float32(mixer.num_heads)
    norm = None if mixer.eps is None else new.vector(mixer.inner)
    layer.register_parameter("gated_norm", norm)


def _add_products(
    layer: nn.Module,
    mixer: ShortConv | GatedDelta | Mamba2,
    new: NewParameters,
    **biases: bool,
) -> None:
    """Add the matrices; `biases` has those with a bias by name."""
    for name, (rows, inputs) in mixer.matrices(new.hidden).items():
        setattr(layer, name, new.matrix(name, sum(rows), inputs))
        setattr(layer, f"{name}_bias", new.vector(sum(rows)) if biases.get(name) else None)
