"""The kernels of a step that is computed layer by layer, chosen as `bind_network` and `PagedAttention` choose them.

Nothing is bound and no device accessed, so that a plan can show them for an absent processor.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kernels import Phase, select
from kernels.linear.projection import LinearWeights, Operations, Purpose, linear_problem
from kernels.linear.select import select_linear
from kernels.linear.tuned import tuned_linear
from kernels.linear.weights import PRODUCT_ONLY
from kernels.norms import registry as norms
from kernels.rope import registry as rope
from kernels.selection import VectorProblem, select_vector
from kernels.weight_format import unquantized
from kernels.weights import Weight
from model.executors.layers.attention_plans import attention_planner
from model.executors.layers.binder import projections
from model.executors.layers.tables import MIXERS
from model.network.layers import DecoderLayer
from model.network.parallel import head_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels import GPUArch, Selection
    from kernels.linear.select import LinearChoice
    from kernels.recurrent.registry import RecurrentSpec
    from kernels.selection import Choice, VectorSpec
    from model.executors.columns import Bucket
    from model.network.parameters import DecoderParameters

_META: Final = torch.device("meta")
AnyChoice: TypeAlias = "Choice[VectorSpec] | Choice[RecurrentSpec] | LinearChoice | Selection"
"""The row of any registry for an operation, and the reasons."""


def attention_kernels(
    model: DecoderParameters,
    bucket: Bucket,
    arch: GPUArch,
    block_size: int,
    kv_dtype: str | None = None,
) -> Iterator[tuple[str, AnyChoice]]:
    """Yield the operations of attention alone; arguments and errors as for `layer_kernels`."""
    vectors = VectorProblem(model.dtype_name)
    yield "rotation and cache write", select_vector(rope.REGISTRY, vectors, arch)
    for problem in attention_planner(model).problems(
        block_size, kv_dtype, deterministic=bucket.deterministic, queries=bucket.queries
    ):
        if bucket.rows if problem.phase is Phase.DECODE else bucket.prompt_seqs:
            window = f", window {problem.sliding_window}" if problem.sliding_window else ""
            yield f"{problem.phase.value} attention{window}", select(problem, arch)


def _recurrent_kernels(model: DecoderParameters, arch: GPUArch) -> Iterator[tuple[str, AnyChoice]]:
    """Yield what recurrent mixers compute between their products."""
    for mixer, count in Counter(
        mixer for it in model.network.layers for mixer in it.mixers
    ).items():
        if (choice := MIXERS[type(mixer)].choice) is not None:
            yield f"{type(mixer).__name__} of {count} layers", choice(mixer, model.dtype_name, arch)


def layer_kernels(
    model: DecoderParameters,
    bucket: Bucket,
    arch: GPUArch,
    block_size: int,
    kv_dtype: str | None = None,
) -> Iterator[tuple[str, AnyChoice]]:
    """Yield the operations of a step, and the kernel of each.

    Args:
        model: on any device; its weights are not read.
        bucket: of the step.
        arch: the processor; it need not be present.
        block_size: tokens in a block of the KV cache.
        kv_dtype: dtype of a quantized KV cache; None if the cache has the model's dtype.

    Raises:
        NoKernelError: no kernel supports an operation; lists every reason.
    """
    network, dtype = model.network, model.dtype
    vectors = VectorProblem(model.dtype_name)
    yield "norms and activations", select_vector(norms.REGISTRY, vectors, arch)
    yield from attention_kernels(model, bucket, arch, block_size, kv_dtype)
    yield from _recurrent_kernels(model, arch)
    purpose = Purpose.DETERMINISTIC_SERVING if bucket.deterministic else Purpose.SERVING

    def choose(
        weights: LinearWeights,
        operations: Operations,
        rows: int,
        layer_weights: int,
        *,
        in_place: bool = False,
    ) -> LinearChoice:
        problem = linear_problem(
            weights,
            operations,
            dtype,
            layer_weights=layer_weights,
            purpose=purpose,
            rounds_inputs=model.rounds_inputs,
            in_place=in_place,
        )
        return select_linear(dataclasses.replace(problem, rows=rows), arch, tuned_linear)

    kinds: Counter[tuple[tuple[str, LinearChoice], ...]] = Counter()
    stored = ((it.spec, tuple(it.formats.items())) for it in model.decoder_layers)
    for (layer, formats), count in Counter(stored).items():
        parameters = DecoderLayer(layer, network.hidden, dtype, _META, dict(formats))
        products = projections(parameters, model.communicator)
        size = sum(math.prod(weights.weight.shape) for weights, _ in products.values())
        choices = ((name, choose(*it, bucket.tokens, size)) for name, it in products.items())
        kinds[tuple(choices)] += count
    for kind, count in kinds.items():
        where = f" of {count} layers" if len(kinds) > 1 else ""
        yield from ((f"{name} product{where}", choice) for name, choice in kind)
    shape = (head_rows(network.vocab, model.num_ranks), network.hidden)
    bias = torch.empty(shape[0], dtype=dtype, device=_META) if network.head_bias else None
    form = model.head_format
    head = LinearWeights(Weight.empty(form or unquantized(dtype), shape, _META), bias)
    in_place = form is not None
    yield "head product", choose(head, PRODUCT_ONLY, bucket.num_logits, 0, in_place=in_place)
