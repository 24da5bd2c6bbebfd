"""The decoder language model: its parameters, and the executors that compute with them.

The engine runs it step by step over a paged KV cache; training runs it over whole sequences.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from kernels import detect
from kernels.linear.projection import Purpose
from kernels.weight_format import LIBRARY_FORMATS, unquantized
from model.executors import cpu_library
from model.executors.attention_plans import AttentionPlanner, attention_problems
from model.executors.bound import BoundExecutors
from model.executors.layers import Layers, layer_forward
from model.network.initial_weights import initialize
from model.network.layers import DecoderLayer, layer_formats, norm_dtype, stacked_rows
from model.network.parallel import head_rows, shard, shard_network, shard_stacked
from model.network.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
    from kernels.linear.projection import Residual
    from kernels.weight_format import WeightFormat
    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.executors.layers import BoundLayer, Contexts
    from model.executors.step import StepInput, StepOutput

_logger = logging.getLogger(__name__)
_MOST_BUCKETS = 4096
T = TypeVar("T")


class DecoderLM(nn.Module):
    """A decoder of any supported family.

    Parameters are uninitialized until `init_weights` or `model.checkpoint.weights` fills them. Afterwards they must be
    changed in place (`copy_`, `to`, an optimizer), never replaced, because kernels are bound to their memory.

    Args:
        config: the model's configuration, including its family.
        dtype: dtype of parameters and activations.
        device: device of the parameters.
        weight_format: of the layers' matrices, for serving only; a mapping has those of matrices by names such as
            `layers.0.qkv`, of which others have full numbers; None for full numbers.
        communicator: of the ranks that share the model, for serving only; this one has a part of the weights. None
            for a model that is whole.

    Attributes:
        config: of the whole model.
        network: what this rank computes.
        weight_format: of the layers' matrices; if some have full numbers, that of the others. If the C library has
            packed them, its format of all matrices.
        ropes: the tables of each of `Network.rotaries`.
        executors: compute its steps.
        layers_executor: computes with the layers as they are.
        cpu_library: has the packed matrices; None where they are not packed for the C library.
        unmeasured_kernels: whether kernels may be chosen that were never measured on a GPU; set before the first step.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weight_format: WeightFormat | Mapping[str, WeightFormat] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.communicator = communicator
        network = shard_network(config.network, self.num_ranks)

        def empty(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=kind, device=device))

        self.config, self.network = config, network
        hidden, positions = network.hidden, network.positions
        self.embed_tokens = empty(network.vocab, hidden)
        self.embed_positions = (
            empty(positions.offset + positions.count, hidden) if positions else None
        )
        self.layers = nn.ModuleList(
            DecoderLayer(layer, hidden, dtype, device, layer_formats(weight_format, index))
            for index, layer in enumerate(network.layers)
        )
        forms = (it.format for layer in self.decoder_layers for it in layer.matrices.values())
        self.weight_format = next((it for it in forms if it.is_quantized), unquantized(dtype))
        self.norm = empty(hidden, kind=norm_dtype(network.norm, dtype))
        self.norm_bias = empty(hidden) if network.norm.kind == "layer" else None
        self._head_rows = head_rows(network.vocab, self.num_ranks)
        self.lm_head = None if network.tied else empty(self._head_rows, hidden)
        self.ropes = [RotaryEmbedding(*it) for it in network.rotaries]
        self._problems = attention_problems(network)
        self._packed_bytes = 0
        self.unmeasured_kernels = False
        self.cpu_library: cpu_library.CPULibrary | None = None
        self.layers_executor: Layers = Layers(self, Purpose.TRAINING)
        self.executors = BoundExecutors(self)

    def optimize(self, quantization: WeightFormat | None = None, threads: int = 1) -> None:
        """Bind the parameters to the fastest kernels of their device, for serving only.

        Afterwards the model cannot be trained. On a CPU it cannot be saved either, because the matrices are replaced by
        copies in the processor's packed layout. A tied head is copied too, because the embedding is still read row by
        row.

        Args:
            quantization: one of `LIBRARY_FORMATS` quantizes all matrices for the C library, on a CPU whose
                `model.executors.cpu_library.unsupported` is empty; others leave the matrices as they are.
            threads: that compute a step in the C library.
        """
        if self.is_packed:
            return
        self.executors.for_serving = True
        if quantization in LIBRARY_FORMATS:
            assert quantization is not None
            self.cpu_library = cpu_library.CPULibrary(self, quantization, threads)
            self.weight_format, self.lm_head = quantization, None
            self.layers_executor.bound.layers.clear()
            # Without rows: it still says that activations are float32 on a CPU.
            rows = torch.empty(0, self.network.hidden)
            self.embed_tokens = nn.Parameter(rows, requires_grad=False)
            return
        self.layers_executor = Layers(self, Purpose.SERVING)
        whole = self.weight_bytes
        for layer, bound in zip(
            self.decoder_layers, self.layers_executor.bound.layers, strict=True
        ):
            for name, product in bound.projections.items():
                if product.copies_weights:
                    layer.drop_matrix(name)
                    self.lm_head = None  # has full numbers, too
        self._packed_bytes = whole - self.weight_bytes

    def reserve_positions(self, num_positions: int) -> None:
        """Allocate the rotary tables for positions below `num_positions`, the only ones that later steps may use.

        Without this call, a step reserves every position that its cache can hold.
        """
        (self.cpu_library or self.layers_executor).reserve_positions(num_positions)

    def step(
        self,
        step: StepInput,
        kv_cache: KVCache,
        sampled: Tensor | None = None,
        out: StepOutput | None = None,
    ) -> StepOutput:
        """Run one step: write its keys and values to the cache and compute what its bucket wants.

        The first executor of `model.executors.table` that supports the bucket computes it, for a deterministic step
        with kernels that are batch invariant (docs/decisions/0030-deterministic.md).

        Args:
            step: the step's arrays, already sent to the model's device.
            kv_cache: the cache; written.
            sampled: [capacity] int64, earlier sampled tokens, to which negative token ids of the step refer; None if
                there are no negative ids.
            out: where to write the logits, their argmax and its log-probability; the argmax is also written to
                `sampled`, at the step's `sampled_rows`. None computes only the logits, in a new tensor. Not with
                prompt scores.

        Returns:
            `out` if it is given, else the new logits, and the scores if the bucket wants them.
        """
        executors = self.executors
        try:
            return executors.find(step.bucket, kv_cache).step(step, sampled, out)
        except RuntimeError as error:
            if not executors.replaces_single_launch(error):
                raise
        return executors.find(step.bucket, kv_cache).step(step, sampled, out)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states after the last norm of whole sequences, differentiably and without a cache.

        Args:
            input_ids: [B, L] int64.
            positions: [L] int64, each token's index in its sequence.

        Returns:
            [B, L, hidden_size] in the parameters' dtype. On a GPU only before `optimize`, and not for a model with a
            softcap of attention scores.
        """
        return self.layers_executor.dense(input_ids, positions)

    def run_layers(
        self, layers: Sequence[BoundLayer], residual: Residual, contexts: Contexts
    ) -> Residual:
        """Compute all layers; see `layer_forward`."""
        for index, layer in enumerate(layers):
            residual = layer_forward(index, layer, residual, contexts)
        return residual

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., V] of hidden states [..., C] from `forward`, in their dtype."""
        return self.layers_executor.bound.head(hidden)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows for which projection kernels are compiled; empty if PyTorch computes the projections."""
        return self.layers_executor.row_counts

    @property
    def arch(self) -> GPUArch:
        """The processor of the parameters' device."""
        return detect(self.embed_tokens.device)

    @property
    def is_meta(self) -> bool:
        """Whether the parameters have no memory, so that the model can only be planned."""
        return self.embed_tokens.is_meta

    @property
    def rope_tables(self) -> tuple[Tensor, ...]:
        """Cos and sin of all reserved positions, for each of `Network.rotaries`."""
        return tuple(table for rope in self.ropes for table in rope.tables)

    @property
    def attention(self) -> AttentionPlanner:
        """Describes and plans the attention of the layers."""
        return AttentionPlanner(self._problems, self.dtype_name, self.unmeasured_kernels)

    @property
    def dtype_name(self) -> str:
        """Name of the dtype of parameters and activations."""
        return str(self.embed_tokens.dtype).removeprefix("torch.")

    @property
    def is_quantized(self) -> bool:
        """Whether the layers' matrices are quantized."""
        return self.weight_format.is_quantized

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the model."""
        return 1 if self.communicator is None else self.communicator.size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, those included that `optimize` replaced by packed copies of the same dtype."""
        held = (*self.parameters(), *self.buffers())
        return self._packed_bytes + sum(tensor.nbytes for tensor in held)

    @property
    def is_packed(self) -> bool:
        """Whether `optimize` has replaced matrices by packed copies."""
        return self.cpu_library is not None or self._packed_bytes > 0

    def init_weights(self, std: float | None = None, seed: int | None = None) -> None:
        """Initialize the weights: matrices from a normal distribution, biases 0, norms 1.

        Args:
            std: standard deviation; None for the configuration's `initializer_range`.
            seed: seed of a separate generator; None uses PyTorch's global generator.
        """
        std = self.config.initializer_range if std is None else std
        generator = None
        if seed is not None:
            generator = torch.Generator(self.embed_tokens.device).manual_seed(seed)
        if self.communicator is None:
            initialize(self, std, generator)
        else:
            self._initialize_part(std, generator, self.communicator.rank)

    def _initialize_part(self, std: float, generator: torch.Generator | None, rank: int) -> None:
        """Initialize this rank's part of the weights with that part of a whole model's."""
        whole, own = (
            DecoderLM(self.config, device="meta", communicator=it)
            for it in (None, self.communicator)
        )
        shapes, own_shapes = (
            {name: parameter.shape for name, parameter in it.named_parameters()}
            for it in (whole, own)
        )

        def part(name: str, values: Tensor) -> Tensor:
            layer, _, kind = name.removeprefix("layers.").partition(".")
            stacked = [
                stacked_rows(network.layers[int(layer)], kind) if kind else None
                for network in (whole.network, self.network)
            ]
            if stacked[0] is None or stacked[1] is None:
                return shard(values, own_shapes[name], rank)
            return shard_stacked(values, stacked[0], stacked[1], rank)

        initialize(self, std, generator, shapes, part)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of a KV cache that is not quantized."""
        if self.cpu_library is None:
            return self.embed_tokens.dtype
        dtype: torch.dtype = getattr(torch, cpu_library.CACHE_DTYPE)
        return dtype

    @property
    def head(self) -> Tensor:
        """The rows of the output head that this rank has, [V, C] in a model that is whole."""
        if self.lm_head is not None:
            return self.lm_head
        if self.communicator is None:
            return self.embed_tokens
        shape = (self._head_rows, self.network.hidden)
        return shard(self.embed_tokens.detach(), shape, self.communicator.rank)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
