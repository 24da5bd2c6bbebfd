"""Tiny checkpoints in every stored format, for comparisons with `transformers`: `benchmarks.parity`, `docs/models.md`.

A sample saves a checkpoint in the format to a folder and returns it, and a folder with the same values as full numbers.
"""

import json
import shutil

import safetensors.torch
import torch

from kernels.weight_format import FP8_ROWS, WeightFormat
from kernels.weights import quantize
from model.gguf.tensor_types import QUANTIZED
from tests.model.checkpoint.compressed import FILE, arguments, compress, group, write_config
from tests.model.checkpoint.hf_checkpoints import CASES, Case
from tests.model.checkpoint.packed_checkpoints import (
    awq_checkpoint,
    gptq_checkpoint,
    packed_checkpoint,
)
from tests.model.gguf.written import ARCHITECTURES, add_bytes
from tests.model.gguf.written import write as write_gguf
from tests.model.gguf.written_hybrids import HYBRIDS
from tests.model.gguf.written_hybrids import write as write_hybrid

MATRICES = ("_proj.weight", ".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
FP8 = {"type": "float"}
ODD = Case(
    "Llama", {"hidden_size": 48, "intermediate_size": 80, "head_dim": 12, "num_attention_heads": 4}
)
"""Of sizes that no block of 32 divides."""


def in_fp8(tensors, form, scale_name, change=lambda scale: scale, keep=()):
    """Round the matrices of layers to FP8, those whose names have a part of `keep` excepted.

    Returns tensors with their scales, and their values as full numbers by the formula number x scale.

    Args:
        form: rows, or blocks.
        scale_name: the last component of the names of the scales.
        change: makes the stored scales from those of `Weight`.
    """
    stored, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(MATRICES) or any(part in name for part in keep):
            continue
        weight = quantize(tensor, form)
        scale = change(weight.scale)
        stored |= {name: weight.numbers, f"{name.removesuffix('weight')}{scale_name}": scale}
        spread = scale.float()
        if form.scales == "group":
            spread = spread.repeat_interleave(form.group, 1)[:, : tensor.shape[1]]
        elif form.scales == "block":
            spread = spread.repeat_interleave(form.group, 0).repeat_interleave(form.group, 1)
            spread = spread[: tensor.shape[0], : tensor.shape[1]]
        elif spread.ndim == 1 and len(spread) > 1:
            spread = spread[:, None]
        values[name] = weight.numbers.float() * spread
    return stored, values


def store(folder, form, scale_name, described, change=lambda scale: scale, keep=()):
    """Round a folder's matrices to FP8 as `in_fp8`; return a folder beside it with full numbers."""
    exact = folder.with_name(f"{folder.name} exact")
    shutil.copytree(folder, exact)
    tensors = safetensors.torch.load_file(folder / FILE)
    stored, values = in_fp8(tensors, form, scale_name, change, keep)
    safetensors.torch.save_file(stored, folder / FILE)
    safetensors.torch.save_file(values, exact / FILE)
    write_config(folder, quantization_config=described)
    return exact


def blocks(size):
    return WeightFormat("fp8-blocks", 8, size, "block")


def library(form, weights, case=None, **keys):
    """Return a sample that compressed-tensors makes."""

    def save(folder):
        (case or CASES["llama"]).save(folder / "it")
        return folder / "it", compress(folder / "it", {"group_0": group(weights)}, form, **keys)

    return save


def formula(case, *arguments, **keys):
    """Return a sample that `store` makes."""

    def save(folder):
        case.save(folder / "it")
        return folder / "it", store(folder / "it", *arguments, **keys)

    return save


def of_integers(case, write, *arguments, **options):
    """Return a sample that a writer of `packed_checkpoints` makes."""

    def save(folder):
        case.save(folder / "it")
        return folder / "it", write(folder / "it", *arguments, **options)

    return save


def largest(scale):
    """Return one scale for a matrix: any will do, since the numbers stay what they are."""
    return scale.amax()


def modelopt(folder):
    """Save ModelOpt's FP8 with the older file beside config.json, scales of activations and of the cache."""
    CASES["llama"].save(folder / "it")
    exact = store(folder / "it", FP8_ROWS, "weight_scale", None, largest)
    tensors = safetensors.torch.load_file(folder / "it" / FILE)
    for name in [it for it in tensors if it.endswith("_proj.weight_scale")]:
        tensors[name.replace("weight_scale", "input_scale")] = torch.ones(())
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    safetensors.torch.save_file(tensors, folder / "it" / FILE)
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": described}
    (folder / "it" / "hf_quant_config.json").write_text(json.dumps(content))
    return folder / "it", exact


HF_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}


