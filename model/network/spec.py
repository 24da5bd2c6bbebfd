"""The network of a decoder as frozen data.

A `Network` says which function a model computes, layer by layer. Families (`model.families`) make it from config.json;
parameters, executors, caches and plans follow from it. It does not say how matrices are stored
(`kernels.weights.WeightFormat`) nor on which device they are. This module imports neither PyTorch nor kernels.

What an executor cannot compute of it: `model.executors.support`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from model.network.state import Paged, Shared, StateSpec
from model.network.sublayers import AltUp, Laurel, PerLayerInput, PerLayerTable, Streams

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"]
"""As in `kernels.norms.pytorch`, which this module does not import, because that imports PyTorch, and "xielu", which
has two parameters in each layer.
"""


TEXT: Final = "text"
"""Key of what a message calls a value of a field other than its default."""


@dataclass(frozen=True)
class Rotary:
    """Parameters of the rotary position embedding; fields that a variant does not use keep their defaults.

    All executors read tables of cosines and sines, so that they read every variant.

    Attributes:
        rope_type: the scaling variant.
        theta: base of the geometric series of wavelengths.
        factor: factor by which the original context is extended.
        original_max_positions: tokens of the context before the extension (dynamic, yarn, longrope, llama3).
        low_freq_factor: llama3; wavelengths above original / low_freq_factor are divided by factor.
        high_freq_factor: llama3; wavelengths below original / high_freq_factor are kept.
        attention_factor: multiplies cosine and sine (yarn, longrope); 1 elsewhere.
        beta_fast: yarn; dimensions that rotate more often than this over the original context are kept.
        beta_slow: yarn; dimensions that rotate less often than this are divided by factor.
        truncate: yarn; whether the two borders are rounded outwards to whole dimensions.
        short_factor: longrope; divides the frequency of each pair of dimensions within the original context.
        long_factor: longrope; the same for longer contexts.
        dims: dimensions of a head that rotate, which come first in each half of the head; None for all.
        pairs: proportional; how many pairs of dimensions rotate, with the frequencies that they have where all do.
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    dims: int | None = None
    pairs: int = 0


@dataclass(frozen=True)
class Norm:
    """A norm of vectors.

    Attributes:
        eps: added to the mean square or variance.
        kind: "rms", or "layer" for a layer norm.
        float32: whether its weight is held in float32, because it is a sum of 1 and a stored number, which bfloat16
            would round by up to 2^-9.
        bias: whether a layer norm has one.
    """

    eps: float = 1e-6
    kind: Literal["rms", "layer"] = field(default="rms", metadata={TEXT: "layer norms"})
    float32: bool = field(default=False, metadata={TEXT: "float32 weights of norms"})
    bias: bool = field(default=True, metadata={TEXT: "layer norms without biases"})

    @property
    def has_bias(self) -> bool:
        """Whether the norm is a layer norm with a bias."""
        return self.kind == "layer" and self.bias

    def num_parameters(self, size: int) -> int:
        """Return the number of parameters of a norm of vectors of `size` elements."""
        return size * (2 if self.has_bias else 1)


@dataclass(frozen=True)
class QueryScale:
    """A factor on the queries of a token at position p: 1 + beta * ln(1 + floor(p / original)).

    It is 1 within the original context.

    Attributes:
        beta: how much.
        original: tokens of the original context.
    """

    beta: float
    original: int


