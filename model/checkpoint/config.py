"""A checkpoint's configuration, checked before anything is built from it.

`ModelConfig` is what the rest of the package reads; how it is parsed from `config.json` lives in
`model.checkpoint.config_reader`. Knows no tensors: the front end imports it without torch.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]
LayerType = Literal["full_attention", "sliding_attention"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """How positions turn into rotations; fields a variant does not use keep their defaults.

    Attributes:
        rope_type: the scaling variant.
        theta: base of the geometric series of wavelengths.
        factor: how many times the original context is stretched.
        original_max_positions: tokens of the context before stretching (dynamic, yarn, llama3).
        low_freq_factor: llama3; wavelengths above original / low_freq_factor are divided by factor.
        high_freq_factor: llama3; wavelengths below original / high_freq_factor are kept.
        attention_factor: multiplies cosine and sine (yarn); 1 elsewhere.
        beta_fast: yarn; dimensions turning more often than this over the original context are kept.
        beta_slow: yarn; dimensions turning less often than this are divided by factor.
        truncate: yarn; whether the two borders are rounded outwards to whole dimensions.
    """

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder model.

    Attributes:
        architecture: one of `model.checkpoint.config_reader.ARCHITECTURES`, as `config.json` names it.
        num_kv_heads: divides num_heads; equal to it for plain multi-head attention, 1 for MQA.
        head_dim: even; not necessarily hidden_size / num_heads.
        attention_bias: whether the q, k and v projections have a bias.
        attention_output_bias: whether the output projection of the attention has one.
        mlp_bias: whether the three projections of the MLP have one.
        qk_norm: whether queries and keys are normalised per head before the rotation (Qwen3).
        sliding_window: tokens a sliding layer attends to, its own included; None where none slides.
        layer_types: one entry per layer.
        max_position_embeddings: tokens, as the checkpoint states it; see `max_context`.
        dtype: the checkpoint's own: "float32", "bfloat16" or "float16".
        eos_token_ids: every id that ends a generation, of config.json and generation_config.json.
        initializer_range: standard deviation of freshly initialised weights.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    layer_types: tuple[LayerType, ...] = ()
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if not self.layer_types:
            kind: LayerType = (
                "full_attention" if self.sliding_window is None else "sliding_attention"
            )
            object.__setattr__(self, "layer_types", (kind,) * self.num_layers)
        assert len(self.layer_types) == self.num_layers
        assert self.num_heads % self.num_kv_heads == 0

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read `config.json` and, where there is one, `generation_config.json`.

        Args:
            path: a Hugging Face checkpoint folder.

        Raises:
            ModelFolderError: a file is missing or broken, or a value is missing, of the wrong type
                or outside its limits.
            UnsupportedModelError: the architecture or a feature is not supported.
        """
        from model.checkpoint.config_reader import read_folder  # noqa: PLC0415 - the reader imports this module

        return read_folder(Path(path))

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None
    ) -> ModelConfig:
        """Check the parsed content of `config.json`.

        Args:
            config: in the classic form (`rope_scaling`, `torch_dtype`) or that of transformers 5
                (`rope_parameters`, `dtype`).
            generation_config: its end-of-sequence ids are added to those of `config`.

        Raises:
            ModelFolderError: a value is missing, of the wrong type or outside its limits.
            UnsupportedModelError: the architecture or a feature is not supported.
        """
        from model.checkpoint.config_reader import parse  # noqa: PLC0415 - the reader imports this module

        return parse(config, generation_config or {})

    @property
    def max_context(self) -> int:
        """Tokens a sequence may have.

        The checkpoint's own figure, except that `yarn` and `dynamic` checkpoints often keep stating
        the length before stretching: then it is that length times the factor.
        """
        stated, rope = self.max_position_embeddings, self.rope
        if rope.rope_type in ("yarn", "dynamic"):
            return max(stated, math.floor(rope.original_max_positions * rope.factor))
        return stated

    @property
    def mixes_attention(self) -> bool:
        """Whether some layers slide and others see everything."""
        return len(set(self.layer_types)) > 1

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * heads + 2 * kv_heads)
        attention += self.attention_bias * (heads + 2 * kv_heads)
        attention += (
            self.attention_output_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim
        )
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        layer = attention + mlp + 2 * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Write the configuration as `config.json` holds it, in the form every version reads."""
        from model.checkpoint.config_writer import to_dict  # noqa: PLC0415 - the writer imports this module

        return to_dict(self)

    def layer_window(self, layer: int) -> int | None:
        """Tokens that layer `layer` attends to, its own included; None for all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None
