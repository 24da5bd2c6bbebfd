"""Steps of a model with 8-bit or 4-bit weights on a CPU, which the C library computes in one call each."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

import torch

from kernels.cpu.decoder import CPUDecoder, DecoderShape, LayerMatrices, StepTensors
from kernels.cpu.decoder import unsupported as shape_unsupported
from kernels.cpu.library import instructions, load
from kernels.cpu.matrix import PackedMatrix
from kernels.weight_format import INT8_GROUPS, LIBRARY_FORMATS, is_read_by_library
from kernels.weights import Weight
from model.device.memory import drop_pages
from model.device.quantizations import quantization_name
from model.errors import WeightsError
from model.executors import support
from model.executors.columns import ADAPTER, Want
from model.executors.executor import ExecutorOfState, ExecutorSpec
from model.executors.scores import prompt_scores
from model.executors.step import StepOutput, token_slots
from model.network import spec
from model.network.parameters import EMBEDDING, HEAD, TABLES
from model.network.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels.weight_format import WeightFormat
    from model.device.kv_cache import KVCache
    from model.executors.columns import Bucket
    from model.executors.executor import Bindings, ModelProblem
    from model.executors.step import StepInput
    from model.network.adapter_slots import AdapterSlots
    from model.network.layers import DecoderLayer
    from model.network.parameters import DecoderParameters

_logger = logging.getLogger(__name__)

CACHE_DTYPE: Final = "float16"
"""Of the KV cache, PyTorch's name."""
READS: Final[support.Reads] = {
    spec.Network: {"tied": support.ALL},
    spec.Layer: {},
    spec.Norm: {"eps": support.ALL, "float32": support.ALL},
    spec.Attention: dict.fromkeys(
        ("window", "rotary", "qk_norm", "bias", "output_bias"), support.ALL
    ),
    spec.Rotary: support.ALL,
    spec.Dense: {"bias": support.ALL},
}
VARYING: Final = ((spec.Attention, "window"),)


def unsupported(
    network: spec.Network, *, fp8_cache: bool = False, num_ranks: int = 1
) -> tuple[str, ...]:
    """List why the C library cannot serve a model on this processor; empty if it can.

    Args:
        network: of the model.
        fp8_cache: whether the KV cache is to be in FP8.
        num_ranks: that share the model.
    """
    settings = (
        (fp8_cache, "the KV cache is in FP8: set --kv-cache-dtype auto"),
        (num_ranks > 1, f"{num_ranks} ranks share the model: set --tensor-parallel 1"),
    )
    return (
        *(reason for fails, reason in settings if fails),
        *(shape_unsupported(_shape(network)) if support.is_attention_and_dense(network) else ()),
        *support.unsupported(network, READS, VARYING),
        *support.different_norms(network, "eps"),
    )


