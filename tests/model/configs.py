"""Configurations of models for tests, with any combination of parts, also such as no family has."""

import dataclasses

from model.checkpoint.config import ModelConfig, max_context
from model.network.spec import Attention, Dense, Layer, Network, Norm, Positions, Rotary


def model_config(
    *,
    architecture="LlamaForCausalLM",
    vocab_size,
    hidden_size,
    intermediate_size,
    num_layers,
    num_heads,
    num_kv_heads=None,
    head_dim=None,
    max_position_embeddings,
    norm="rms",
    norm_eps=1e-6,
    norms_add_one=False,
    norm_bias=True,
    post_norms=False,
    pre_norms=True,
    parallel=False,
    shared_norm=False,
    activation="silu",
    gated_mlp=True,
    rope=Rotary(),  # noqa: B008 - immutable
    local_rope=None,
    position_offset=0,
    scale_embeddings=False,
    query_pre_attn_scalar=None,
    attention_softcap=None,
    logit_softcap=None,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    joint_qk_norm=False,
    qk_norm_by_head=False,
    tie_word_embeddings=False,
    head_bias=False,
    sliding_window=None,
    layer_types=(),
    dtype="float32",
):
    """Build a configuration, most of whose arguments have the names of keys in config.json.

    Args:
        norm: "rms" or "layer".
        norms_add_one: whether weights of norms are held in float32.
        rope: of all layers; None for a table of learned positions.
        local_rope: of layers with a window, where it is another one.
        layer_types: of each layer, "sliding_attention" for one with the window; by default all have it.
    """
    arguments = dict(locals())
    norm = Norm(norm_eps, norm, norms_add_one, norm_bias)
    dim = head_dim or hidden_size // num_heads
    mixer = Attention(
        num_heads,
        num_kv_heads or num_heads,
        dim,
        (query_pre_attn_scalar or dim) ** -0.5,
        None,
        rope,
        norm if qk_norm or joint_qk_norm or qk_norm_by_head else None,
        joint_qk_norm,
        qk_norm_by_head,
        attention_softcap,
        attention_bias,
        attention_output_bias,
    )
    mlp = Dense(intermediate_size, activation, gated_mlp, mlp_bias)
    layers = []
    for kind in layer_types or ("sliding_attention",) * num_layers:
        window = sliding_window if kind == "sliding_attention" else None
        rotary = rope if window is None else local_rope or rope
        attention = dataclasses.replace(mixer, window=window, rotary=rotary)
        layers.append(Layer(attention, mlp, norm, post_norms, pre_norms, parallel, shared_norm))
    network = Network(
        vocab_size,
        hidden_size,
        tuple(layers),
        norm,
        hidden_size**0.5 if scale_embeddings else 1.0,
        Positions(max_position_embeddings, position_offset) if rope is None else None,
        logit_softcap,
        tie_word_embeddings,
        head_bias,
    )
    return ModelConfig(
        architecture=architecture,
        network=network,
        max_context=max_context(network, max_position_embeddings),
        dtype=dtype,
        content=arguments,
    )


def changed(config, **changes):
    """Return a configuration that `model_config` made, with other arguments."""
    return model_config(**config.content | changes)


def read_again(config, **keys):
    """Return a configuration that was read from config.json, with other keys."""
    return ModelConfig.from_dict(config.content | keys)
