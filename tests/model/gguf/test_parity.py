"""Models in GGUF files compared with transformers on the weights that the `gguf` package dequantizes."""

import gguf
import numpy as np
import pytest
import torch
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model, load_part
from model.errors import WeightsError
from tests.model.executors.paged import greedy, logits_in_chunks
from tests.model.gguf.written import ARCHITECTURES, TYPES, add_bytes, build, write
from tests.model.network.ranks import ThreadRanks
from tests.model.oracle import generated

STEPS = 120
PROMPT = list(range(3, 100, 4))
TOLERANCE = 1e-4


def load(file, *, kept=True, pack=True):
    config = ModelConfig.from_folder(file)
    form = config.weight_format if kept else None
    return load_model(file, config, torch.float32, "cpu", weight_format=form, pack=pack)


def difference(model, oracle):
    """Return the largest difference of log-probabilities over a prompt, and whether the next tokens are the same."""
    ids = [(7 * i) % 300 + 2 for i in range(100)]
    ours = logits_in_chunks(model, ids, 33).log_softmax(-1)
    with torch.inference_mode():
        theirs = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    tokens, _ = greedy(model, PROMPT, STEPS)
    return float((ours - theirs).abs().max()), tokens == generated(oracle, PROMPT, STEPS).tokens


@pytest.mark.parametrize("kind", TYPES)
def test_each_type_of_tensor_gives_the_tokens_of_transformers(tmp_path, kind):
    file = tmp_path / "model.gguf"
    oracle = write(file, "llama", kind)

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_architecture_gives_the_tokens_of_transformers(tmp_path, arch):
    file = tmp_path / "model.gguf"
    oracle = write(file, arch, "Q8_0")

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q4_K", "Q6_K"])
def test_heads_of_values_in_the_order_of_llama_cpp_keep_their_scales(tmp_path, kind):
    file = tmp_path / "model.gguf"
    oracle = write(file, "qwen35", kind)

    model = load(file)

    if kind != "F16":
        assert all(it.is_quantized for it in (model.weight_format, *model.other_formats))
    largest, is_same = difference(model, oracle)
    assert largest < TOLERANCE
    assert is_same


def test_equal_numbers_of_heads_have_the_order_of_a_folder(tmp_path):
    file = tmp_path / "model.gguf"
    oracle = write(file, "qwen35", "Q8_0", linear_num_value_heads=2)

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


def test_heads_that_would_divide_a_group_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    write(file, "qwen35", "Q8_0", linear_value_head_dim=48, linear_num_value_heads=4)

    with pytest.raises(WeightsError, match="heads of 48 values divide groups of 32"):
        load(file)


U32, F32, TEXT = (gguf.GGUFValueType[it] for it in ("UINT32", "FLOAT32", "STRING"))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1 + 0.02 * i for i in range(24)],
    "long_factor": [1 + 0.5 * i for i in range(24)], "partial_rotary_factor": 0.75,
}  # fmt: skip
FULL = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}


def factors_of_llama3(dims=64):
    """Return the factors by which llama.cpp's conversion says that the frequencies are divided."""
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, dims, 2) / dims)
    lengths = 2 * torch.pi / frequencies
    smooth = (64 / lengths - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / 8.0 + smooth)
    factors = torch.where(lengths < 64 / 4.0, 1.0, torch.where(lengths > 64 / 1.0, 8.0, between))
    return factors.numpy().astype(np.float32)


CASES = {
    "llama tied": ("llama", {}, {"tie_word_embeddings": True}, {}),
    "llama biases": ("llama", {}, {"attention_bias": True, "mlp_bias": True}, {}),
    "llama one key head": ("llama", {}, {"num_key_value_heads": 1}, {}),
    "llama other heads": ("llama", {}, {"head_dim": 32}, {}),
    "llama 3 factors": (
        "llama", {}, {"rope_parameters": LLAMA3}, {"rope_freqs.weight": factors_of_llama3()},
    ),
    "llama linear": (
        "llama",
        {"llama.rope.scaling.type": ("linear", TEXT), "llama.rope.scaling.factor": (4.0, F32)},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
        {},
    ),
    "mistral window": ("mistral", {}, {"sliding_window": 16}, {}),
    "qwen2 yarn": (
        "qwen2",
        {"qwen2.rope.scaling.type": ("yarn", TEXT), "qwen2.rope.scaling.factor": (4.0, F32),
         "qwen2.rope.scaling.original_context_length": (128, U32)},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
                             "original_max_position_embeddings": 128}},
        {},
    ),
    "qwen3 tied": ("qwen3", {}, {"tie_word_embeddings": True}, {}),
    "gemma2 27B": ("gemma2", {}, {"num_hidden_layers": 46, "query_pre_attn_scalar": 64, "hidden_size": 256}, {}),
    "gemma3 linear": (
        "gemma3",
        {"gemma3.rope.scaling.type": ("linear", TEXT), "gemma3.rope.scaling.factor": (8.0, F32)},
        {"rope_parameters": {"full_attention": FULL, "sliding_attention": LOCAL}},
        {},
    ),
    "phi3 window": ("phi3", {}, {"sliding_window": 16}, {}),
    "phi3 longrope": (
        "phi3",
        {"phi3.rope.scaling.original_context_length": (64, U32)},
        {"rope_parameters": LONG, "original_max_position_embeddings": 64, "sliding_window": None},
        {"rope_factors_short.weight": np.array(LONG["short_factor"], np.float32),
         "rope_factors_long.weight": np.array(LONG["long_factor"], np.float32)},
    ),
}  # fmt: skip
SLOW = {"gemma2 27B", "llama one key head", "llama linear", "qwen3 tied"}


