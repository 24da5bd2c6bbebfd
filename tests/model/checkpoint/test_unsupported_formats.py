"""Formats that are not read are refused by what they are, with what to do instead."""

import json

import pytest

from kernels.weight_format import FP8_ROWS
from model.checkpoint.config import ModelConfig
from model.checkpoint.formats.table import FORMATS, detect, stored_formats
from model.checkpoint.formats.unsupported import METHODS
from model.errors import ModelError, UnsupportedModelError
from tests.model.checkpoint.compressed import write_config
from tests.model.checkpoint.hf_checkpoints import CASES

INSTEAD = "serve the unquantized checkpoint, with --quantization fp8 on a GPU or int8 on a CPU, or the model in a"
IN_COMPRESSED_TENSORS = {"dense", "fakequant", "marlin-24", "sparse-bitmask", "sparse-24-bitmask"}


@pytest.mark.parametrize("name", METHODS)
def test_a_known_format_is_named_with_what_to_do_instead(name):
    described = {"quant_method": name, "bits": 4}
    if name.endswith("quantized") or name in IN_COMPRESSED_TENSORS:
        weights = {"num_bits": 4, "type": "float"}
        groups = {"g": {"targets": ["Linear"], "weights": weights}}
        described = {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}

    with pytest.raises(UnsupportedModelError, match=f"= '{name}' is not supported: .*; {INSTEAD}"):
        detect({"quantization_config": described})


@pytest.mark.parametrize("name", ["BitsAndBytes", "auto_round", "AUTO-ROUND"])
def test_the_name_may_be_spelled_otherwise(name):
    with pytest.raises(UnsupportedModelError, match=f"quant_method = '{name}' is not supported: "):
        detect({"quantization_config": {"quant_method": name}})


def test_no_format_is_both_read_and_refused():
    read = {value for row in FORMATS for value in row.identity.values()}

    assert not read & set(METHODS)


def test_a_group_in_a_known_format_is_named_too():
    groups = {
        "a": {
            "targets": ["re:.*mlp.*"],
            "format": "nvfp4-pack-quantized",
            "weights": {"num_bits": 4, "type": "float"},
        },
        "b": {"targets": ["Linear"], "format": "int-quantized", "weights": {}},
    }
    described = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
    }

    with pytest.raises(
        UnsupportedModelError, match="'nvfp4-pack-quantized' is not supported: NVFP4 has weights"
    ):
        detect({"quantization_config": described})


@pytest.mark.parametrize("bits", [4, 8, None])
def test_mlx_is_known_by_its_key(bits):
    described = {"group_size": 64, "bits": bits} if bits else {"group_size": 64}
    said = f"quantization is the key of MLX, whose{f' {bits}-bit' if bits else ''} weights have a packing"

    for config in (
        {"quantization": described},
        {"quantization": described, "quantization_config": described},
    ):
        with pytest.raises(UnsupportedModelError, match=f"{said} of its own; {INSTEAD}"):
            detect(config)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_algo": "NVFP4", "group_size": 16}, "quant_algo = 'NVFP4' is not supported; .*: NVFP4 has"),
        ({"quant_algo": "W4A16_AWQ"}, r"quant_algo = 'W4A16_AWQ' is not supported; supported is 'FP8' or 'FP8_PER"),
        ([], r"hf_quant_config.json: quantization must be an object, found \[\]"),
    ],
)  # fmt: skip
def test_other_algorithms_of_modelopt_are_refused_by_name(tmp_path, quantization, message):
    CASES["llama"].save(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))

    with pytest.raises(ModelError, match=message):
        ModelConfig.from_folder(tmp_path)


def test_the_older_file_of_modelopt_describes_the_format_unless_config_json_does(tmp_path):
    CASES["llama"].save(tmp_path)
    described = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))

    config = ModelConfig.from_folder(tmp_path)

    assert config.weight_format == FP8_ROWS
    (note,) = stored_formats(config.content).notes
    assert note.startswith("the checkpoint's kv_cache_quant_algo has no effect")
    write_config(
        tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]}
    )
    assert ModelConfig.from_folder(tmp_path).weight_format.name == "fp8-blocks"


CARDS = {
    "---\nlicense: mit\nbase_model: Qwen/Qwen3-4B\n---\n# Card": "Qwen/Qwen3-4B",
    "---\nbase_model:\n- 'Qwen/Qwen3-4B'\ntags: []\n---\n": "Qwen/Qwen3-4B",
    '---\r\nbase_model:\r\n  - "Qwen/Qwen3-4B"\r\n---\r\n': "Qwen/Qwen3-4B",
    "# base_model: a/b\nbase_model: c/d\n": None,
    "---\nbase_model: /etc/passwd\n---\n": None,
    "---\nbase_model: ../..\n---\n": None,
    "---\nlicense: mit\n---\nbase_model: c/d\n": None,
    "": None,
}


@pytest.mark.parametrize("card", CARDS)
def test_the_unquantized_checkpoint_is_named_if_the_card_does(tmp_path, card):
    write(tmp_path, {"quant_method": "bitsandbytes"})
    (tmp_path / "README.md").write_bytes(card.encode())

    with pytest.raises(UnsupportedModelError) as refused:
        ModelConfig.from_folder(tmp_path)

    found = CARDS[card]
    ending = (
        f"; it was made from '{found}' (base_model in its README.md)"
        if found
        else "(docs/models.md)"
    )
    assert str(refused.value).endswith(ending)
    assert str(refused.value).startswith(
        f"{tmp_path / 'config.json'}: quantization_config.quant_method = 'bitsandb"
    )


def test_config_json_may_name_it_too_and_a_bad_card_replaces_no_error(tmp_path):
    write(tmp_path, {"quant_method": "hqq"}, _name_or_path="Qwen/Qwen3-4B")
    (tmp_path / "README.md").mkdir()

    with pytest.raises(
        UnsupportedModelError, match=r"it was made from 'Qwen/Qwen3-4B' \(_name_or_path\)$"
    ):
        ModelConfig.from_folder(tmp_path)


def write(folder, described, **keys):
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": described, **keys}
    (folder / "config.json").write_text(json.dumps(config))
