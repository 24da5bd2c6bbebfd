"""Executors name what they do not compute of a network, whoever added it."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.weight_format import unquantized
from model.executors import cpu_library, single_launch, support
from model.executors.columns import Bucket
from model.executors.executor import ModelProblem
from model.executors.layers import executor, tables
from model.network.spec import (
    Attention,
    Dense,
    Layer,
    Modules,
    Network,
    Norm,
    Positions,
    QueryScale,
    Rotary,
)
from model.network.sublayers import AltUp, Laurel, PerLayerInput, PerLayerTable, Streams

OTHERS = {
    Network: {
        "embedding_factor": 2.0,
        "positions": Positions(8),
        "logit_softcap": 3.0,
        "tied": True,
        "head_bias": True,
        "modules": Modules("olmo"),
        "per_layer": PerLayerTable(8, 4, 1e-6),
        "streams": Streams(2),
    },
    Layer: {
        "post_norms": True,
        "pre_norms": False,
        "parallel": True,
        "shared_norm": True,
        "per_layer": PerLayerInput(4),
        "scaled": True,
        "laurel": Laurel(4),
        "altup": AltUp(2),
    },
    Norm: {"eps": 1e-5, "kind": "layer", "float32": True, "bias": False},
    Attention: {
        "window": 3,
        "rotary": None,
        "qk_norm": Norm(1e-5),
        "joint_qk_norm": True,
        "qk_norm_by_head": True,
        "softcap": 2.0,
        "bias": True,
        "output_bias": True,
        "late_qk_norm": True,
        "query_scale": QueryScale(0.1, 8),
        "gate": True,
        "value_norm": True,
        "tied_values": True,
        "kv_layer": 0,
    },
    Dense: {"activation": "relu", "gated": False, "bias": True, "sparsity": 0.5},
}
"""A value of each field that has a default, other than that; a norm that is always there is read by its own fields."""
FIELDS = [(part, name) for part, fields in OTHERS.items() for name in fields]
OPTIONAL = (
    Rotary, Positions, QueryScale, Modules, PerLayerTable, PerLayerInput, Laurel, AltUp, Streams,
)  # fmt: skip
EVERY_PART = {part: {} for part in (*OTHERS, *OPTIONAL)}
EXECUTORS = {
    "a launch": (single_launch.READS, single_launch.VARYING),
    "a launch of several": (single_launch.READS_OF_ROWS, single_launch.VARYING_OF_ROWS),
    "C library": (cpu_library.READS, cpu_library.VARYING),
    "layers": (
        {
            **tables.READS,
            Attention: tables.MIXERS[Attention].reads,
            Dense: tables.MLPS[Dense].reads,
        },
        (),
    ),
}


def network(part=None, name=None):
    """Return a network of two layers, with another value of one field."""

    def made(kind, *arguments):
        return kind(*arguments, **({name: OTHERS[part][name]} if kind is part else {}))

    layer = made(Layer, made(Attention, 2, 1, 16, 0.25), made(Dense, 32))
    if part is Norm:
        layer = dataclasses.replace(layer, norm=made(Norm))
    return made(Network, 8, 32, (layer, layer))


def test_each_field_with_a_default_has_another_value_here():
    for part, fields in OTHERS.items():
        defaults = {it.name: it.default for it in dataclasses.fields(part)}
        assert {
            name
            for name, default in defaults.items()
            if default is not dataclasses.MISSING and default != Norm()
        } == set(fields)


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_an_executor_that_does_not_list_a_field_refuses_another_value_and_names_it(part, name):
    reasons = support.unsupported(network(part, name), EVERY_PART, ())

    assert len(reasons) == 1
    assert reasons[0].startswith("no ")
    assert support.unsupported(network(), EVERY_PART, ()) == ()


@pytest.mark.parametrize(("part", "name"), FIELDS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_executor_refuses_exactly_what_it_does_not_list(executor, part, name):
    reads, varying = EXECUTORS[executor]
    values = reads[part].get(name, ())

    refused = support.unsupported(network(part, name), reads, varying)

    assert bool(refused) != (values is support.ALL or OTHERS[part][name] in values)


def test_a_part_that_an_executor_does_not_list_is_refused_by_its_type():
    reads = dict.fromkeys((Network, Layer, Norm, Dense, Rotary), support.ALL)

    assert support.unsupported(network(), reads, ()) == ("no Attention",)


def test_fields_that_differ_among_layers_are_refused_unless_they_may():
    whole = network()
    first, second = whole.layers
    windowed = dataclasses.replace(second, mixer=dataclasses.replace(second.mixer, window=3))
    reads = EVERY_PART | {Attention: {"window": support.ALL}}
    mixed = dataclasses.replace(whole, layers=(first, windowed))

    assert support.unsupported(mixed, reads, ()) == ("no other sliding window for some layers",)
    assert support.unsupported(mixed, reads, [(Attention, "window")]) == ()


def test_the_layers_refuse_a_field_that_their_tables_do_not_list(monkeypatch):
    reads = dict(tables.MIXERS[Attention].reads)
    del reads["softcap"]
    row = tables.MIXERS[Attention]._replace(reads=reads)
    problem = ModelProblem(
        network(Attention, "softcap"), "float32", unquantized(torch.float32), CATALOGUE["cpu"]
    )
    bucket = Bucket(rows=1, columns=1, num_logits=1)
    assert executor.LAYERS.unsupported(problem, bucket) == ()

    monkeypatch.setitem(tables.MIXERS, Attention, row)

    assert executor.LAYERS.unsupported(problem, bucket) == ("no softcap of attention scores",)


@pytest.mark.parametrize(
    ("mixer", "post_norms", "reason"),
    [
        ({"qk_norm": Norm(kind="layer")}, False, "no layer norms of queries and keys"),
        ({}, True, "no layer norms after attention and MLP"),
    ],
)
def test_the_layers_refuse_layer_norms_where_they_compute_others(mixer, post_norms, reason):
    layer = Layer(
        Attention(2, 1, 16, 0.25, **mixer), Dense(32), Norm(kind="layer"), post_norms=post_norms
    )
    problem = ModelProblem(
        Network(8, 32, (layer,)), "float32", unquantized(torch.float32), CATALOGUE["cpu"]
    )

    bucket = Bucket(rows=1, columns=1, num_logits=1)
    assert executor.LAYERS.unsupported(problem, bucket) == (reason,)
