"""The sizes and parts of a decoder network, as a checkpoint's configuration states them.

This module does not import PyTorch, because the front end imports it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Literal

from msgspec import Meta

from model.checkpoint.families import ActivationName, LayerType
from model.checkpoint.rope_config import Positions
from model.errors import ModelFolderError
from model.network.spec import Attention, Dense, Layer, Network, Norm, Rotary
from model.network.spec import Positions as LearnedPositions

_Heads = Annotated[int, Meta(ge=1, le=1_024)]
_Softcap = Annotated[float, Meta(gt=0, le=1e6)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The network of one decoder model. The limits in the annotations apply to values read from files.

    Attributes:
        architecture: a key of `FAMILIES`.
        num_kv_heads: divides num_heads; equal to it for multi-head attention, the default; 1 for multi-query attention.
        head_dim: even; hidden_size / num_heads by default.
        norm: "rms" for RMS norms, "layer" for layer norms with a bias.
        norm_eps: added to the mean square or variance.
        norms_add_one: whether the checkpoint stores the weights of the norms less 1 (Gemma).
        post_norms: whether the outputs of attention and MLP are normalized before they are added (Gemma).
        activation: of the MLP.
        gated_mlp: whether the MLP multiplies the activation of a gate projection by an up projection; else it has one
            projection before the activation.
        rope: parameters of the rotary embedding; None for a table of learned positions (GPT-2, OPT).
        local_rope: those of layers with a sliding window (Gemma 3); None if they have `rope` too.
        position_offset: rows of the table of learned positions before that of position 0.
        scale_embeddings: whether embeddings are multiplied by sqrt(hidden_size) (Gemma).
        query_pre_attn_scalar: its inverse square root is the factor on the scores; None for head_dim.
        attention_softcap: c in c * tanh(score / c), applied to the scaled scores; None for none (Gemma 2).
        logit_softcap: the same for logits.
        attention_bias: whether the q, k and v projections have a bias.
        attention_output_bias: whether the output projection of the attention has a bias.
        mlp_bias: whether the projections of the MLP have biases.
        qk_norm: whether queries and keys are normalized per head before the rotation (Qwen3).
        sliding_window: tokens that a sliding-window layer attends to, including the current one; None if no layer has a
            sliding window.
        layer_types: one entry per layer; by default all layers have the sliding window if there is one.
        max_position_embeddings: tokens, as stated by the checkpoint; see `max_context`.
        initializer_range: standard deviation of freshly initialized weights.

    Raises:
        ModelFolderError: the sizes of the heads do not fit each other, or LongRoPE's factors do not fit them.
    """

    architecture: str
    vocab_size: Annotated[int, Meta(ge=1, le=2**21)]
    hidden_size: Annotated[int, Meta(ge=1, le=65_536)]
    intermediate_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_layers: Annotated[int, Meta(ge=1, le=1_024)]
    num_heads: _Heads
    num_kv_heads: _Heads = 0
    head_dim: Annotated[int, Meta(ge=1)] = 0
    max_position_embeddings: Positions
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    norms_add_one: bool = False
    post_norms: bool = False
    activation: ActivationName = "silu"
    gated_mlp: bool = True
    rope: Rotary | None = dataclasses.field(default_factory=Rotary)
    local_rope: Rotary | None = None
    position_offset: int = 0
    scale_embeddings: bool = False
    query_pre_attn_scalar: Annotated[int, Meta(ge=1, le=65_536)] | None = None
    attention_softcap: _Softcap | None = None
    logit_softcap: _Softcap | None = None
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: Positions | None = None
    layer_types: tuple[LayerType, ...] = ()
    initializer_range: Annotated[float, Meta(ge=0, le=10)] = 0.02

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_heads, self.num_kv_heads or self.num_heads
        if heads % kv_heads:
            raise ModelFolderError(
                f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {kv_heads}"
            )
        if not self.head_dim and self.hidden_size % heads:
            raise ModelFolderError(
                f"hidden_size = {self.hidden_size} must be a multiple of num_attention_heads = {heads}"
                " where head_dim is not given"
            )
        head_dim = self.head_dim or self.hidden_size // heads
        if head_dim % 2 or not 4 <= head_dim <= 1_024:
            raise ModelFolderError(
                f"head_dim must be an even number from 4 to 1024, found {head_dim}"
            )
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.rope, name, ())
            is_longrope = self.rope is not None and self.rope.rope_type == "longrope"
            if is_longrope and len(factors) != head_dim // 2:
                raise ModelFolderError(
                    f"{name} of the rope parameters must have head_dim / 2 = {head_dim // 2} numbers,"
                    f" found {len(factors)}"
                )
        kind: LayerType = "full_attention" if self.sliding_window is None else "sliding_attention"
        layer_types = self.layer_types or (kind,) * self.num_layers
        assert len(layer_types) == self.num_layers
        defaults = {"num_kv_heads": kv_heads, "head_dim": head_dim, "layer_types": layer_types}
        for name, value in defaults.items():
            object.__setattr__(self, name, value)

    @property
    def max_context(self) -> int:
        """Maximum number of tokens in a sequence.

        It is the length that the checkpoint states, which is also that of a table of learned positions. `yarn` and
        `dynamic` checkpoints often state the length before the extension; then it is that length times the factor.
        """
        stated, rope = self.max_position_embeddings, self.rope
        if rope is not None and rope.rope_type in ("yarn", "dynamic"):
            return max(stated, math.floor(rope.original_max_positions * rope.factor))
        return stated

    @functools.cached_property
    def network(self) -> Network:
        """The function that the model computes."""
        norm = Norm(self.norm_eps, self.norm, self.norms_add_one)
        mlp = Dense(self.intermediate_size, self.activation, self.gated_mlp, self.mlp_bias)

        def attention(layer: int) -> Attention:
            window = self.layer_window(layer)
            rotary = self.rope if window is None or self.local_rope is None else self.local_rope
            return Attention(
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.softmax_scale,
                window,
                rotary,
                dataclasses.replace(norm, kind="rms") if self.qk_norm else None,
                self.attention_softcap,
                self.attention_bias,
                self.attention_output_bias,
            )

        learned = LearnedPositions(self.max_position_embeddings, self.position_offset)
        return Network(
            self.vocab_size,
            self.hidden_size,
            tuple(
                Layer(attention(layer), mlp, norm, self.post_norms)
                for layer in range(self.num_layers)
            ),
            norm,
            self.hidden_size**0.5 if self.scale_embeddings else 1.0,
            learned if self.rope is None else None,
            self.logit_softcap,
            self.tie_word_embeddings,
        )

    @property
    def mixes_attention(self) -> bool:
        """Whether some layers have a sliding window and others attend to all tokens."""
        return len(set(self.layer_types)) > 1

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores of the attention."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def beyond_llama(self) -> tuple[str, ...]:
        """The parts of the model, in words, that the layers of Llama, Mistral and Qwen do not have.

        The C library for CPUs computes none of them, the single-launch step only those of Gemma 3 for one sequence.
        """
        parts = {
            "layer norms": self.norm == "layer",
            "norms after attention and MLP": self.post_norms,
            f"{self.activation} activation": self.activation != "silu",
            "MLP without a gate": not self.gated_mlp,
            "learned positions": self.rope is None,
            "rotary embedding of its own for layers with a sliding window": self.local_rope
            is not None,
            "factor on embeddings": self.scale_embeddings,
            "softcap of attention scores": self.attention_softcap is not None,
            "softcap of logits": self.logit_softcap is not None,
        }
        return tuple(name for name, has in parts.items() if has)

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * heads + 2 * kv_heads)
        attention += self.attention_bias * (heads + 2 * kv_heads)
        attention += (
            self.attention_output_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim
        )
        inner = (1 + self.gated_mlp) * self.intermediate_size
        mlp = self.hidden_size * (inner + self.intermediate_size)
        mlp += self.mlp_bias * (inner + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        if self.rope is None:
            embeddings += (self.max_position_embeddings + self.position_offset) * self.hidden_size
        norm = self.hidden_size * (2 if self.norm == "layer" else 1)
        layer = attention + mlp + norm * (4 if self.post_norms else 2)
        return self.num_layers * layer + embeddings + norm

    def layer_window(self, layer: int) -> int | None:
        """Return the number of tokens that layer `layer` attends to, including the current one; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None
