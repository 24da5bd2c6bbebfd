"""The kernels of a step that is computed layer by layer, chosen as `bind_network` and `PagedAttention` choose them.

Nothing is bound and no device accessed, so that a plan can show them for an absent processor.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

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
_BEFORE: Final = {"qkv": "down", "gate_up": "output"}
"""The product before each one that reads the residual stream."""


_Product: TypeAlias = tuple[LinearWeights, Operations]


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
    """Yield the kernels of a step.

    Args:
        model: on any device; its weights are not read.
        bucket: of the step.
        arch: the processor; it need not be present.
        block_size: tokens in a block of the KV cache.
        kv_dtype: dtype of a quantized KV cache; None if the cache has the model's dtype.

    Raises:
        NoKernelError: no kernel supports an operation; lists every reason.
    """
    network, dtype = model.network, model.embed_tokens.dtype
    vectors = VectorProblem(str(dtype).removeprefix("torch."))
    yield OperationChoice("norms", select_vector(norms.REGISTRY, vectors, arch))
    yield OperationChoice("rotation, cache write", select_vector(rope.REGISTRY, vectors, arch))
    problems = model.attention.problems(block_size, kv_dtype, deterministic=bucket.deterministic)
    for problem in problems:
        if bucket.rows if problem.phase is Phase.DECODE else bucket.prompt_seqs:
            window = problem.sliding_window
            name = f"{problem.phase.value} attention" + (f", window {window}" if window else "")
            yield OperationChoice(name, select(problem, arch))
    purpose = Purpose.DETERMINISTIC_SERVING if bucket.deterministic else Purpose.SERVING

    def choose(product: _Product, rows: int, layer_weights: int) -> LinearChoice:
        problem = linear_problem(*product, dtype, layer_weights=layer_weights, purpose=purpose)
        return select_linear(dataclasses.replace(problem, rows=rows), arch, tuned_linear)

    kinds: Counter[tuple[OperationChoice, ...]] = Counter()
    for layer, count in Counter(network.layers).items():
        parameters = DecoderLayer(layer, network.hidden, dtype, _META, model.weight_dtype)
        products = parameters.projections(model.communicator)
        size = sum(weights.weight.numel() for weights, _ in products.values())
        tokens = bucket.rows + bucket.prompt_tokens
        choices = {name: choose(product, tokens, size) for name, product in products.items()}
        kinds[tuple(_included(products, choices, in_parts=model.communicator is not None))] += count
    for operations, count in kinds.items():
        where = f" of {count} layers" if len(kinds) > 1 else ""
        yield from (it._replace(operation=f"{it.operation}{where}") for it in operations)
    shape = (head_rows(network.vocab, model.num_ranks), network.hidden)
    head = LinearWeights(torch.empty(shape, dtype=dtype, device=_META))
    yield OperationChoice("head product", choose((head, PRODUCT_ONLY), bucket.num_logits, 0))


def _included(
    products: dict[str, _Product], choices: dict[str, LinearChoice], *, in_parts: bool
) -> Iterator[OperationChoice]:
    """Yield the choices of a layer's products with the operations that their launches include.

    Args:
        products: of a layer.
        choices: for each product.
        in_parts: whether ranks share the model, whose sums are left to the next norm.
    """
    for name, (_, operations) in products.items():
        spec, problem = choices[name].spec, choices[name].problem
        before = _BEFORE.get(name)
        # A norm that adds partial sums to the residual stream has a launch of its own.
        sums = (
            before is None or products[before][1].post_norm or choices[before].spec.leaves_partials
        )
        included = (
            (
                "norm",
                spec.absorbs_norm and isinstance(operations.norm, Norm) and not (sums or in_parts),
            ),
            ("activation", spec.absorbs_gate and problem.gated),
            ("residual", spec.absorbs_residual and problem.residual),
        )
        yield OperationChoice(
            f"{name} product", choices[name], tuple(part for part, has in included if has)
        )
