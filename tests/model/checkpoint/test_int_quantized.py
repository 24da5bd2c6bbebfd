"""Checkpoints with matrices of 8 bits: read, written, and refused where they differ from what is supported."""

import copy
import json

import pytest
import safetensors.torch
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.formats.int_quantized import INT_QUANTIZED, compress, to_config
from model.checkpoint.formats.table import detect, stored_formats
from model.checkpoint.save import save_checkpoint
from model.checkpoint.weights import load_model
from model.errors import ModelError, WeightsError
from tests.model.checkpoint.hf_checkpoints import CASES

SINGLE = "model.safetensors"
CONFIG = to_config()
QUERY = "model.layers.0.self_attn.q_proj.weight"


def load(folder, **options):
    return load_model(folder, ModelConfig.from_folder(folder), torch.float32, "cpu", **options)


def compress_file(folder, change=lambda tensors: None, names=lambda name: True):
    """Store the matrices of a folder as int8, then change the tensors."""
    tensors = safetensors.torch.load_file(folder / SINGLE)
    for name in [it for it, tensor in tensors.items() if tensor.ndim > 1 and names(it)]:
        tensors[name], tensors[f"{name}_scale"] = compress(tensors[name])
    change(tensors)
    safetensors.torch.save_file(tensors, folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))


def decompress(numbers, scale):
    return numbers.float() * scale


def weights(model):
    return {name: value.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    "case", ["llama", "llama biases", "qwen3 tied biases", "gemma2", "phi3 partial longrope tied"]
)
def test_matrices_are_multiplied_by_the_scales_of_their_rows(case, tmp_path):
    CASES[case].save(tmp_path)
    exact = weights(load(tmp_path, pack=False))
    compress_file(tmp_path, names=lambda name: "embed" not in name)

    found = weights(load(tmp_path, pack=False))

    for name, value in exact.items():
        if value.ndim == 1 or "embed" in name or "lm_head" in name:
            assert name == "lm_head" or torch.equal(found[name], value)
            continue
        expected = decompress(*compress(value))
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0)
        assert not torch.equal(found[name], value)


def test_scales_may_have_one_dimension(tmp_path):
    CASES["llama"].save(tmp_path)
    compress_file(tmp_path)
    expected = weights(load(tmp_path, pack=False))
    CASES["llama"].save(tmp_path)

    def flatten(tensors):
        for name in [it for it in tensors if it.endswith("_scale")]:
            tensors[name] = tensors[name].flatten().bfloat16().float()

    def narrow(tensors):
        flatten(tensors)
        tensors[f"{QUERY}_scale"] = tensors[f"{QUERY}_scale"].bfloat16()

    compress_file(tmp_path, narrow)

    found = weights(load(tmp_path, pack=False))

    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2**-7, atol=0)


def test_a_model_saved_in_8_bits_is_smaller_and_is_read_back(tmp_path):
    CASES["llama"].save(tmp_path / "theirs")
    model = load(tmp_path / "theirs", pack=False).to(torch.bfloat16)
    save_checkpoint(model, tmp_path / "full")
    save_checkpoint(model, tmp_path / "small", int8=True)
    sizes = {name: (tmp_path / name / SINGLE).stat().st_size for name in ("full", "small")}
    exact, found = (load(tmp_path / name, pack=False) for name in sizes)

    stored = safetensors.torch.load_file(tmp_path / "small" / SINGLE)
    assert stored[QUERY].dtype == torch.int8
    outside = {name: tensor.dtype for name, tensor in stored.items() if ".layers." not in name}
    assert len(outside) > 2
    assert set(outside.values()) == {torch.bfloat16}
    assert sizes["small"] < 0.8 * sizes["full"]
    for (name, value), other in zip(exact.named_parameters(), found.parameters(), strict=True):
        error = (other - value).abs()
        allowed = value.abs().amax(-1, keepdim=True) / 250 if value.ndim > 1 else torch.zeros(())
        assert bool((error <= allowed).all()), name
    save_checkpoint(found, tmp_path / "again", int8=True)
    again = load(tmp_path / "again", pack=False)
    for value, other in zip(found.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-6, atol=1e-9)


def test_several_files_hold_the_scales_beside_their_weights(tmp_path):
    CASES["llama"].save(tmp_path / "theirs")
    model = load(tmp_path / "theirs", pack=False)
    save_checkpoint(model, tmp_path / "ours", max_shard_bytes=20_000, int8=True)

    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    load(tmp_path / "ours")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{QUERY}_scale"), f"{QUERY} is int8 with .* rows; {QUERY}_scale, .* is missing"),
        (lambda t: t.update({f"{QUERY}_scale": torch.ones(3, 1)}), r"is \[3, 1\] F32"),
        (lambda t: t.update({f"{QUERY}_scale": t[f"{QUERY}_scale"].to(torch.int8)}), "I8"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.int8)}), "only matrices"),
        (lambda t: t.update({QUERY: t[QUERY].float()}), f"{QUERY}_scale belongs to no int8 tensor"),
        (lambda t: t.update({"x.weight_scale": torch.ones(1)}), "x.weight_scale belongs to no int8 tensor"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_each_other_are_named(change, message, tmp_path):
    CASES["llama"].save(tmp_path)
    compress_file(tmp_path, change)

    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


def changed(path, value):
    config = copy.deepcopy(CONFIG)
    at = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return {"quantization_config": config}


def test_a_model_holds_full_numbers_of_what_we_save():
    assert stored_formats({"quantization_config": CONFIG}).formats[0].row is INT_QUANTIZED
    assert detect({"quantization_config": CONFIG}) is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("config_groups", "group_0", "format"),
            "other",
            r"\.format = 'other' is not supported; supported is 'int-qu",
        ),
        (("config_groups",), {}, "no config_groups"),
        (("config_groups",), None, "no config_groups"),
        (("config_groups", "group_0"), 3, r"config_groups\.group_0 must be an object, found 3"),
        (
            ("config_groups", "group_0", "weights"),
            None,
            r"group_0\.weights must be an object, found None",
        ),
        (("dequantize",), 3, r"dequantize must be true or false, found 3"),
    ],
)
def test_other_configurations_are_refused_by_name(path, value, message):
    with pytest.raises(ModelError, match=message):
        detect(changed(path, value))


def test_what_does_not_change_the_weights_is_accepted():
    detect({})
    detect({"quantization_config": None, "compression_config": CONFIG})
    detect(changed(("config_groups", "group_0", "format"), None))
    detect(
        changed(("config_groups", "group_0", "input_activations"), {"dynamic": True, "num_bits": 8})
    )


def test_rows_of_zeros_stay_zeros():
    numbers, scale = compress(torch.zeros(2, 3))

    assert torch.equal(decompress(numbers, scale), torch.zeros(2, 3))
