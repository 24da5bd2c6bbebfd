"""The decoder language model.

The engine runs it step by step over a paged KV cache; training runs it over whole sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from kernels import NoKernelError, detect, select
from kernels.linear.projection import Purpose, Residual
from kernels.rope.registry import TRITON
from kernels.sampling.tokens import embed_tokens
from kernels.selection import VectorProblem, triton_unsupported
from kernels.weight_format import LIBRARY_FORMATS, unquantized
from model.executors import cpu_library as cpu_steps
from model.executors import single_launch
from model.executors.attention import DenseAttention, PagedAttention
from model.executors.attention_plans import AttentionPlanner, attention_problems
from model.executors.embedding import finish_embeddings
from model.executors.layers import BoundNetwork, bind_network
from model.executors.step import StepOutput
from model.network.initial_weights import initialize
from model.network.layers import (
    DecoderLayer,
    layer_formats,
    layer_forward,
    make_norm,
    norm_dtype,
    stacked_rows,
)
from model.network.parallel import head_rows, shard, shard_network, shard_stacked
from model.network.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
    from kernels.step.single_launch import StepKernel
    from kernels.weight_format import WeightFormat
    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.executors.step import StepInput
    from model.network.layers import Attend, BoundLayer
    from model.network.metadata import AttentionMetadata


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
        weight_format: of the layers' matrices; if some have full numbers, that of the others.
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
        self._bound = self._bind(Purpose.TRAINING)
        self._deterministic: BoundNetwork | None = None
        self._single_launches = single_launch.SingleLaunches()
        self._positions_reserved = False
        self._packed_bytes = 0
        self.cpu_steps: cpu_steps.CPUSteps | None = None
        self.unmeasured_kernels = False

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
        if quantization in LIBRARY_FORMATS:
            assert quantization is not None
            self._quantize(quantization, threads)
            return
        self._bound, self._deterministic = self._bind(Purpose.SERVING), None
        whole = self.weight_bytes
        for layer, bound in zip(self.decoder_layers, self._bound.layers, strict=True):
            for name in layer.matrices:
                if getattr(bound, name).copies_weights:
                    layer.drop_matrix(name)
                    self.lm_head = None  # has full numbers, too
        self._packed_bytes = whole - self.weight_bytes

    def reserve_positions(self, num_positions: int) -> None:
        """Allocate the rotary tables for positions below `num_positions`, the only ones that later steps may use.

        Without this call, a step reserves every position that its cache can hold.
        """
        if self.cpu_steps is not None:
            self.cpu_steps.reserve_positions(num_positions)
            return
        parameter = self.embed_tokens
        for rope in self.ropes:
            rope.reserve(num_positions, parameter.dtype, parameter.device)
        self._positions_reserved = True

    def step(
        self,
        step: StepInput,
        kv_cache: KVCache,
        sampled: Tensor | None = None,
        out: StepOutput | None = None,
    ) -> StepOutput:
        """Run one step: write its keys and values to the cache and compute the requested rows of logits.

        The model selects the implementation: a single launch, Triton kernels, the vendor's library or PyTorch; for a
        deterministic step those that are batch invariant (docs/decisions/0030-deterministic.md).

        Args:
            step: the step's arrays, already sent to the model's device.
            kv_cache: the cache; written.
            sampled: [capacity] int64, earlier sampled tokens, to which negative token ids of the step refer; None if
                there are no negative ids.
            out: where to write the logits, their argmax and its log-probability; the argmax is also written to
                `sampled`, at the step's `sampled_rows`. None computes only the logits, in a new tensor.

        Returns:
            `out` if it is given, else the new logits.
        """
        bucket = step.bucket
        if self.cpu_steps is not None:
            assert out is None, "steps on a CPU are not recorded"
            return self.cpu_steps.step(step, kv_cache, sampled)
        if (
            bucket.queries == 1
            and bucket.has_all_logits
            and not (bucket.shared_blocks or bucket.deterministic or bucket.extra_columns)
        ):
            kernel = self._single_launches.kernel(kv_cache, bucket.rows, self._bind_single_launch)
            if kernel is not None:
                table, rope = self.embed_tokens, self.rope_tables
                try:
                    return single_launch.launch_once(kernel, step, table, rope, sampled, out)
                except RuntimeError as error:
                    if not self.replaces_single_launch(error):
                        raise
        return self.score(step, self.hidden_states(step, kv_cache, sampled), sampled, out)

    def hidden_states(
        self, step: StepInput, kv_cache: KVCache, sampled: Tensor | None = None
    ) -> Tensor:
        """Compute the layers of a step and return the hidden states of its tokens, [T, hidden_size].

        Args:
            step: as for `step`.
            kv_cache: as for `step`.
            sampled: as for `step`.
        """
        if self.cpu_steps is not None:
            return self.cpu_steps.hidden_states(step, kv_cache, sampled)
        arrays, metadata = step.device, self.attention.plan_step(step, kv_cache)
        hidden: Tensor = self(
            arrays.token_ids,
            arrays.positions,
            kv_cache,
            metadata,
            sampled,
            deterministic=step.bucket.deterministic,
        )
        return hidden

    def score(
        self,
        step: StepInput,
        hidden: Tensor,
        sampled: Tensor | None = None,
        out: StepOutput | None = None,
    ) -> StepOutput:
        """Compute the requested rows of logits from the hidden states of the step's tokens; arguments as for `step`."""
        if not step.bucket.num_logits:
            return StepOutput(hidden.new_empty((0, self.network.vocab)))
        if not step.bucket.has_all_logits:
            hidden = hidden[step.device.logits_rows]
        deterministic = step.bucket.deterministic
        if out is None:
            return StepOutput(self.logits(hidden, deterministic=deterministic))
        assert out.tokens is not None
        assert out.logprobs is not None
        ids = self.argmax(hidden, out.logits, out.tokens, out.logprobs, deterministic=deterministic)
        if sampled is not None:
            sampled.index_copy_(0, step.device.sampled_rows, ids)
        return out

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache | None = None,
        metadata: AttentionMetadata | None = None,
        sampled: Tensor | None = None,
        *,
        deterministic: bool = False,
    ) -> Tensor:
        """Compute the hidden states after the last norm.

        Args:
            input_ids: int64; [T] packed tokens of a step with a cache, [B, L] sequences without.
            positions: int64; [T] each token's index in its sequence; [L] without a cache.
            kv_cache: the cache; written. None computes dense, differentiable attention without a cache; on a GPU only
                before `optimize`, and not for a model with a softcap of attention scores.
            metadata: the step's plans, from `AttentionPlanner.metadata`; required with a cache, else None.
            sampled: [capacity] int64; -1 - i in `input_ids` refers to index i of this tensor. Only with a cache.
            deterministic: see `Bucket`; the metadata must be of a deterministic step. Only with a cache.

        Returns:
            [T, hidden_size] or [B, L, hidden_size], in the parameters' dtype.
        """
        bound = self._kernels(deterministic=deterministic)
        attention: Attend
        if kv_cache is None or metadata is None:
            assert kv_cache is None
            assert metadata is None
            assert sampled is None
            hidden = functional.embedding(input_ids, self.embed_tokens)
            attention = DenseAttention([it.dense(positions, hidden.dtype) for it in self.ropes])
        else:
            hidden = embed_tokens(input_ids, self.embed_tokens, sampled)
            if not self._positions_reserved:
                capacity = min(self.config.max_context, kv_cache.num_blocks * kv_cache.block_size)
                for it in self.ropes:
                    it.reserve(capacity, hidden.dtype, hidden.device)
            attention = PagedAttention(
                kv_cache,
                metadata,
                self.ropes,
                positions,
                rotation=bound.rotation,
                pdl=bound.pdl,
                batch_invariant=deterministic,
            )
        hidden = finish_embeddings(self.network, hidden, positions, self.embed_positions)
        return bound.norm(self._run_layers(bound.layers, Residual(hidden), attention))

    def logits(
        self, hidden: Tensor, out: Tensor | None = None, *, deterministic: bool = False
    ) -> Tensor:
        """Compute logits.

        Args:
            hidden: [..., hidden_size] from `forward`; [M, hidden_size] with `out`.
            out: [M, vocab_size], where to write them; None for a new tensor.
            deterministic: see `Bucket`.

        Returns:
            [..., vocab_size] in the parameters' dtype; `out` if it is given.
        """
        if self.cpu_steps is not None:
            logits = self.cpu_steps.logits(hidden)
            return logits if out is None else out.copy_(logits)
        return self._kernels(deterministic=deterministic).head(hidden, out)

    def argmax(
        self,
        hidden: Tensor,
        logits: Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        *,
        deterministic: bool = False,
    ) -> Tensor:
        """Compute logits and the argmax of each row, the smallest id among equals.

        Args:
            hidden: [M, hidden_size] from `forward`.
            logits: [M, vocab_size] contiguous; written.
            tokens: [M] int64 contiguous; written, -1 where the largest logit is not finite.
            logprobs: [M] float32 contiguous; written, the tokens' natural log-probabilities, undefined where the token
                is -1.
            deterministic: see `Bucket`.

        Returns:
            [M] int64: `tokens`, with an arbitrary valid id in place of each -1.
        """
        head = self._kernels(deterministic=deterministic).head
        return head.argmax(hidden, logits, tokens, logprobs)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows for which projection kernels are compiled; empty if PyTorch computes the projections."""
        return (self._deterministic or self._bound).row_counts

    def launched_rows(self, arch: GPUArch) -> tuple[int, ...]:
        """Return the numbers of sequences, from 2 on, for which a decode step is a single launch on `arch`."""
        counts = single_launch.ROW_COUNTS
        return tuple(rows for rows in counts if not self.single_launch_unsupported(arch, rows))

    def single_launch_unsupported(self, arch: GPUArch, rows: int = 1) -> tuple[str, ...]:
        """List why `arch` cannot run a decode step of `rows` sequences as a single launch; empty if it can."""
        reasons = single_launch.unsupported(
            self.network,
            self.embed_tokens.dtype,
            self.weight_format,
            arch,
            rows,
            unmeasured=self.unmeasured_kernels,
        )
        if self.communicator is not None:
            reasons = (*reasons, "no tensor parallelism")
        return reasons + self._single_launches.refusals

    def replaces_single_launch(self, error: RuntimeError) -> bool:
        """Compute all later steps layer by layer if an error is the driver's refusal of a single launch.

        Args:
            error: raised by a launch, by its recording or by a replay.

        Returns:
            Whether the step can be computed again, without a single launch.
        """
        return self._single_launches.replace(error)

    def deterministic_unsupported(
        self, arch: GPUArch, block_size: int, kv_dtype: str | None = None
    ) -> tuple[str, ...]:
        """List why `arch` cannot compute deterministic steps; empty if it can.

        Args:
            arch: the processor; it need not be present.
            block_size: tokens per cache block.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
        """
        if self.cpu_steps is not None:
            return ()
        if arch.is_cpu:
            in_c = cpu_steps.unsupported(
                self.config.network, fp8_cache=kv_dtype is not None, num_ranks=self.num_ranks
            )
            needed = "on a CPU the weights must be in int8 or int4"
            if in_c:
                return (f"{needed}, which is not supported here: {'; '.join(in_c)}",)
            return (f"{needed}: set --quantization int8 or int4, and --dtype auto",)
        dtype = str(self.embed_tokens.dtype).removeprefix("torch.")
        reasons = triton_unsupported(VectorProblem(dtype), arch)
        try:
            for problem in self.attention.problems(block_size, kv_dtype, deterministic=True):
                select(problem, arch)
        except NoKernelError as error:
            return (*reasons, str(error))
        return reasons

    @property
    def rope_tables(self) -> tuple[Tensor, ...]:
        """Cos and sin of all reserved positions, for each of `Network.rotaries`."""
        return tuple(table for rope in self.ropes for table in rope.tables)

    @property
    def attention(self) -> AttentionPlanner:
        """Describes and plans the attention of the layers."""
        dtype = str(self.embed_tokens.dtype).removeprefix("torch.")
        return AttentionPlanner(self._problems, dtype, self.unmeasured_kernels)

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
        return self.cpu_steps is not None or self._packed_bytes > 0

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
        if self.cpu_steps is None:
            return self.embed_tokens.dtype
        dtype: torch.dtype = getattr(torch, cpu_steps.CACHE_DTYPE)
        return dtype

    def _quantize(self, quantization: WeightFormat, threads: int) -> None:
        """Replace all matrices by quantized copies for the C library."""
        self._bound = self._bound._replace(layers=[])
        self.cpu_steps = cpu_steps.CPUSteps(
            self.network,
            self.config.max_context,
            self.decoder_layers,
            self.norm,
            self._head,
            self.embed_tokens,
            quantization,
            threads,
        )
        self.lm_head = None
        # Without rows: it still says that activations are float32 on a CPU.
        self.embed_tokens = nn.Parameter(torch.empty(0, self.network.hidden), requires_grad=False)

    def _run_layers(
        self, layers: list[BoundLayer], residual: Residual, attention: Attend
    ) -> Residual:
        for index, layer in enumerate(layers):
            residual = layer_forward(index, layer, residual, attention)
        return residual

    def _bind_single_launch(self, kv_cache: KVCache, rows: int) -> StepKernel | None:
        """Bind the single-launch kernel of steps of `rows` sequences to a cache; None if it is unsupported."""
        arch = detect(self.embed_tokens.device)
        if self._bound.rotation is not TRITON or self.single_launch_unsupported(arch, rows):
            return None
        return single_launch.bind_single_launch(
            self.network,
            self.decoder_layers,
            self.embed_tokens,
            self._head,
            self.norm,
            kv_cache,
            rows,
        )

    def _kernels(self, *, deterministic: bool) -> BoundNetwork:
        """Return the bound parameters; those for deterministic steps are bound when they are first used."""
        if not deterministic:
            return self._bound
        if self._deterministic is None:
            self._deterministic = self._bind(Purpose.DETERMINISTIC_SERVING)
        return self._deterministic

    def _bind(self, purpose: Purpose) -> BoundNetwork:
        return bind_network(
            self.network,
            self.decoder_layers,
            make_norm(self.norm, self.norm_bias, self.network.norm.eps),
            self._head,
            detect(self.embed_tokens.device),
            purpose,
            self.communicator,
        )

    @property
    def _head(self) -> Tensor:
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
