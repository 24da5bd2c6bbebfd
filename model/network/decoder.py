"""The decoder language model: token ids in, hidden states and logits out.

One module serves both callers: the engine, over a paged cache, and training, over whole sequences.
Knows nothing of files (`model.checkpoint.weights`), sampling or requests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import (
    AttentionPlan,
    AttentionProblem,
    PagedBatch,
    Phase,
    detect,
    plan_attention,
    rms_norm,
)
from kernels.fp8 import quantise_rows
from kernels.linear.projection import objection
from kernels.sampling.tokens import argmax_tokens, embed_tokens
from model.checkpoint.config import ModelConfig
from model.device.kv_cache import KVCache
from model.network.attention import DenseAttention, PagedAttention
from model.network.fused_layers import FusedLayers
from model.network.layers import DecoderLayer, LayerOps, LayerShape, layer_forward
from model.network.linear import Linear, can_pack, packed_linear
from model.network.metadata import AttentionMetadata
from model.network.rope import RotaryEmbedding


class DecoderLM(nn.Module):
    """A Llama-style decoder; the configuration says which of the supported families.

    Parameters are uninitialised until `init_weights` or `model.checkpoint.weights` fills them; they must be
    changed in place from then on (`copy_`, `to`, an optimiser), never replaced.

    Args:
        config: which.
        dtype: of the parameters and of what is computed.
        device: where they lie.
        weight_dtype: of the layers' matrices where they are quantised, for serving only: float8_e4m3fn.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weight_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = torch.device(device)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))

        self.config = config
        self.weight_dtype = weight_dtype
        self.softmax_scale = config.head_dim**-0.5
        self.embed_tokens = empty(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dtype, device, weight_dtype) for _ in range(config.num_layers)
        )
        self.norm = empty(config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else empty(config.vocab_size, config.hidden_size)
        self.rope = RotaryEmbedding(config.rope, config.head_dim)
        self._dense_attention = DenseAttention(config, self.softmax_scale)
        self._shape = LayerShape(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        self._ops: list[LayerOps] | None = None
        self._packed_head: Linear | None = None
        self._fused: FusedLayers | None = None
        self._positions_reserved = False

    def reserve_positions(self, num_positions: int) -> None:
        """Allocate now what positions below `num_positions` need; a cached pass computes no others.

        Without it a pass reserves all that its cache has room for.
        """
        parameter = self.embed_tokens
        self.rope.reserve(num_positions, parameter.dtype, parameter.device)
        self._positions_reserved = True

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_cache: KVCache | None = None,
        metadata: AttentionMetadata | None = None,
        drawn: Tensor | None = None,
    ) -> Tensor:
        """Compute the hidden states after the last norm.

        Args:
            input_ids: int64; [T] packed tokens of a step with a cache, [B, S] sequences without.
            positions: int64; [T] each token's index in its sequence; [S] without a cache.
            kv_cache: where keys and values live; extended by this step. None attends densely,
                differentiably and without any state.
            metadata: the step's plans, from `attention_metadata`; given exactly when the cache is.
            drawn: [R] int64, ids that `input_ids` may name by -1 - their row; only with a cache.

        Returns:
            [T, hidden_size] or [B, S, hidden_size], in the parameters' dtype.
        """
        if kv_cache is None or metadata is None:
            assert kv_cache is None
            assert metadata is None
            assert drawn is None
            hidden = functional.embedding(input_ids, self.embed_tokens)
            rope = self.rope.dense(positions, hidden.dtype)
            ops = self._ops if self.is_packed else None
            return self._run_layers(hidden, rope, self._dense_attention, ops or self._plain_ops())
        hidden = embed_tokens(input_ids, self.embed_tokens, drawn)
        if not self._positions_reserved:
            capacity = min(self.config.max_context, kv_cache.num_blocks * kv_cache.block_size)
            self.rope.reserve(capacity, hidden.dtype, hidden.device)
        attention = PagedAttention(self.config, kv_cache, metadata)
        if self._fused is not None and metadata.launches_ours:
            return self._fused(hidden, positions, self.rope.tables, attention)
        if self._ops is None:
            self._ops = self._plain_ops()
        return self._run_layers(hidden, self.rope.table(positions), attention, self._ops)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Score the vocabulary.

        Args:
            hidden: [..., hidden_size] from `forward`; [M, hidden_size] with `out`.
            out: [M, vocab_size], where the scores are to lie.

        Returns:
            [..., vocab_size] in the parameters' dtype; `out` where it is given.
        """
        if self._packed_head is not None:
            scores = self._packed_head(hidden)
            return scores if out is None else out.copy_(scores)
        if self._fused is not None and hidden.ndim == 2:
            return self._fused.logits(hidden, out)
        if out is None:
            return functional.linear(hidden, self._head)
        return torch.mm(hidden, self._head.t(), out=out)

    def most_likely(
        self, hidden: Tensor, logits: Tensor, tokens: Tensor, logprobs: Tensor
    ) -> Tensor:
        """Score the vocabulary and choose the most likely token of each row, the smallest id among equals.

        Args:
            hidden: [M, hidden_size] from `forward`.
            logits: [M, vocab_size] contiguous; written.
            tokens: [M] int64 contiguous; written, -1 where the largest logit is not a finite number.
            logprobs: [M] float32 contiguous; written, their natural log-probabilities, anything where there is none.

        Returns:
            [M] int64: `tokens` with any valid ids in the place of -1.
        """
        if self._fused is not None:
            ids = self._fused.most_likely(hidden, logits, tokens, logprobs)
            if ids is not None:
                return ids
        self.logits(hidden, out=logits)
        ids, _, _ = argmax_tokens(logits, checked=tokens, logprobs=logprobs)
        return ids

    def pack(self) -> None:
        """Bring the matrices into the CPU's fastest layout, for serving only; a no-op elsewhere.

        Afterwards the model can neither be trained nor saved. A tied head is copied, because the
        embedding is still read row by row; everything else is replaced.
        """
        embeddings = self.embed_tokens
        if self.is_packed or not can_pack(embeddings.dtype, embeddings.device):
            return
        self._packed_head = packed_linear(self._head, None)
        self.lm_head = None
        self._ops = [layer.pack() for layer in self.decoder_layers]

    def fuse(self) -> str:
        """Compute cached passes with few launches from now on, on GPUs that have the kernels.

        Not differentiable from then on. A step whose attention none of our kernels takes is computed as before.

        Returns:
            Why nothing has changed; empty where it has.
        """
        parameter = self.embed_tokens
        arch = detect(parameter.device)
        reason = objection(arch, parameter.dtype)
        if not reason:
            self._fused = FusedLayers(
                self.decoder_layers, self.norm, self._head, self._shape.eps, arch
            )
        return reason

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of a step's tokens whose linear layers have kernels of their own; none before `fuse`."""
        return () if self._fused is None else self._fused.row_counts

    @property
    def is_quantised(self) -> bool:
        """Whether the layers' matrices have scales."""
        return self.weight_dtype is not None

    @property
    def is_packed(self) -> bool:
        """Whether `pack` has replaced the matrices."""
        return self._packed_head is not None

    def attention_problem(
        self, phase: Phase, block_size: int, *, sliding: bool = False, kv_dtype: str | None = None
    ) -> AttentionProblem:
        """Describe the attention of this model's layers to the kernels.

        Args:
            phase: prefill or decode.
            block_size: tokens per cache block.
            sliding: in a model that mixes both kinds of layer, whether its sliding ones are meant.
            kv_dtype: of a quantised cache, as `KVCache.kv_dtype`.
        """
        config = self.config
        window = None if config.mixes_attention and not sliding else config.sliding_window
        return AttentionProblem(
            phase=phase,
            dtype=str(self.embed_tokens.dtype).removeprefix("torch."),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            softmax_scale=self.softmax_scale,
            sliding_window=window,
            softcap=None,
            kv_dtype=kv_dtype,
        )

    def attention_problems(
        self, block_size: int, kv_dtype: str | None = None
    ) -> list[AttentionProblem]:
        """Describe the attention of every kind of layer and phase; each is a kernel that a step may need."""
        kinds = (False, True) if self.config.mixes_attention else (False,)
        return [
            self.attention_problem(phase, block_size, sliding=sliding, kv_dtype=kv_dtype)
            for sliding in kinds
            for phase in Phase
        ]

    def attention_metadata(
        self,
        slot_mapping: Tensor,
        block_size: int,
        decode: PagedBatch | None,
        prefill: PagedBatch | None,
        kv_dtype: str | None = None,
    ) -> AttentionMetadata:
        """Plan one step's attention, for every kind of layer the model has.

        Args:
            slot_mapping: [T] int32 for the step's tokens, [decode rows | prefill rows].
            block_size: tokens per cache block.
            decode: the sequences with one token; None where there are none.
            prefill: the others.
            kv_dtype: of a quantised cache, as `KVCache.kv_dtype`.
        """

        def plans(*, sliding: bool) -> list[AttentionPlan | None]:
            return [
                None
                if batch is None
                else plan_attention(
                    self.attention_problem(phase, block_size, sliding=sliding, kv_dtype=kv_dtype),
                    batch,
                )
                for phase, batch in ((Phase.DECODE, decode), (Phase.PREFILL, prefill))
            ]

        sliding = plans(sliding=True) if self.config.mixes_attention else [None, None]
        num_decode_tokens = 0 if decode is None else decode.seq_lens.shape[0]
        most_keys = sum(
            batch.num_seqs * batch.max_seqlen_k for batch in (decode, prefill) if batch is not None
        )
        full = plans(sliding=False)
        return AttentionMetadata(
            slot_mapping, num_decode_tokens, full[0], full[1], sliding[0], sliding[1], most_keys
        )

    def init_weights(self, std: float | None = None, seed: int | None = None) -> None:
        """Draw fresh weights: normal matrices, zero biases, unit norms.

        Args:
            std: standard deviation; None takes the configuration's `initializer_range`.
            seed: of a generator of its own; None draws from torch's global one.
        """
        std = self.config.initializer_range if std is None else std
        generator = None
        if seed is not None:
            generator = torch.Generator(self.embed_tokens.device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dtype is self.weight_dtype:
                    # PyTorch draws no float8.
                    drawn = torch.empty(parameter.shape, device=parameter.device)
                    numbers, scale = quantise_rows(drawn.normal_(0.0, std, generator=generator))
                    parameter.copy_(numbers)
                    self.get_buffer(f"{name}_scale").copy_(scale)
                elif parameter.ndim > 1:
                    parameter.normal_(0.0, std, generator=generator)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    parameter.fill_(1.0)

    def _run_layers(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        attend: DenseAttention | PagedAttention,
        ops: list[LayerOps],
    ) -> Tensor:
        for layer, layer_ops in enumerate(ops):
            hidden = layer_forward(layer, layer_ops, self._shape, hidden, rope, attend)
        return rms_norm(hidden, self.norm, self._shape.eps)

    def _plain_ops(self) -> list[LayerOps]:
        return [layer.ops() for layer in self.decoder_layers]

    @property
    def _head(self) -> nn.Parameter:
        return self.embed_tokens if self.lm_head is None else self.lm_head

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers in their order."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]
