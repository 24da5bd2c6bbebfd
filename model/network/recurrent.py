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
    """Add the parameters of the gated delta rule; matrices that read the stream are stored as one if they can be."""
    _add_products(layer, mixer, new, in_one=("input", "gates"))
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
    in_one: tuple[str, ...] = (),
    **biases: bool,
) -> None:
    """Add the matrices.

    Args:
        layer: gets them.
        mixer: has them.
        new: makes them.
        in_one: names of those that are stored as one if their formats are the same; they have the same inputs.
        biases: those with a bias by name.
    """
    shapes = {name: (sum(rows), it) for name, (rows, it) in mixer.matrices(new.hidden).items()}
    matrices = {name: new.matrix(name, *it) for name, it in shapes.items() if name not in in_one}
    if in_one:
        rows = {name: shapes[name][0] for name in in_one}
        matrices |= new.matrices_in_one(rows, shapes[in_one[0]][1])
    for name, (count, _) in shapes.items():
        setattr(layer, name, matrices[name])
        setattr(layer, f"{name}_bias", new.vector(count) if biases.get(name) else None)
