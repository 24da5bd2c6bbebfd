# ruff: noqa: D102
"""Sizes and parts of the layers under flat names, for the readers of a configuration that do not read its network.

TODO: delete, once all of them do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.network.spec import ActivationName, Attention, Dense, Network, Norm, Rotary


class FlatConfig:
    """Names for what all layers of a network have in common."""

    network: Network

    @property
    def _mixers(self) -> list[Attention]:
        return [layer.mixer for layer in self.network.layers]

    @property
    def _mlp(self) -> Dense:
        return self.network.layers[0].mlp

    @property
    def _norm(self) -> Norm:
        return self.network.norm

    @property
    def vocab_size(self) -> int:
        return self.network.vocab

    @property
    def hidden_size(self) -> int:
        return self.network.hidden

    @property
    def intermediate_size(self) -> int:
        return self._mlp.inner

    @property
    def num_layers(self) -> int:
        return len(self.network.layers)

    @property
    def num_heads(self) -> int:
        return self._mixers[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self._mixers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._mixers[0].head_dim

    @property
    def max_position_embeddings(self) -> int:
        positions = self.network.positions
        return positions.count if positions else 0

    @property
    def position_offset(self) -> int:
        positions = self.network.positions
        return positions.offset if positions else 0

    @property
    def norm(self) -> str:
        return self._norm.kind

    @property
    def norm_eps(self) -> float:
        return self._norm.eps

    @property
    def norms_add_one(self) -> bool:
        return self._norm.float32

    @property
    def post_norms(self) -> bool:
        return self.network.layers[0].post_norms

    @property
    def activation(self) -> ActivationName:
        return self._mlp.activation

    @property
    def gated_mlp(self) -> bool:
        return self._mlp.gated

    @property
    def rope(self) -> Rotary | None:
        full = [it.rotary for it in self._mixers if it.window is None]
        return (full or [self._mixers[0].rotary])[0]

    @property
    def local_rope(self) -> Rotary | None:
        local = [it.rotary for it in self._mixers if it.window is not None]
        return local[0] if local and local[0] != self.rope else None

    @property
    def scale_embeddings(self) -> bool:
        return self.network.embedding_factor != 1

    @property
    def attention_softcap(self) -> float | None:
        return self._mixers[0].softcap

    @property
    def logit_softcap(self) -> float | None:
        return self.network.logit_softcap

    @property
    def attention_bias(self) -> bool:
        return self._mixers[0].bias

    @property
    def attention_output_bias(self) -> bool:
        return self._mixers[0].output_bias

    @property
    def mlp_bias(self) -> bool:
        return self._mlp.bias

    @property
    def qk_norm(self) -> bool:
        return self._mixers[0].qk_norm is not None

    @property
    def tie_word_embeddings(self) -> bool:
        return self.network.tied

    @property
    def layer_types(self) -> tuple[str, ...]:
        kinds = ("full_attention", "sliding_attention")
        return tuple(kinds[it.window is not None] for it in self._mixers)

    @property
    def sliding_window(self) -> int | None:
        return next((it.window for it in self._mixers if it.window is not None), None)

    @property
    def mixes_attention(self) -> bool:
        return len(set(self.layer_types)) > 1

    @property
    def softmax_scale(self) -> float:
        return self._mixers[0].scale

    @property
    def beyond_llama(self) -> tuple[str, ...]:
        parts = {
            "layer norms": self.norm == "layer",
            "norms after attention and MLP": self.post_norms,
            f"{self.activation} activation": self.activation != "silu",
            "MLP without a gate": not self.gated_mlp,
            "learned positions": self.network.positions is not None,
            "rotary embedding of its own for layers with a sliding window": self.local_rope
            is not None,
            "factor on embeddings": self.scale_embeddings,
            "softcap of attention scores": self.attention_softcap is not None,
            "softcap of logits": self.logit_softcap is not None,
        }
        return tuple(name for name, has in parts.items() if has)

    @property
    def num_parameters(self) -> int:
        return self.network.num_parameters

    def layer_window(self, layer: int) -> int | None:
        return self._mixers[layer].window
