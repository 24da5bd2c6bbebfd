"""Binds a model to the kernels that compute its layers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kernels.gpu.dependent_launch import may_depend
from kernels.linear.projection import (
    FusedProjection,
    LinearWeights,
    Purpose,
    bind_norm,
    bind_projection,
)
from kernels.rope import registry as rope
from kernels.selection import VectorProblem, select_vector
from model.executors.head import Head, SoftcappedHead
from model.executors.layers.altup import BoundStreams
from model.executors.layers.binder import Binder, make_norm
from model.executors.layers.forward import BoundLayer
from model.executors.layers.network import BoundNetwork
from model.executors.layers.per_layer import BoundTable
from model.executors.layers.tables import MIXERS, MLPS, OTHERS
from model.executors.parallel import GatheredHead
from model.network.attention_problems import attention_problems

if TYPE_CHECKING:
    from model.network.parameters import DecoderParameters

_logger = logging.getLogger(__name__)


def bind_network(model: DecoderParameters, purpose: Purpose) -> BoundNetwork:
    """Bind a model's parameters. In-place changes to them take effect; replacing them does not.

    Matrices of which a product has a copy are dropped, layer by layer, so that memory does not hold all of them twice.
    """
    network, arch, dtype = model.network, model.arch, model.dtype
    trainable = purpose is Purpose.TRAINING
    vectors = VectorProblem(model.dtype_name, trainable)
    rotation, _, refusals = select_vector(rope.REGISTRY, vectors, arch)
    if refusals and not (trainable or arch.is_cpu):
        reason = refusals[0].reasons[0]
        _logger.warning("PyTorch computes the layers, which is slower: %s", reason)
    head = LinearWeights(model.head, model.lm_head_bias)
    bound_head: Head = bind_projection(
        head,
        dtype,
        arch,
        purpose=purpose,
        rounds_inputs=model.rounds_inputs,
        in_place=model.head_format is not None,
    )
    if bound_head.copies_weights:
        model.lm_head = None
    if isinstance(bound_head, FusedProjection) and network.tied and model.communicator is None:
        model.drop_embedding(bound_head.product.rows)
    if model.communicator is not None:
        bound_head = GatheredHead(bound_head, network.vocab, model.communicator)
    if network.logit_softcap is not None:
        bound_head = SoftcappedHead(bound_head, network.logit_softcap)
    layers, kinds = [], {}
    for parameters in model.decoder_layers:
        layer, binder = parameters.spec, Binder(parameters, model, purpose)
        row = MIXERS[type(layer.mixer)]
        mixer = row.bind(layer.mixer, binder)
        kinds[type(mixer)] = row
        mlp = MLPS[type(layer.mlp)].bind(layer.mlp, binder)
        others = {
            name: kind.bind(getattr(layer, name), binder)
            for name, kind in OTHERS.items()
            if getattr(layer, name) is not None
        }
        bound = BoundLayer(
            mixer, mlp, binder.bound, layer.parallel, binder.included, scale=parameters.scale
        )
        layers.append(bound._replace(**others))
        binder.drop_copied()
    return BoundNetwork(
        layers=layers,
        kinds=kinds,
        attentions=attention_problems(network),
        norm=bind_norm(make_norm(model.norm, model.norm_bias, network.norm), vectors, arch),
        head=bound_head,
        rotation=rotation,
        pdl=rotation is rope.TRITON and may_depend(arch, model.device),
        table=None
        if network.per_layer is None
        else BoundTable.bind(network.per_layer, model, purpose),
        streams=None if network.streams is None else BoundStreams.bind(model),
    )