@dataclass(frozen=True)
class Attention:
    """Attention with a KV cache.

    Attributes:
        num_heads: H query heads.
        num_kv_heads: K, divides H.
        head_dim: D, even.
        scale: factor on the scores.
        window: tokens that a token attends to, itself included; None for all before it.
        rotary: of queries and keys; None for no rotation.
        qk_norm: of each head of queries and keys before the rotation; None for none.
        joint_qk_norm: whether it is one norm of all query heads, and one of all key heads, instead.
        qk_norm_by_head: whether each head has weights of its own.
        softcap: c in c * tanh(score / c), applied to the scaled scores; None for none.
        bias: whether the q, k and v projections have one.
        output_bias: whether the output projection has one.
        late_qk_norm: whether `qk_norm` is after the rotation instead.
        query_scale: multiplies the queries by position; None for no factor.
        gate: whether the result is multiplied by the sigmoid of a projection of its size, before the output projection.
        value_norm: whether each head of values has an RMS norm without weight, with the eps of `qk_norm`.
        tied_values: whether the value projection is the key projection; keys are then normalized and rotated apart.
        kv_layer: index of the earlier layer whose keys and values it reads; None if it computes them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = field(default=None, metadata={TEXT: "sliding window"})
    rotary: Rotary | None = field(default=Rotary(), metadata={TEXT: "rotary embedding"})
    qk_norm: Norm | None = field(default=None, metadata={TEXT: "norms of queries and keys"})
    joint_qk_norm: bool = field(
        default=False, metadata={TEXT: "norms of all queries and of all keys of a token"}
    )
    qk_norm_by_head: bool = field(
        default=False, metadata={TEXT: "norms of queries and keys with weights of each head"}
    )
    softcap: float | None = field(default=None, metadata={TEXT: "softcap of attention scores"})
    bias: bool = field(default=False, metadata={TEXT: "bias of the q, k and v projections"})
    output_bias: bool = field(default=False, metadata={TEXT: "bias of the output projection"})
    late_qk_norm: bool = field(
        default=False, metadata={TEXT: "norms of queries and keys after the rotation"}
    )
    query_scale: QueryScale | None = field(
        default=None, metadata={TEXT: "scale of queries by position beyond the original context"}
    )
    gate: bool = field(default=False, metadata={TEXT: "gate of the result of attention"})
    value_norm: bool = field(default=False, metadata={TEXT: "norms of values"})
    tied_values: bool = field(default=False, metadata={TEXT: "values from the key projection"})
    kv_layer: int | None = field(
        default=None, metadata={TEXT: "keys and values of an earlier layer"}
    )

    @property
    def projected(self) -> tuple[int, ...]:
        """Outputs of the projections that there are of those of a gate, queries, keys and values, in this order."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        read = (queries,) * (1 + self.gate)
        if self.kv_layer is not None:
            return read
        return (*read, keys) if self.tied_values else (*read, keys, keys)

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        outputs, queries = sum(self.projected), self.num_heads * self.head_dim
        norms = self._num_norm if self.qk_norm else 0
        biases = self.bias * outputs + self.output_bias * hidden
        return hidden * (outputs + queries) + norms + biases

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        queries = self.num_heads * self.head_dim
        return {"qkv": (self.projected, hidden), "output": ((hidden,), queries)}

    @property
    def num_float32(self) -> int:
        """Number of parameters that are float32 in every model."""
        return self._num_norm if self.qk_norm is not None and self.qk_norm.float32 else 0

    @property
    def _num_norm(self) -> int:
        """Number of parameters of the norms of queries and keys, if there are any."""
        has_keys = self.kv_layer is None
        if not (self.joint_qk_norm or self.qk_norm_by_head):
            return (1 + has_keys) * self.head_dim
        return (self.num_heads + has_keys * self.num_kv_heads) * self.head_dim

    def state(self, dtype: str) -> Paged | Shared:
        """Return what a sequence keeps, in a cache of a dtype."""
        if self.kv_layer is not None:
            return Shared(self.kv_layer)
        return Paged(self.num_kv_heads, self.head_dim, dtype)


