"""Tensor parallelism: each rank has some heads, some columns of the MLP and some rows of the output head.

    qkv, gate_up, input, gates  rows of this rank's heads and of its part of the MLP  no communication
    output, down, mixed         the columns that belong to them                       partial sums, added over all ranks
    head                        1/N of the vocabulary                                 logits, gathered from all ranks

Every rank has the whole embedding and residual stream, and computes the same tokens. A rank's part of a recurrent mixer
is that of its heads or channels, with their convolution and states. Groups of Mamba-2 that are fewer than the ranks are
on several of them; a norm of such a group needs the sum of squares of all ranks that have it. This module
imports neither PyTorch nor kernels, because plans and sizes do without them; `model.network.matrix` divides tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from model.network.mixers import GatedDelta, Mamba2, Parallel, ShortConv
from model.network.spec import Attention, Dense

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from model.network.spec import Layer, Network


class Division(NamedTuple):
    """How ranks divide a kind of mixer or MLP.

    Attributes:
        shard: returns what one of a number of ranks computes, for which `unsupported` must be empty.
        unsupported: lists why a number of ranks cannot divide it.
        sections: the rows that are divided by themselves, by the name of the parameter that has them, where they are
            not those of the projections that it stacks.
    """

    shard: Callable[[Any, int], Any]
    unsupported: Callable[[Any, int], tuple[str, ...]]
    sections: Callable[[Any], Mapping[str, tuple[int, ...]]] = lambda _part: {}


def _indivisible(count: int, what: str, size: int) -> tuple[str, ...]:
    return (f"{size} is no divisor of its {count} {what}",) if count % size else ()


def _shard_attention(mixer: Attention, size: int) -> Attention:
    heads, kv_heads = mixer.num_heads // size, mixer.num_kv_heads // size
    return dataclasses.replace(mixer, num_heads=heads, num_kv_heads=kv_heads)


def _undivided_attention(mixer: Attention, size: int) -> tuple[str, ...]:
    joint = ("its norms of queries and keys are of all heads",) * mixer.joint_qk_norm
    return (*_indivisible(mixer.num_kv_heads, "key-value heads", size), *joint)


def _sections_of_short_conv(mixer: ShortConv) -> dict[str, tuple[int, ...]]:
    return {"input": (mixer.channels,) * 3}


def _shard_gated_delta(mixer: GatedDelta, size: int) -> GatedDelta:
    heads, key_heads = mixer.num_heads // size, mixer.num_key_heads // size
    return dataclasses.replace(mixer, num_heads=heads, num_key_heads=key_heads)


def _sections_of_gated_delta(mixer: GatedDelta) -> dict[str, tuple[int, ...]]:
    keys = mixer.num_key_heads * mixer.key_dim
    convolved = keys, keys, mixer.inner
    return {"input": (*convolved, mixer.inner), "conv": convolved}


def _shard_mamba2(mixer: Mamba2, size: int) -> Mamba2:
    heads, groups = mixer.num_heads // size, max(1, mixer.num_groups // size)
    norm_ranks = 1 if mixer.eps is None else max(1, size // mixer.num_groups)
    return dataclasses.replace(mixer, num_heads=heads, num_groups=groups, norm_ranks=norm_ranks)


def _undivided_mamba2(mixer: Mamba2, size: int) -> tuple[str, ...]:
    groups, found = mixer.num_groups, _indivisible(mixer.num_heads, "heads of Mamba-2", size)
    if groups % size and size % groups:
        found += (f"{size} is neither a divisor nor a multiple of its {groups} groups of Mamba-2",)
    elif size > groups and mixer.norm_before_gate and mixer.eps is not None:
        found += (
            f"{size} ranks would divide the norm of Mamba-2 before its gate, which is of {groups} groups: at most "
            f"{groups} ranks",
        )
    return found


def _sections_of_mamba2(mixer: Mamba2) -> dict[str, tuple[int, ...]]:
    of_groups = mixer.num_groups * mixer.state_dim
    return {"conv": (mixer.inner, of_groups, of_groups)}


def _sections_of_both(mixer: Parallel) -> dict[str, tuple[int, ...]]:
    found = (DIVISIONS[type(it)].sections(it).items() for it in mixer.mixers)
    return dict(itertools.chain.from_iterable(found))


DIVISIONS: Final[dict[type, Division]] = {
    Attention: Division(_shard_attention, _undivided_attention),
    ShortConv: Division(
        lambda it, size: dataclasses.replace(it, channels=it.channels // size),
        lambda it, size: _indivisible(it.channels, "channels of a short convolution", size),
        _sections_of_short_conv,
    ),
    GatedDelta: Division(
        _shard_gated_delta,
        lambda it, size: _indivisible(it.num_key_heads, "key heads of the gated delta rule", size),
        _sections_of_gated_delta,
    ),
    Mamba2: Division(_shard_mamba2, _undivided_mamba2, _sections_of_mamba2),
    Parallel: Division(
        lambda it, size: Parallel((_shard(it.mixers[0], size), _shard(it.mixers[1], size))),
        lambda it, size: tuple(
            itertools.chain.from_iterable(_undivided(mixer, size) for mixer in it.mixers)
        ),
        _sections_of_both,
    ),
    Dense: Division(
        lambda it, size: dataclasses.replace(it, inner=it.inner // size),
        lambda it, size: _indivisible(it.inner, "columns of the MLP", size),
    ),
}
"""The mixers and MLPs that ranks divide."""


def _shard(part: Any, size: int) -> Any:  # noqa: ANN401 - a mixer or an MLP
    return DIVISIONS[type(part)].shard(part, size)


def _undivided(part: Any, size: int) -> tuple[str, ...]:  # noqa: ANN401 - a mixer or an MLP
    division = DIVISIONS.get(type(part))
    if division is None:
        return (f"no tensor parallelism of {type(part).__name__}",)
    return division.unsupported(part, size)


def parallel_unsupported(network: Network, size: int) -> tuple[str, ...]:
    """List why `size` ranks cannot share a network; empty if they can."""
    if size == 1:
        return ()
    others = {
        "per-layer inputs": network.per_layer,
        "several residual streams": network.streams,
    }
    if found := [name for name, part in others.items() if part is not None]:
        return tuple(f"no tensor parallelism of {name}" for name in found)
    parts = dict.fromkeys(part for it in network.layers for part in (it.mixer, it.mlp))
    reasons = (_undivided(part, size) for part in parts)
    return tuple(dict.fromkeys(itertools.chain.from_iterable(reasons)))


def shard_network(network: Network, size: int) -> Network:
    """Return what the layers of one of `size` ranks compute; `parallel_unsupported` must be empty."""
    if size == 1:
        return network
    layers = (
        dataclasses.replace(it, mixer=_shard(it.mixer, size), mlp=_shard(it.mlp, size))
        for it in network.layers
    )
    return dataclasses.replace(network, layers=tuple(layers))


class Section(NamedTuple):
    """Rows of a parameter that ranks divide by themselves.

    Attributes:
        rows: in a rank's part.
        whole: of all ranks together.
        num_ranks: that follow each other and have the same ones: 1, or more where there are fewer parts than ranks.
    """

    rows: int
    whole: int
    num_ranks: int


def sections(layer: Layer, whole: Layer, size: int, parameter: str) -> tuple[Section, ...]:
    """Return how the rows of a parameter of a layer are divided; empty for one that is divided by its shape alone.

    Args:
        layer: of one of `size` ranks.
        whole: the layer of all ranks together.
        size: number of ranks.
        parameter: its name in the layer.
    """
    parts, wholes = (_sections(it, parameter) for it in (layer, whole))
    return tuple(
        Section(rows, count, size * rows // count)
        for rows, count in zip(parts, wholes, strict=True)
    )


def _sections(layer: Layer, parameter: str) -> tuple[int, ...]:
    name = parameter.removesuffix(".numbers").removesuffix("_bias")
    found: dict[str, tuple[int, ...]] = {}
    for part in (layer.mixer, layer.mlp):
        found |= {it: rows for it, (rows, _) in part.matrices(0).items() if len(rows) > 1}
        if (division := DIVISIONS.get(type(part))) is not None:
            found |= division.sections(part)
    return found.get(name, ())


def head_rows(vocab_size: int, size: int) -> int:
    """Return the rows of the output head that each of `size` ranks has."""
    return -(-vocab_size // size)
