"""GGUF files with random weights, written by the `gguf` package, and the same models in transformers."""

import gguf
import numpy as np
import torch
import transformers

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "qwen35", "lfm2")
TYPES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip
_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
"""Places of the float16 numbers of a block, where they are not at its beginning."""
_TWO = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip
_NORMS = {"post_attention_layernorm": "ffn_norm"}
_QWEN35 = {
    "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
_LFM2 = {
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output", "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv", "conv.out_proj": "shortconv.out_proj", "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "ffn_norm": "ffn_norm",
}  # fmt: skip
_WHOLE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_CLASSES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3Text",
    "phi3": "Phi3", "mistral": "Mistral", "qwen35": "Qwen3_5Text", "lfm2": "Lfm2",
}  # fmt: skip
_SHAPE = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "head_dim": 64, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64, "sliding_window": 16,
    "tie_word_embeddings": True, "num_hidden_layers": 3,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def random_rows(kind, shape, seed, deviation=0.05):
    """Return the bytes of a random matrix of a type, and its values as the `gguf` package computes them."""
    rng = np.random.default_rng(seed)
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("F32", "F16", "BF16"):
        values = (rng.standard_normal(shape) * deviation).astype(np.float32)
        raw = gguf.quants.quantize(values, number)
    else:
        block, size = gguf.GGML_QUANT_SIZES[number]
        raw = rng.integers(0, 256, (shape[0], shape[1] // block, size), np.uint8)
        places = _SCALES.get(kind, (0, 2) if kind in _TWO else (0,))
        scale = 1.0
        for _ in range(2):
            for i, place in enumerate(places):
                sign = -1 if i and kind in ("Q4_1", "Q5_1") else 1
                several = np.abs(rng.standard_normal(raw.shape[:2])) * 0.2 + 0.9
                drawn = sign * scale * (7 if sign < 0 else 1) * several
                raw[..., place : place + 2] = drawn.astype(np.float16)[..., None].view(np.uint8)
            scale *= deviation / float(gguf.dequantize(raw.reshape(shape[0], -1), number).std())
        raw = raw.reshape(shape[0], -1)
    return raw, torch.from_numpy(gguf.dequantize(raw, number).copy())


def build(arch, **changes):
    """Return a model in transformers whose parameters `write` replaces."""
    shape = _SHAPE | (_GEMMA if arch in ("gemma2", "gemma3") else {})
    if arch == "gemma3":
        shape |= {"layer_types": _KINDS}
    if arch == "gemma":
        shape |= {"tie_word_embeddings": True}
    if arch == "phi3":
        shape |= {"sliding_window": None}
    if arch == "qwen35":
        shape |= {
            "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
        }  # fmt: skip
    if arch == "lfm2":
        shape |= {
            "num_hidden_layers": 3, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False,
        }  # fmt: skip
    config = getattr(transformers, f"{_CLASSES[arch]}Config")(**(shape | changes))
    config._attn_implementation = "eager"
    name = f"{_CLASSES[arch].removesuffix('Text')}ForCausalLM"
    return getattr(transformers, name)(config).eval()


def write(
    path,
    arch,
    kinds="F32",
    metadata=None,
    tokenizer=None,
    model=None,
    tensors=None,
    seed=0,
    **changes,
):
    """Write a GGUF file with random weights.

    Args:
        path: of the file.
        arch: one of `ARCHITECTURES`, or "mistral", which is Llama's in GGUF.
        kinds: the type of all matrices, or a function that returns it for the name of a tensor in GGUF.
        metadata: further keys, whose values are as the writer's `add_key_value` takes them.
        tokenizer: adds its own keys to the writer.
        tensors: further vectors by their names in GGUF.
        seed: of the weights.
        model: in transformers; None for `build(arch, **changes)`.

    Returns:
        The same model in transformers, with the values that the `gguf` package computes.
    """
    model = model or build(arch, **changes)
    in_gguf = "llama" if arch == "mistral" else arch
    writer = gguf.GGUFWriter(path, in_gguf)
    add_config(writer, in_gguf, model.config)
    for key, (value, kind) in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        sub_type = gguf.GGUFValueType.UINT32 if isinstance(value, list) else None
        writer.add_key_value(key, value, kind, sub_type)
    if tokenizer is not None:
        tokenizer(writer)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    more = {"gemma2": _GEMMA_NORMS, "gemma3": _GEMMA_NORMS, "qwen35": _QWEN35, "lfm2": _LFM2}
    names = _NAMES | more.get(arch, _NORMS)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters(), seed):
            module, _, end = name.rpartition(".")
            prefix = ""
            if module.startswith("model.layers."):
                _, _, index, module = module.split(".", 3)
                prefix = f"blk.{index}."
            whole = _WHOLE.get(f"{module}.{end}")
            short = f"{prefix}{names[module]}.{end}" if whole is None else prefix + whole
            parameter.copy_(_add(writer, short, parameter, kinds, number, arch, model.config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def finish_alone(path, without):
    """Write a file without tensors but an embedding, and without one of the keys."""
    writer = gguf.GGUFWriter(path, "llama")
    add_config(writer, "llama", build("llama").config)
    del writer.kv_data[0][without]
    writer.add_tensor("token_embd.weight", np.zeros((320, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer, name, parameter, kinds, seed, arch, config):
    """Add a tensor to the file and return its values in transformers."""
    if parameter.ndim == 3:  # of a convolution
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.5
        writer.add_tensor(name, _tiled(values[:, 0], name, config).numpy())
        return values
    if parameter.ndim == 1:
        values = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)) + 0.5
        if name.endswith("bias"):
            values = (values - 1) * 0.1
        if name.endswith("ssm_a"):
            writer.add_tensor(name, _tiled(-values.exp(), name, config).numpy())
            return values
        if "ssm_dt" in name:
            writer.add_tensor(name, _tiled(values, name, config).numpy())
            return values
        is_norm = "norm" in name and ("gemma" in arch or (arch == "qwen35" and "ssm" not in name))
        writer.add_tensor(name, _permuted(values, name, arch, config).numpy())
        return values - 1 if is_norm else values
    kind = kinds if isinstance(kinds, str) else kinds(name)
    raw, values = random_rows(kind, tuple(parameter.shape), seed)
    number = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, values.numpy())
    elif kind == "F16":
        writer.add_tensor(name, values.numpy().astype(np.float16))
    else:
        writer.add_tensor(name, raw, raw_dtype=number)
    return _restored(_grouped(values, name, config), name, arch, config)


def _of_values(name, config):
    """Return the rows or columns before heads of values, their size, and whether they are columns; None for others."""
    if config.model_type != "qwen3_5_text":
        return None
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    size = config.linear_value_head_dim
    found = {
        "attn_qkv": (before, size, False),
        "ssm_conv1d": (before, size, False),
        "attn_gate": (0, size, False),
        "ssm_out": (0, size, True),
        **dict.fromkeys(("ssm_a", "ssm_dt", "ssm_beta", "ssm_alpha"), (0, 1, False)),
    }
    return found.get(name.split(".")[2] if name.startswith("blk.") else "")


def _tiled(values, name, config):
    """Return values as llama.cpp's conversion orders heads of values: the first of each key head, then the second."""
    return _with_heads(values, name, config, config_first=True)


def _grouped(values, name, config):
    return _with_heads(values, name, config, config_first=False)


def _with_heads(values, name, config, config_first):
    place = _of_values(name, config)
    if place is None:
        return values
    before, size, columns = place
    turned = values.t() if columns else values
    heads = turned[before:]
    several = config.linear_num_value_heads // config.linear_num_key_heads
    sizes = (config.linear_num_key_heads, several)
    split = heads.reshape(*(sizes if config_first else sizes[::-1]), size, *heads.shape[1:])
    ordered = torch.cat((turned[:before], split.swapaxes(0, 1).reshape(heads.shape)))
    return (ordered.t() if columns else ordered).contiguous()


def _heads(name, arch, config):
    if arch not in ("llama", "mistral"):
        return None
    if ".attn_q." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".attn_k." in name else None


def _permuted(values, name, arch, config):
    """Return rows as llama.cpp's conversion orders them: the two that rotate together beside each other."""
    heads = _heads(name, arch, config)
    if heads is None:
        return values
    return (
        values.reshape(heads, 2, -1, *values.shape[1:])
        .swapaxes(1, 2)
        .reshape(values.shape)
        .contiguous()
    )


def _restored(values, name, arch, config):
    heads = _heads(name, arch, config)
    if heads is None:
        return values
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def add_config(writer, arch, config):
    """Add the keys that llama.cpp's conversion writes."""
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    kv_heads = config.num_key_value_heads
    if arch == "lfm2":
        kv_heads = [kv_heads * (it == "full_attention") for it in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if arch == "qwen35":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_uint32("qwen35.full_attention_interval", 4)
        writer.add_rope_dimension_sections([3, 3, 2, 0])
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(
        int(config.head_dim * (full.get("partial_rotary_factor") or 1.0))
    )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        writer.add_array(
            "gemma3.attention.sliding_window_pattern",
            [it == "sliding_attention" for it in config.layer_types],
        )
    writer.add_bos_token_id(1)


def spelled_bytes():
    """Return the 256 bytes as GPT-2 spells them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    spelled = {byte: chr(byte) for byte in plain}
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


def add_bytes(writer, size=320, pre="gpt-2"):
    """Add a byte-level tokenizer of which each token is a byte; the tokens after those are control tokens."""
    control = ["<|im_start|>", "<|im_end|>", *(f"<|control_{i}|>" for i in range(size - 258))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*spelled_bytes(), *control])
    writer.add_token_types([1] * 256 + [3] * len(control))
    writer.add_eos_token_id(257)


def real_model(file, config):
    """Return a file of Llama's architecture in transformers, with the values that the `gguf` package computes.

    Args:
        file: the file.
        config: the content of a config.json for it.
    """
    kept = {
        key: it for key, it in config.items() if key not in ("quantization_config", "torch_dtype")
    }
    config = transformers.LlamaConfig(**kept)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    stored = {it.name: it for it in gguf.GGUFReader(file).tensors}
    names = _NAMES | _NORMS
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, end = name.rpartition(".")
            prefix = ""
            if module.startswith("model.layers."):
                _, _, index, module = module.split(".", 3)
                prefix = f"blk.{index}."
            short = f"{prefix}{names[module]}.{end}"
            values = gguf.dequantize(stored[short].data, stored[short].tensor_type).copy()
            values = torch.from_numpy(values).view(parameter.shape)
            parameter.copy_(_restored(values, short, "llama", config))
    return model