@pytest.mark.parametrize(
    "name", [pytest.param(it, marks=pytest.mark.slow if it in SLOW else ()) for it in CASES]
)
def test_what_the_metadata_say_of_an_architecture_is_computed(tmp_path, name):
    arch, metadata, changes, tensors = CASES[name]
    file = tmp_path / "model.gguf"
    oracle = write(file, arch, "Q4_0", metadata, tensors=tensors, **changes)

    largest, is_same = difference(load(file), oracle)

    assert largest < TOLERANCE
    assert is_same


def test_transformers_reads_the_same_values_from_a_file_of_llamas(tmp_path):
    file = tmp_path / "model.gguf"
    oracle = write(
        file, "llama", lambda name: "Q8_0" if "attn" in name else "Q4_0", tokenizer=add_bytes
    )

    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=build("llama"))

    values = dict(oracle.named_parameters())
    assert theirs["tensors"].keys() == values.keys()
    for name, tensor in theirs["tensors"].items():
        assert torch.equal(tensor, values[name]), name


def test_types_that_differ_within_a_stack_are_held_as_integers_without_loss(tmp_path, caplog):
    """As in Q4_K_M, where the values of every second layer have more bits."""
    kinds = {
        "blk.0.attn_v.weight": "Q6_K",
        "blk.1.ffn_up.weight": "Q8_0",
        "blk.1.attn_k.weight": "F16",
    }
    file = tmp_path / "model.gguf"
    oracle = write(file, "llama", lambda name: kinds.get(name, "Q4_K"))

    with caplog.at_level("INFO"):
        model = load(file, pack=False)

    held = {
        f"{index}.{name}": weight.format
        for index, layer in enumerate(model.decoder_layers)
        for name, weight in layer.matrices.items()
    }
    largest, is_same = difference(model, oracle)
    assert largest < TOLERANCE
    assert is_same
    assert {name: (form.name, form.bits, form.group) for name, form in held.items()} == {
        "0.qkv": ("Q4_K+Q6_K", 8, 16),
        "0.output": ("Q4_K", 4, 32),
        "0.gate_up": ("Q4_K", 4, 32),
        "0.down": ("Q4_K", 4, 32),
        "1.qkv": ("float32", 32, 0),
        "1.output": ("Q4_K", 4, 32),
        "1.gate_up": ("Q4_K+Q8_0", 8, 32),
        "1.down": ("Q4_K", 4, 32),
    }
    assert "stored as Q4_K and Q6_K, held as 8 bits in groups of 16: layers.0.qkv" in caplog.text
    assert "stored as Q4_K and full numbers, held as full numbers: layers.1.qkv" in caplog.text


def test_a_part_of_a_rank_has_the_numbers_of_the_file(tmp_path):
    file = tmp_path / "model.gguf"
    write(file, "llama", lambda name: "Q6_K" if "attn_v" in name else "Q4_K")
    config = ModelConfig.from_folder(file)
    whole = load(file, kept=False, pack=False)

    parts = ThreadRanks(2).run(
        lambda rank: load_part(
            file,
            config,
            torch.float32,
            "cpu",
            weight_format=config.weight_format,
            communicator=rank,
        )
    )

    for name in ("qkv", "output", "gate_up", "down"):
        values = [part.layers[0].matrices[name].dequantize() for part in parts]
        expected = whole.layers[0].matrices[name].dequantize()
        assert all(part.layers[0].matrices[name].format.is_quantized for part in parts), name
        if name in ("output", "down"):
            assert torch.equal(torch.cat(values, 1), expected)
        else:
            assert sorted(torch.cat(values).sum(1).tolist()) == sorted(expected.sum(1).tolist())