@dataclass(frozen=True)
class Dense:
    """A multi-layer perceptron of two or, gated, three matrices.

    Attributes:
        inner: F, elements between its matrices.
        activation: f.
        gated: whether f(gate projection) * up projection is between them; else f(projection).
        bias: whether the projections have biases.
        sparsity: s, the share of the gate's outputs that become 0 before the activation if they are distributed
            normally; their s-quantile is subtracted from the others. 0 for all outputs as they are.

    Source: So et al., Primer, 2021, for "relu2", the square of ReLU; Huang and Schlag, Deriving Activation Functions
    Using Integration, 2024 (arXiv 2411.13010), for "xielu".
    """

    inner: int
    activation: ActivationName = field(default="silu", metadata={TEXT: "{} activation"})
    gated: bool = field(default=True, metadata={TEXT: "MLP without a gate"})
    bias: bool = field(default=False, metadata={TEXT: "biases of the MLP"})
    sparsity: float = field(default=0.0, metadata={TEXT: "sparse activations"})

    def matrices(self, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return the outputs of the projections that each matrix stacks, and its inputs."""
        widened = (self.inner,) * (1 + self.gated)
        return {"gate_up": (widened, hidden), "down": ((hidden,), self.inner)}

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters between streams of `hidden` elements."""
        widened = (1 + self.gated) * self.inner
        biases = self.bias * (widened + hidden)
        return hidden * (widened + self.inner) + biases + self.num_activation

    @property
    def num_activation(self) -> int:
        """Number of parameters of the activation."""
        return 2 if self.activation == "xielu" else 0


Mixer: TypeAlias = Any
"""What mixes tokens of a sequence in a layer: `Attention`, or one of `model.network.mixers`."""
MLP: TypeAlias = Dense


@dataclass(frozen=True)
class Layer:
    """A layer: its mixer and then its MLP read the residual stream and add their results to it.

    Attributes:
        norm: of the stream before the mixer, another one before the MLP, and those of their results.
        parallel: whether the MLP reads the stream to which the mixer's result is not yet added.
        shared_norm: whether the norm before the mixer is the one before the MLP too.
        post_norms: whether the results of mixer and MLP are normalized, without bias, before they are added.
        pre_norms: whether the stream is normalized before mixer and MLP.
        per_layer: a third sublayer, which adds what the token is for this layer; None for none.
        scaled: whether the stream is multiplied by a number after the last sublayer.
        laurel: a low-rank sublayer beside the mixer; None for none.
        altup: has several streams, of which mixer and MLP change one; None for one.
    """

    mixer: Mixer
    mlp: MLP
    norm: Norm = Norm()
    post_norms: bool = field(default=False, metadata={TEXT: "norms after attention and MLP"})
    pre_norms: bool = field(
        default=True, metadata={TEXT: "attention and MLP without norms before them"}
    )
    parallel: bool = field(default=False, metadata={TEXT: "attention and MLP in parallel"})
    shared_norm: bool = field(default=False, metadata={TEXT: "shared norm of attention and MLP"})
    per_layer: PerLayerInput | None = field(default=None, metadata={TEXT: "per-layer inputs"})
    scaled: bool = field(default=False, metadata={TEXT: "scale of the stream after a layer"})
    laurel: Laurel | None = field(default=None, metadata={TEXT: "LAuReL"})
    altup: AltUp | None = field(default=None, metadata={TEXT: "AltUp"})

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Its mixer, or those that are beside each other."""
        return getattr(self.mixer, "mixers", (self.mixer,))

    @property
    def parts(self) -> tuple[Any, ...]:
        """The sublayers that it has, mixer and MLP first."""
        others = (self.laurel, self.altup, self.per_layer)
        return (self.mixer, self.mlp, *(it for it in others if it is not None))

    def num_parameters(self, hidden: int) -> int:
        """Return the number of parameters of a layer of a stream of `hidden` elements."""
        norms = (
            self.norm.num_parameters(hidden) * self._num_pre_norms + 2 * hidden * self.post_norms
        )
        parts: int = sum(it.num_parameters(hidden) for it in self.parts)
        return parts + norms + self.scaled

    def num_float32(self, hidden: int) -> int:
        """Return the number of those parameters that are float32 in a model of every dtype."""
        others = sum(it is not None for it in (self.laurel, self.altup, self.per_layer))
        norms = hidden * (self._num_pre_norms + 2 * self.post_norms + others)
        mixer: int = self.mixer.num_float32
        return mixer + norms * self.norm.float32

    @property
    def _num_pre_norms(self) -> int:
        return self.pre_norms * (1 if self.shared_norm else 2)


@dataclass(frozen=True)
class Positions:
    """A table of learned positions, which are added to the embeddings.

    Attributes:
        count: positions that it has.
        offset: rows before that of position 0.
    """

    count: int
    offset: int = 0


@dataclass(frozen=True)
class Modules:
    """What the modules of `transformers` compute of a network: all but the attention of its layers.

    The other parts of the network then say nothing, and its layers have only their mixers, without what is before and
    after the products of queries, keys and values.

    Attributes:
        model_type: of config.json.
        num_parameters: of all modules; 0 before they are built.
    """

    model_type: str
    num_parameters: int = 0


@dataclass(frozen=True)
class Network:
    """A decoder: embedding, layers, final norm, projection to the vocabulary.

    Attributes:
        vocab: V, tokens of the vocabulary.
        hidden: C, elements of the residual stream.
        layers: in order.
        norm: of the stream after the last layer.
        embedding_factor: multiplies the embeddings, rounded to their dtype.
        positions: learned positions; None for none.
        logit_softcap: c in c * tanh(logit / c); None for none.
        tied: whether the projection to the vocabulary is the embedding matrix.
        head_bias: whether the projection to the vocabulary has a bias.
        modules: of `transformers`, which compute the network; None for our executors.
        per_layer: the embeddings of `Layer.per_layer`; None for none.
        streams: how the streams of `Layer.altup` begin and end; None for one stream.
    """

    vocab: int
    hidden: int
    layers: tuple[Layer, ...]
    norm: Norm = Norm()
    embedding_factor: float = field(default=1.0, metadata={TEXT: "factor on embeddings"})
    positions: Positions | None = field(default=None, metadata={TEXT: "learned positions"})
    logit_softcap: float | None = field(default=None, metadata={TEXT: "softcap of logits"})
    tied: bool = False
    head_bias: bool = field(default=False, metadata={TEXT: "bias of the output head"})
    modules: Modules | None = field(default=None, metadata={TEXT: "modules of transformers"})
    per_layer: PerLayerTable | None = field(
        default=None, metadata={TEXT: "embeddings for each layer"}
    )
    streams: Streams | None = field(default=None, metadata={TEXT: "several residual streams"})

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied projection counts once."""
        if self.modules is not None:
            return self.modules.num_parameters
        tables = self.vocab * (1 if self.tied else 2)
        if self.positions is not None:
            tables += self.positions.count + self.positions.offset
        layers = sum(layer.num_parameters(self.hidden) for layer in self.layers)
        outside = self.norm.num_parameters(self.hidden) + self.head_bias * self.vocab
        return layers + tables * self.hidden + outside + self.num_others

    @property
    def num_others(self) -> int:
        """Number of parameters outside the layers of `per_layer` and `streams`."""
        count, hidden = len(self.layers), self.hidden
        tables = 0 if self.per_layer is None else self.per_layer.num_parameters(hidden, count)
        return tables + (0 if self.streams is None else self.streams.num_parameters(hidden))

    def state(self, dtype: object) -> StateSpec:
        """Return what a sequence keeps in all layers.

        Args:
            dtype: of the cache, PyTorch's or its name.
        """
        name = str(dtype).removeprefix("torch.")
        return StateSpec(name, tuple(layer.mixer.state(name) for layer in self.layers))

    def within(self, tokens: int) -> Network:
        """Return a network that computes the same for sequences of up to `tokens` tokens, with the fewest parts."""

        def without_scale(layer: Layer) -> Layer:
            mixer = layer.mixer
            if not isinstance(mixer, Attention) or mixer.query_scale is None:
                return layer
            if mixer.query_scale.original < tokens:
                return layer
            return dataclasses.replace(layer, mixer=dataclasses.replace(mixer, query_scale=None))

        return dataclasses.replace(self, layers=tuple(map(without_scale, self.layers)))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers of the layers with attention, in order."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return tuple(mixer for mixer in mixers if isinstance(mixer, Attention))

    @property
    def num_writing(self) -> int:
        """Number of leading layers, after which each layer reads the keys and values of an earlier one.

        Of a prompt, the layers after them need only the tokens whose logits are wanted.
        """
        last = -1
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer
            if not isinstance(mixer, Attention) or mixer.kv_layer is None:
                last = index
        return last + 1

    @property
    def other_mixers(self) -> tuple[str, ...]:
        """The kinds of the other mixers."""
        kinds = (type(mixer) for layer in self.layers for mixer in layer.mixers)
        return tuple(dict.fromkeys(kind.__name__ for kind in kinds if kind is not Attention))

    @property
    def rotaries(self) -> tuple[tuple[Rotary | None, int], ...]:
        """The distinct rotary embeddings of the layers and their head dims, those of layers without a window first."""
        mixers = sorted(self.attentions, key=lambda mixer: mixer.window is not None)
        return tuple(dict.fromkeys((mixer.rotary, mixer.head_dim) for mixer in mixers))
