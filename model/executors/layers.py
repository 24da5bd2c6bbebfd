"""A model's parameters, bound to the kernels that compute its forward pass."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from kernels.gpu.dependent_launch import may_depend
from kernels.linear.projection import LinearWeights, Purpose, Residual, bind_norm, bind_projection
from kernels.rope import registry as rope
from kernels.selection import VectorProblem, select_vector
from kernels.weights import Weight
from model.executors.attention_plans import attention_problems, same_problem
from model.executors.head import Head, SoftcappedHead
from model.network.parallel import GatheredHead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
    from kernels.linear.projection import LayerNorm, Norm
    from kernels.selection import VectorSpec
    from model.network.layers import BoundLayer, DecoderLayer
    from model.network.spec import Network

_logger = logging.getLogger(__name__)


class BoundNetwork(NamedTuple):
    """The kernels of a model.

    Attributes:
        layers: the layers in order.
        norm: the final norm.
        head: the projection to the vocabulary.
        rotation: the row of `kernels.rope.registry` that the layers take.
        pdl: whether its kernel may start before the previous one ends (programmatic dependent launch).
    """

    layers: list[BoundLayer]
    norm: Callable[[Residual], Tensor]
    head: Head
    rotation: VectorSpec
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
    trainable = purpose is Purpose.TRAINING
    vectors = VectorProblem(str(dtype).removeprefix("torch."), trainable)
    rotation, _, refusals = select_vector(rope.REGISTRY, vectors, arch)
    if refusals and not (trainable or arch.is_cpu):
        reason = refusals[0].reasons[0]
        _logger.warning("PyTorch computes the layers, which is slower: %s", reason)
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
        norm=bind_norm(norm, vectors, arch),
        head=bound_head,
        rotation=rotation,
        pdl=rotation is rope.TRITON and may_depend(arch, head.device),
    )
