"""Steps of a model with 8-bit or 4-bit weights on a CPU, which the C library computes in one call each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kernels.cpu.decoder import CPUDecoder, DecoderShape, LayerMatrices, StepTensors
from kernels.cpu.decoder import unsupported as shape_unsupported
from kernels.cpu.library import load
from kernels.cpu.matrix import PackedMatrix
from kernels.weights import Weight
from model.executors.step import StepOutput
from model.network import spec
from model.network.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.weight_format import WeightFormat
    from model.device.kv_cache import KVCache
    from model.executors.step import StepInput
    from model.network.layers import DecoderLayer

CACHE_DTYPE: Final = "float16"
"""Of the KV cache, PyTorch's name."""
READS: Final[spec.Reads] = {
    spec.Network: {"tied": spec.ALL},
    spec.Layer: {},
    spec.Norm: {"eps": spec.ALL, "float32": spec.ALL},
    spec.Attention: dict.fromkeys(("window", "rotary", "qk_norm", "bias", "output_bias"), spec.ALL),
    spec.Rotary: spec.ALL,
    spec.Dense: {"bias": spec.ALL},
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
        *(shape_unsupported(_shape(network)) if spec.is_attention_and_dense(network) else ()),
        *spec.unsupported(network, READS, VARYING),
        *spec.different_norms(network, "eps"),
    )


class CPUSteps:
    """Computes the steps of a model; see the methods of the same names of `DecoderLM`.

    Args:
        network: of the model; `unsupported` must be empty for it.
        max_context: positions for which rotary tables are made at most.
        layers: with weights of any float dtype; their matrices are dropped one layer after the other.
        norm: the final norm's weight.
        head: [V, C].
        embedding: [V, C]; `head` if they are tied.
        quantization: of all matrices, embedding and head included: one of `LIBRARY_FORMATS`.
        threads: that compute a step.

    Attributes:
        num_bytes: of the quantized matrices.
    """

    def __init__(
        self,
        network: spec.Network,
        max_context: int,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        head: Tensor,
        embedding: Tensor,
        quantization: WeightFormat,
        threads: int,
    ) -> None:
        library = load()
        assert not isinstance(library, str), library

        def pack(layer: DecoderLayer, name: str, *, gated: bool = False) -> PackedMatrix:
            bias = getattr(layer, f"{name}_bias")
            packed = PackedMatrix(library, layer.matrices[name], quantization, bias, gated=gated)
            layer.drop_matrix(name)
            return packed

        packed_head = PackedMatrix(library, Weight.full(head), quantization)
        packed_embedding = packed_head
        if embedding is not head:
            packed_embedding = PackedMatrix(library, Weight.full(embedding), quantization)
        matrices = [
            LayerMatrices(
                pack(layer, "qkv"),
                pack(layer, "output"),
                pack(layer, "gate_up", gated=True),
                pack(layer, "down"),
                _float32(layer.input_norm),
                _float32(layer.mlp_norm),
                None if layer.q_norm is None else _float32(layer.q_norm),
                None if layer.k_norm is None else _float32(layer.k_norm),
            )
            for layer in layers
        ]
        self.quantization = quantization
        self._decoder = CPUDecoder(
            _shape(network), matrices, _float32(norm), packed_head, packed_embedding, threads
        )
        self._rope = RotaryEmbedding(*network.rotaries[0])
        self._max_context = max_context
        self._positions_reserved = False
        self.num_bytes = self._decoder.num_bytes

    def reserve_positions(self, num_positions: int) -> None:
        """Allocate the rotary tables; see `DecoderLM.reserve_positions`."""
        self._rope.reserve(num_positions, torch.float32, torch.device("cpu"))
        self._positions_reserved = True

    def hidden_states(self, step: StepInput, cache: KVCache, sampled: Tensor | None) -> Tensor:
        """Compute the layers of a step; returns [T, hidden_size] float32."""
        return self._decoder.hidden_states(self._tensors(step, cache, sampled))

    def step(self, step: StepInput, cache: KVCache, sampled: Tensor | None) -> StepOutput:
        """Compute a step; the results have tokens, but no log-probabilities."""
        bucket = step.bucket
        rows = None if bucket.has_all_logits else step.device.logits_rows
        tensors = self._tensors(step, cache, sampled)
        return StepOutput(*self._decoder.logits(tensors, rows, bucket.num_logits))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [M, V] float32 of hidden states [M, hidden_size]."""
        return self._decoder.project(hidden)

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
        )


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
