"""The sizes and parameters of a model whose decode step is a single launch.

Dimensions: V vocabulary, C hidden size, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight


class StepShape(NamedTuple):
    """Sizes of a model.

    Attributes:
        activation: of the MLP's gate, "silu" or "gelu_tanh".
        embedding_factor: factor on the embedding, which is rounded to the model's dtype.
        post_norms: whether the outputs of attention and MLP are normalized before they are added.
        float32_norms: whether the gains of norms are in float32 instead of the model's dtype.
        local_rope: whether layers with a sliding window have another rotation.
    """

    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    softmax_scale: float
    activation: str = "silu"
    embedding_factor: float = 1.0
    post_norms: bool = False
    float32_norms: bool = False
    local_rope: bool = False


class LayerWeights(NamedTuple):
    """Parameters of a layer, contiguous. The matrices of all layers have one format, one that the kernel reads.

    Attributes:
        qkv: [(H + 2 * K) * D, C].
        output: [C, H * D].
        gate_up: [2 * inner size, C].
        down: [C, inner size].
        input_norm: [C], in the model's dtype or float32, as are all norms of the model.
        mlp_norm: [C].
        q_norm: [D], as is `k_norm`; None where the family has none.
        qkv_bias: [(H + 2 * K) * D] or None.
        window: tokens that the layer attends, the current one included; None if all.
        output_norm: [C], of the norm of attention's output before it is added to the residual stream; None where the
            family has none.
        down_norm: [C], the same of the MLP's output.
    """

    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None
    window: int | None = None
    output_norm: Tensor | None = None
    down_norm: Tensor | None = None


MATRICES: Final = LayerWeights._fields[:4]
"""Names of a layer's matrices."""


class StepWeights(NamedTuple):
    """Parameters of a model; the kernel keeps their addresses, so none may be replaced.

    Attributes:
        embedding: [V, C].
        head: [V, C].
        norm: [C], of the norm after the last layer.
    """

    shape: StepShape
    layers: list[LayerWeights]
    embedding: Tensor
    head: Tensor
    norm: Tensor
