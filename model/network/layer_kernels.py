"""The kernels of a step that is computed layer by layer, chosen as `bind_network` and `PagedAttention` choose them.

Nothing is bound and no device accessed, so that a plan can show them for an absent processor.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from kernels import Phase, select
from kernels.linear.projection import LinearWeights, Norm, Operations, Purpose, linear_problem
from kernels.linear.select import select_linear
from kernels.linear.tuned import tuned_linear
from kernels.linear.weights import PRODUCT_ONLY
from kernels.norms import registry as norms
from kernels.rope import registry as rope
from kernels.selection import VectorProblem, select_vector
from model.network.layers import DecoderLayer
from model.network.parallel import head_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels import GPUArch, Selection
    from kernels.linear.select import LinearChoice
    from kernels.selection import Choice, VectorSpec
    from model.network.decoder import DecoderLM
    from model.network.step import Bucket

_META: Final = torch.device("meta")


class OperationChoice(NamedTuple):
    """The kernel chosen for an operation of a step.

    Attributes:
        operation: in words.
        choice: the row of a registry, and the reasons.
        includes: neighbouring operations that the row's launch computes too.
    """

    operation: str
    choice: Choice[VectorSpec] | LinearChoice | Selection
    includes: tuple[str, ...] = ()


def layer_kernels(
    model: DecoderLM, bucket: Bucket, arch: GPUArch, block_size: int, kv_dtype: str | None = None
) -> Iterator[OperationChoice]:
    """Yield the kernels of a step in the order in which a layer needs them; those of the head come last.

    Args:
        model: on any device; its weights are not read.
        bucket: of the step.
        arch: the processor; it need not be present.
        block_size: tokens in a block of the KV cache.
        kv_dtype: dtype of a quantized KV cache; None if the cache has the model's dtype.

    Raises:
        NoKernelError: no kernel supports an operation; lists every reason.
    """
    vectors = VectorProblem(str(model.embed_tokens.dtype).removeprefix("torch."))
    products = _products(model, bucket, arch)
    yield OperationChoice("norms", select_vector(norms.REGISTRY, vectors, arch))
    yield products["qkv"]
    yield OperationChoice("rotation, cache write", select_vector(rope.REGISTRY, vectors, arch))
    problems = model.attention.problems(block_size, kv_dtype, deterministic=bucket.deterministic)
    for problem in problems:
        if bucket.rows if problem.phase is Phase.DECODE else bucket.prompt_seqs:
            window = problem.sliding_window
            name = f"{problem.phase.value} attention" + (f", window {window}" if window else "")
            yield OperationChoice(name, select(problem, arch))
    for name in ("output", "gate_up", "down", "head"):
        yield products[name]


def _products(model: DecoderLM, bucket: Bucket, arch: GPUArch) -> dict[str, OperationChoice]:
    dtype = model.embed_tokens.dtype
    layer = DecoderLayer(model.config, dtype, _META, model.weight_dtype)
    purpose = Purpose.DETERMINISTIC_SERVING if bucket.deterministic else Purpose.SERVING
    projections = layer.projections(model.communicator)
    size = sum(weights.weight.numel() for weights, _ in projections.values())

    def choose(
        weights: LinearWeights, operations: Operations, rows: int, layer_weights: int
    ) -> LinearChoice:
        problem = linear_problem(
            weights, dtype, operations, layer_weights=layer_weights, purpose=purpose
        )
        return select_linear(dataclasses.replace(problem, rows=rows), arch, tuned_linear)

    tokens = bucket.rows + bucket.prompt_tokens
    choices = {name: choose(*it, tokens, size) for name, it in projections.items()}

    def included(name: str, before: str, operations: Operations) -> Iterator[str]:
        spec, problem = choices[name].spec, choices[name].problem
        # A norm that adds partial sums to the residual stream has a launch of its own.
        summed = projections[before][1].post_norm or choices[before].spec.leaves_partials
        reads_sums = summed or model.communicator is not None
        if spec.absorbs_norm and isinstance(operations.norm, Norm) and not reads_sums:
            yield "norm"
        if spec.absorbs_gate and problem.gated:
            yield "activation"
        if spec.absorbs_residual and problem.residual:
            yield "residual"

    before = dict(zip(projections, ("down", "qkv", "output", "gate_up"), strict=True))
    found = {
        name: OperationChoice(
            f"{name} product", choices[name], tuple(included(name, before[name], operations))
        )
        for name, (_, operations) in projections.items()
    }
    vocab = head_rows(model.config.vocab_size, model.num_ranks)
    weights = LinearWeights(torch.empty(vocab, model.config.hidden_size, dtype=dtype, device=_META))
    head = choose(weights, PRODUCT_ONLY, bucket.num_logits, 0)
    return found | {"head": OperationChoice("head product", head)}
