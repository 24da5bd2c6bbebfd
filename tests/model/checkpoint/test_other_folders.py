"""Folders that hold something else than a checkpoint of safetensors files are named, with what to do."""

import json

import pytest

from model.checkpoint.config import ModelConfig
from model.checkpoint.files.shards import find_shards, open_shard, read_headers
from model.errors import (
    ModelError,
    ModelFolderError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)
from model.text.tokenizer import Tokenizer
from tests.model.checkpoint.hf_checkpoints import CASES

LLAMA = CASES["llama"].config().to_dict() | {"architectures": ["LlamaForCausalLM"]}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1234\n"


def write(folder, *names, config=None):
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"{}")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], "adapter of PEFT.*merge_and_unload"),
        (["adapter_model.bin"], "adapter of PEFT"),
        (["params.json", "consolidated.safetensors", "tekken.json"], "original format of Mistral or Meta"),
        (["params.json", "consolidated.00.pth", "tokenizer.model"], "original format of Mistral or Meta"),
        (["model_index.json", "unet/config.json"], "pipeline of diffusers"),
        (["modules.json", "1_Pooling/config.json", "model.safetensors"], "sentence-transformers"),
        (["openvino_model.xml", "openvino_model.bin"], "OpenVINO"),
        (["model.onnx", "tokenizer.json"], "ONNX"),
        (["onnx/model_q4.onnx"], "ONNX"),
        (["tf_model.h5"], "TensorFlow"),
        (["saved_model.pb", "variables/x"], "TensorFlow"),
        (["model.ckpt.index"], "TensorFlow"),
        (["flax_model.msgpack"], "Flax"),
        (["model.tflite"], "LiteRT"),
        (["gemma.task"], "LiteRT"),
        (["m.mlpackage/x"], "Core ML"),
        (["m.nemo"], "NeMo"),
        (["rank0.engine"], "TensorRT"),
        (["llama.pte"], "ExecuTorch"),
        (["weights.npz", "tokenizer.model"], "MLX"),
        (["zero_to_fp32.py", "global_step10/x"], "state of a training"),
        (["__0_0.distcp"], "state of a training"),
        (["dataset_info.json", "train/x.arrow"], "a dataset"),
        (["data/train-00000.parquet", "README.md"], "a dataset"),
        (["train.jsonl"], "a dataset"),
        (["model.safetensors"], "it has weights; copy the config.json"),
        (["model-00001-of-00002.safetensors", "model.safetensors.index.json"], "it has weights; copy the config.json"),
        (["model-00001-of-00002.safetensors"], "but no model.safetensors.index.json"),
        (["my_model.safetensors"], "rename them to model.safetensors"),
        (["pytorch_model.bin"], "pytorch_model.bin; copy the config.json"),
        (["checkpoint-100/config.json", "checkpoint-200/config.json"], "serve .*checkpoint-100 or .*checkpoint-200"),
        (["models--org--name/refs/main"], "cache of the Hugging Face Hub"),
        (["tokenizer.json", "tokenizer_config.json"], "only a tokenizer"),
        ([], "it is empty"),
        ([".gitattributes", "README.md"], "it has no model, only .gitattributes, README.md"),
        (["notes.txt"], "a model folder needs one"),
    ],
    ids=str,
)  # fmt: skip
def test_a_folder_without_a_configuration_is_named(tmp_path, names, what):
    with pytest.raises(ModelFolderError, match=f"has no config.json: .*{what}"):
        ModelConfig.from_folder(write(tmp_path, *names))


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["model-00001-of-00002.safetensors"], "model-00001-of-00002.safetensors, but no model.safetensors.index.json"),
        (["model-00001-of-00001.safetensors"], "but no model.safetensors.index.json"),
        ([f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)], "and others, but no model.safetensors.index"),
        (["model.fp16.safetensors"], "called model.fp16.safetensors: rename"),
        (["pytorch_model.safetensors"], "rename them to model.safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "adapter of PEFT"),
        (["adapter_model.bin", "adapter_config.json"], "adapter of PEFT"),
        (["consolidated.safetensors", "params.json"], "original format of Mistral"),
        (["pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"], r"pickle only \(pytorch_model.bin\)"),
        (["pytorch_model.bin", "onnx/model.onnx"], "pickle only"),
        (["tf_model.h5"], "TensorFlow"),
        (["onnx/model.onnx"], "ONNX"),
        (["weights.npz"], "MLX"),
        ([], "neither model.safetensors nor model.safetensors.index.json"),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_without_weights_is_named(tmp_path, names, what):
    with pytest.raises(WeightsError, match=what):
        find_shards(write(tmp_path, *names, config=LLAMA))


def test_the_base_model_of_an_adapter_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')

    with pytest.raises(ModelFolderError, match="adapter of PEFT for 'org/base'"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"base_model_name_or_path": 3}', "\udc80"])
def test_a_damaged_description_of_an_adapter_is_one_nevertheless(tmp_path, content):
    (tmp_path / "adapter_config.json").write_text(content, errors="surrogateescape")

    with pytest.raises(ModelFolderError, match="adapter of PEFT, not a whole model"):
        ModelConfig.from_folder(tmp_path)


def test_a_decoder_of_sentence_transformers_is_refused(tmp_path):
    write(tmp_path, config=LLAMA)
    modules = [{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(UnsupportedModelError, match="sentence-transformers, which embeds texts"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_file_of_that_name_without_pooling_does_not_matter(tmp_path, content):
    write(tmp_path, config=LLAMA)
    (tmp_path / "modules.json").write_bytes(content)

    assert ModelConfig.from_folder(tmp_path).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "changes", "what"),
    [
        ("BertModel", {}, "it is an encoder"),
        ("XLMRobertaModel", {}, "it is an encoder"),
        ("ModernBertForMaskedLM", {}, "it is an encoder"),
        ("LlamaForSequenceClassification", {}, "it classifies texts"),
        ("Qwen2ForRewardModel", {}, "it classifies texts"),
        ("DebertaV2ForTokenClassification", {}, "it classifies texts"),
        ("T5ForConditionalGeneration", {}, "an encoder and a decoder"),
        ("SomethingNew", {"is_encoder_decoder": True}, "an encoder and a decoder"),
        ("WhisperForConditionalGeneration", {}, "a model of speech"),
        ("CLIPModel", {}, "a model of images"),
        ("Qwen3MoeForCausalLM", {}, "a mixture of experts"),
        ("MixtralForCausalLM", {}, "a mixture of experts"),
        ("LlamaModel", {}, "no head that predicts tokens"),
    ],
)
def test_the_kind_of_an_unsupported_architecture_is_named(architecture, changes, what):
    with pytest.raises(
        UnsupportedModelError, match=f"architecture '{architecture}' is not .*; .*{what}"
    ):
        ModelConfig.from_dict({"architectures": [architecture], **changes})


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", ModelConfig.from_folder),
        ("generation_config.json", ModelConfig.from_folder),
        ("model.safetensors.index.json", read_headers),
        ("tokenizer.json", Tokenizer.from_folder),
        ("model.safetensors", read_headers),
    ],
)
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (POINTER, "is a pointer of Git LFS, not the file itself: .*git lfs pull"),
        (b"<!DOCTYPE html>\n<html><body>Sign in</body>", "is a web page, not the file itself"),
        (b"\n <html lang='en'>", "is a web page"),
    ],
    ids=["pointer", "page", "page after a space"],
)
def test_a_file_that_was_not_downloaded_is_named(tmp_path, name, read, content, what):
    write(tmp_path, config=LLAMA)
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ModelError, match=f"{name} {what}"):
        read(tmp_path)


def test_a_shard_that_was_not_downloaded_is_named(tmp_path):
    CASES["llama sharded"].save(tmp_path)
    shard = min(tmp_path.glob("model-00002-*"))
    shard.write_bytes(POINTER)

    with pytest.raises(WeightsError, match=f"{shard.name} is a pointer of Git LFS"):
        read_headers(tmp_path)


def test_a_tokenizer_that_was_not_downloaded_is_one_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_bytes(POINTER)
    (tmp_path / "tokenizer.json").write_bytes(POINTER)

    with pytest.raises(TokenizerError, match=r"tokenizer\.json is a pointer of Git LFS"):
        Tokenizer.from_folder(tmp_path)


def test_another_damaged_file_is_said_to_be_damaged(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"version https://elsewhere")

    with (
        pytest.raises(WeightsError, match="cannot be read as safetensors"),
        open_shard(tmp_path / "model.safetensors"),
    ):
        pass