def in_gguf(arch, kinds):
    """Return a function that writes a GGUF file, and the values that the `gguf` package computes to a folder."""

    def save(folder):
        file, exact = folder / "model.gguf", folder / "exact"
        write = write_hybrid if arch in HYBRIDS else write_gguf
        write(file, arch, kinds, tokenizer=add_bytes, seed=100).save_pretrained(exact)
        return file, exact

    return save


SAMPLES = {
    "int-quantized": {
        "channel": library("int-quantized", arguments()),
        "tensor": library("int-quantized", arguments(strategy="tensor")),
        "group": library("int-quantized", arguments(strategy="group", group_size=16), ODD),
        "asymmetric": library("int-quantized", arguments(symmetric=False)),
        "group, asymmetric": library(
            "int-quantized", arguments(symmetric=False, strategy="group", group_size=32)
        ),
    },
    "float-quantized": {
        "tensor": library("float-quantized", arguments(**FP8, strategy="tensor")),
        "channel": library("float-quantized", arguments(**FP8), ODD),
        "group": library("float-quantized", arguments(**FP8, strategy="group", group_size=32)),
        "block": library("float-quantized", arguments(**FP8, strategy="block", block_structure=[32, 32]), ODD),
        "ignored modules": library(
            "float-quantized", arguments(**FP8), ignore=("lm_head", "re:.*k_proj", "model.layers.1.mlp.down_proj")
        ),
    },
    "fp8": {
        "blocks": formula(CASES["qwen3"], blocks(32), "weight_scale_inv", HF_FP8 | {"weight_block_size": [32, 32]}),
        "blocks that do not divide": formula(
            ODD, blocks(32), "weight_scale_inv", HF_FP8 | {"weight_block_size": [32, 32]}
        ),
        "one scale": formula(
            CASES["llama"], FP8_ROWS, "weight_scale_inv", HF_FP8 | {"weight_block_size": None}, largest
        ),
        "one scale, static, of AutoFP8": formula(
            CASES["llama"], FP8_ROWS, "weight_scale", HF_FP8 | {"activation_scheme": "static"}, largest,
            keep=("layers.1.mlp",),
        ),
    },
    "fbgemm_fp8": {
        "channel": formula(
            ODD, FP8_ROWS, "weight_scale", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            lambda scale: scale[:, None],
        ),
    },
    "modelopt": {"tensor": modelopt},
    "pack-quantized": {
        "4 bits, group": library("pack-quantized", arguments(num_bits=4, strategy="group", group_size=16), ODD),
        "4 bits, group, asymmetric": library(
            "pack-quantized", arguments(num_bits=4, symmetric=False, strategy="group", group_size=32)
        ),
        "4 bits, channel": library("pack-quantized", arguments(num_bits=4)),
        "8 bits, channel": library("pack-quantized", arguments()),
        "8 bits, channel, asymmetric": library("pack-quantized", arguments(symmetric=False)),
        "act-order": of_integers(CASES["llama"], packed_checkpoint, act_order=True),
    },
    "awq": {
        "groups of 32": of_integers(CASES["qwen3"], awq_checkpoint),
        "groups that do not divide": of_integers(ODD, awq_checkpoint, 64),
        "symmetric, one group": of_integers(CASES["llama"], awq_checkpoint, -1, zero_point=False),
    },
    "gptq": {
        "4 bits": of_integers(CASES["qwen2"], gptq_checkpoint),
        "4 bits, asymmetric, groups that do not divide": of_integers(ODD, gptq_checkpoint, 32, sym=False),
        "8 bits, one group": of_integers(CASES["llama"], gptq_checkpoint, -1, bits=8),
        "act-order": of_integers(CASES["llama"], gptq_checkpoint, act_order=True),
        "act-order, asymmetric, v2": of_integers(
            CASES["llama"], gptq_checkpoint, act_order=True, sym=False, version=2
        ),
        "orders that differ in q, k and v": of_integers(
            CASES["llama"], gptq_checkpoint, act_order=True, seed=lambda name: sum(map(ord, name))
        ),
    },
    **{name: {"llama": in_gguf("llama", name)} for name in QUANTIZED},
    "Q4_K": {
        f"{arch} with Q6_K": in_gguf(arch, lambda name: "Q6_K" if "attn_v" in name else "Q4_K")
        for arch in (*ARCHITECTURES, *HYBRIDS)
    },
}  # fmt: skip
"""By the name of the format and what is particular of the sample."""
