"""The decoder language model: its parameters, and the executors that compute with them.

The engine runs it step by step over a paged KV cache; training runs it over whole sequences.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kernels import NoKernelError, detect, select
from kernels.linear.projection import Purpose
from kernels.selection import VectorProblem, triton_unsupported
from kernels.weight_format import LIBRARY_FORMATS, unquantized
from model.executors import cpu_library, single_launch
from model.executors.attention_plans import AttentionPlanner, attention_problems
from model.executors.executor import ModelProblem
from model.executors.layers import Layers, layer_forward
from model.executors.table import choose_executor
from model.network.initial_weights import initialize
from model.network.layers import DecoderLayer, layer_formats, norm_dtype, stacked_rows
from model.network.parallel import head_rows, shard, shard_network, shard_stacked
from model.network.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch import Tensor

    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
    from kernels.linear.projection import Residual
    from kernels.weight_format import WeightFormat
    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.executors.columns import Bucket
    from model.executors.executor import Executor
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
        self._is_bound = False
        self._refusals: tuple[str, ...] = ()
        self._executors: WeakKeyDictionary[KVCache, dict[Bucket, Executor]] = WeakKeyDictionary()
        self._kept: WeakKeyDictionary[KVCache, dict[Hashable, Any]] = WeakKeyDictionary()

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
        self._is_bound = True
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
        executor = self.executor(step.bucket, kv_cache)
        try:
            return executor.step(step, sampled, out)
        except RuntimeError as error:
            if not self.replaces_single_launch(error):
                raise
        return self.executor(step.bucket, kv_cache).step(step, sampled, out)

    def executor(self, bucket: Bucket, kv_cache: KVCache) -> Executor:
        """Return the executor of a bucket's steps over a cache; it is chosen and bound when it is first needed."""
        by_bucket = self._executors.get(kv_cache)
        if by_bucket is None or len(by_bucket) > _MOST_BUCKETS:
            by_bucket = self._executors[kv_cache] = {}
        found = by_bucket.get(bucket)
        if found is None:
            spec = choose_executor(self.problem(self.arch, kv_cache.kv_dtype), bucket).spec
            found = by_bucket[bucket] = spec.bind(self, kv_cache, bucket)
        return found

    def problem(self, arch: GPUArch, kv_dtype: str | None = None) -> ModelProblem:
        """Describe the model on a processor, which need not be present, for the choice of executors.

        Args:
            arch: the processor.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
        """
        return ModelProblem(
            self.network,
            self._dtype_name,
            self.weight_format,
            arch,
            kv_dtype,
            self.num_ranks,
            self.unmeasured_kernels,
            self._refusals if self._is_bound or self.is_meta else ("bound for training",),
        )

    def bound_once(self, key: Hashable, kv_cache: KVCache, bind: Callable[[], T]) -> T:
        """Return what an executor has bound to a cache under a key; `bind` binds it at its first use."""
        kept = self._kept.setdefault(kv_cache, {})
        if key not in kept:
            kept[key] = bind()
        found: T = kept[key]
        return found

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

    def launched_rows(self, arch: GPUArch) -> tuple[int, ...]:
        """Return the numbers of sequences, from 2 on, for which a decode step is a single launch on `arch`."""
        problem = self.problem(arch)
        counts = single_launch.ROW_COUNTS
        return tuple(rows for rows in counts if not single_launch.unsupported(problem, rows))

    def replaces_single_launch(self, error: RuntimeError) -> bool:
        """Compute all later steps layer by layer if an error is the driver's refusal of a single launch.

        Args:
            error: raised by a launch, by its recording or by a replay.

        Returns:
            Whether the step can be computed again, without a single launch.
        """
        reason = single_launch.launch_refusal(error)
        if reason is None or reason in self._refusals:
            return False
        _logger.warning("a decode step is not a single launch: %s", reason)
        self._refusals += (reason,)
        self._executors.clear()
        self._kept.clear()
        return True

    def deterministic_unsupported(
        self, arch: GPUArch, block_size: int, kv_dtype: str | None = None
    ) -> tuple[str, ...]:
        """List why `arch` cannot compute deterministic steps; empty if it can.

        Args:
            arch: the processor; it need not be present.
            block_size: tokens per cache block.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
        """
        if self.weight_format in LIBRARY_FORMATS:
            return ()
        if arch.is_cpu:
            in_c = cpu_library.unsupported(
                self.config.network, fp8_cache=kv_dtype is not None, num_ranks=self.num_ranks
            )
            needed = "on a CPU the weights must be in int8 or int4"
            if in_c:
                return (f"{needed}, which is not supported here: {'; '.join(in_c)}",)
            return (f"{needed}: set --quantization int8 or int4, and --dtype auto",)
        reasons = tuple(f"no deterministic {name}" for name in self.network.other_mixers)
        reasons += triton_unsupported(VectorProblem(self._dtype_name), arch)
        try:
            for problem in self.attention.problems(block_size, kv_dtype, deterministic=True):
                select(problem, arch)
        except NoKernelError as error:
            return (*reasons, str(error))
        return reasons

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
        return AttentionPlanner(self._problems, self._dtype_name, self.unmeasured_kernels)

    @property
    def _dtype_name(self) -> str:
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