class CPULibrary:
    """Computes the steps of a model whose matrices it has packed.

    Args:
        model: `unsupported` must be empty for its network. Its matrices are dropped one layer after the other.
        quantization: of the layers' matrices. One of `LIBRARY_FORMATS` rounds those that have other numbers or more
            bits; any other is that of the checkpoint, and what the library does not read is rounded to 8 bits. So are
            embedding and head with each.
        threads: that compute a step.

    Raises:
        WeightsError: the format cannot hold the values of a matrix.
    """

    def __init__(self, model: DecoderParameters, quantization: WeightFormat, threads: int) -> None:
        library = load()
        assert not isinstance(library, str), library
        form = quantization if quantization in LIBRARY_FORMATS else INT8_GROUPS
        rounded: Counter[WeightFormat] = Counter()

        def packed(
            name: str,
            weight: Weight,
            form: WeightFormat,
            bias: Tensor | None = None,
            *,
            gated: bool = False,
            drop: Callable[[Tensor], None] | None = None,
        ) -> PackedMatrix:
            try:
                matrix = PackedMatrix(library, weight, form, bias, gated=gated, drop=drop)
            except ValueError as error:
                raise WeightsError(
                    f"{name} {error}; set --quantization to another format or none"
                ) from None
            if matrix.format != weight.format and (
                weight.format.is_quantized or name not in TABLES
            ):
                rounded[weight.format] += 1
            return matrix

        def pack(layer: DecoderLayer, name: str, *, gated: bool = False) -> PackedMatrix:
            bias, number = getattr(layer, f"{name}_bias"), model.decoder_layers.index(layer)
            matrix = packed(
                f"layers.{number}.{name}", layer.matrices[name], form, bias, gated=gated
            )
            layer.drop_matrix(name)
            return matrix

        network = model.network
        matrices = [
            LayerMatrices(
                pack(layer, "qkv"),
                pack(layer, "output"),
                pack(layer, "gate_up", gated=True),
                pack(layer, "down"),
                _float32(layer.pre_norms[0]),
                _float32(layer.pre_norms[1]),
                None if layer.q_norm is None else _float32(layer.q_norm),
                None if layer.k_norm is None else _float32(layer.k_norm),
            )
            for layer in model.decoder_layers
        ]
        # Last, because the layers' own memory is free by now. Tables are large, so their pages are dropped too.
        packed_head = packed(HEAD, model.head, INT8_GROUPS, drop=drop_pages)
        packed_embedding = packed_head
        if not network.tied:
            packed_embedding = packed(EMBEDDING, model.embedding, INT8_GROUPS, drop=drop_pages)
        if form is not quantization and rounded:
            _logger.warning(
                "matrices that the C library does not read are rounded to %s: %s",
                form.name,
                ", ".join(f"{count} in {it.name}" for it, count in rounded.items()),
            )
        self._decoder = CPUDecoder(
            _shape(network), matrices, _float32(model.norm), packed_head, packed_embedding, threads
        )
        self._rope = RotaryEmbedding(*network.rotaries[0])
        self._max_context = model.max_context
        self._positions_reserved = False

    def reserve_positions(self, num_positions: int) -> None:
        """Allocate the rotary tables; see `DecoderLM.reserve_positions`."""
        self._rope.reserve(num_positions, torch.float32, torch.device("cpu"))
        self._positions_reserved = True

    def bind_adapters(self, slots: AdapterSlots) -> None:
        """Use the slots of adapters, in float32."""
        self._decoder.bind_adapters(slots.layers, slots.ranks)

    def step(
        self, state: KVCache, step: StepInput, sampled: Tensor | None, out: StepOutput | None
    ) -> StepOutput:
        """Compute a step; the results have tokens, but no log-probabilities."""
        assert out is None, "steps on a CPU are not recorded"
        bucket = step.bucket
        tensors = self._tensors(step, state, sampled)
        if bucket.want is Want.PROMPT_SCORES:
            hidden = self._decoder.hidden_states(tensors)
            scores = prompt_scores(step, hidden, self._decoder.project)
            rows = hidden if bucket.has_all_logits else hidden[step.device.logits_rows]
            return StepOutput(self._decoder.project(rows), scores=scores)
        wanted = None if bucket.has_all_logits else step.device.logits_rows
        return StepOutput(*self._decoder.logits(tensors, wanted, bucket.num_logits))

    def _tensors(self, step: StepInput, cache: KVCache, sampled: Tensor | None) -> StepTensors:
        if not self._positions_reserved:
            self._rope.reserve(
                min(self._max_context, cache.num_blocks * cache.block_size),
                torch.float32,
                torch.device("cpu"),
            )
        bucket = step.bucket
        return StepTensors(
            step.device,
            bucket.rows,
            bucket.queries,
            bucket.prompt_seqs,
            bucket.columns,
            sampled,
            cache.layers,
            self._rope.tables,
            token_slots(step) if ADAPTER in bucket.extra_columns else None,
        )


def _unsupported(problem: ModelProblem, bucket: Bucket) -> tuple[str, ...]:
    is_read = problem.arch.is_cpu and is_read_by_library(problem.weight_format)
    if not problem.is_in_library and not is_read:
        return ("weights are not in int8 or int4",)
    others = (name for name in bucket.extra_columns if name != ADAPTER)
    columns = tuple(f"no {name} of sequences" for name in others)
    in_fp8 = problem.kv_dtype is not None
    found = unsupported(problem.network, fp8_cache=in_fp8, num_ranks=problem.num_ranks)
    if not problem.is_in_library:
        return found or ("weights are not packed for whole steps: set --dtype auto",)
    return columns + found


def _bind(bindings: Bindings, state: KVCache, _bucket: Bucket) -> ExecutorOfState:
    assert bindings.cpu_library is not None
    return ExecutorOfState(bindings.cpu_library, state)


def _describe(problem: ModelProblem) -> str:
    form = problem.weight_format
    name = quantization_name(form, *problem.other_formats)
    source = "" if form in LIBRARY_FORMATS else f" from the numbers of the checkpoint in {name}"
    return f"one call of the C library computes a step{source}, with {instructions()}"


CPU_LIBRARY: Final = ExecutorSpec("cpu_library", _unsupported, _bind, _describe)
"""Computes every step of a model whose weights are integers of 8 or 4 bits on a CPU, in one call each."""


def _shape(network: spec.Network) -> DecoderShape:
    first = network.layers[0]
    return DecoderShape(
        hidden=network.hidden,
        inner=first.mlp.inner,
        heads=first.mixer.num_heads,
        kv_heads=first.mixer.num_kv_heads,
        head_dim=first.mixer.head_dim,
        eps=network.norm.eps,
        softmax_scale=first.mixer.scale,
        windows=tuple(layer.mixer.window or 0 for layer in network.layers),
    )


def _float32(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()
