"""A model's parameters, bound to the kernels that compute its forward pass."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from kernels.gpu.dependent_launch import may_depend
from kernels.linear.projection import LinearWeights, Purpose, Residual, bind_norm, bind_projection
from kernels.rope.cache import unsupported as rope_unsupported
from kernels.weights import Weight
from model.network.attention_plans import attention_problems, same_problem
from model.network.head import Head, SoftcappedHead
from model.network.parallel import GatheredHead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
    from kernels.linear.projection import LayerNorm, Norm
    from model.network.layers import BoundLayer, DecoderLayer
    from model.network.spec import Network

_logger = logging.getLogger(__name__)


class BoundNetwork(NamedTuple):
    """The kernels of a model.

    Attributes:
        layers: the layers in order.
        norm: the final norm.
        head: the projection to the vocabulary.
        fused: whether Triton kernels compute the operations between the projections; PyTorch does otherwise.
        pdl: whether these kernels may start before the previous one ends (programmatic dependent launch).
    """

    layers: list[BoundLayer]
    norm: Callable[[Residual], Tensor]
    head: Head
    fused: bool
    pdl: bool

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows for which projection kernels are compiled; empty if PyTorch computes the projections."""
        first = self.layers[0]
        projections = (first.qkv, first.output, first.gate_up, first.down, self.head)
        return tuple(sorted({rows for it in projections for rows in it.row_counts}))


def bind_network(
    network: Network,
    layers: Sequence[DecoderLayer],
    norm: Norm | LayerNorm,
    head: Tensor,
    arch: GPUArch,
    purpose: Purpose,
    communicator: Communicator | None = None,
) -> BoundNetwork:
    """Bind a model's parameters. In-place changes to them take effect; replacing them does not.

    Args:
        network: what this rank computes.
        layers: the layers in order.
        norm: the final norm.
        head: [V, C], in the dtype of the activations; with a communicator this rank's rows.
        arch: architecture of the parameters' device.
        purpose: what the model is for; matrices may be copied unless it is training.
        communicator: of the ranks that share the model; None for one that is whole.
    """
    dtype = head.dtype
    reasons = rope_unsupported(str(dtype).removeprefix("torch."), arch)
    fused = purpose is not Purpose.TRAINING and not reasons
    if purpose is not Purpose.TRAINING and reasons and not arch.is_cpu:
        _logger.warning("PyTorch computes the layers, which is slower: %s", reasons[0])
    bound_head: Head = bind_projection(
        LinearWeights(Weight.full(head)), dtype, arch, purpose=purpose
    )
    if communicator is not None:
        bound_head = GatheredHead(bound_head, network.vocab, communicator)
    if network.logit_softcap is not None:
        bound_head = SoftcappedHead(bound_head, network.logit_softcap)
    problems, rotaries = attention_problems(network), network.rotaries

    def bind(layer: DecoderLayer) -> BoundLayer:
        mixer = layer.spec.mixer
        problem = problems.index(same_problem(mixer))
        rotary = rotaries.index((mixer.rotary, mixer.head_dim))
        return layer.bind(arch, dtype, purpose, communicator, problem, rotary)

    return BoundNetwork(
        layers=[bind(layer) for layer in layers],
        norm=bind_norm(norm, arch, fused=fused),
        head=bound_head,
        fused=fused,
        pdl=fused and may_depend(arch, head.device),
    )
