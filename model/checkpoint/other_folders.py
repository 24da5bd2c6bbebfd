"""Says what a folder is that holds no checkpoint of safetensors files, by the names of its files, and what to do.

This module does not import PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final

from model.checkpoint_files import read_text
from model.errors import ModelError, ModelFolderError
from model.families.unlisted import HINT
from model.json_input import read_json_object, shorten

_MAX_BYTES: Final = 1 << 20
_MOST_ENTRIES: Final = 10_000
_SAFE: Final = "serve the repository that has it as safetensors files, or convert it with the library that it is for"
_ROWS: Final = (
    (
        ("params.json", "consolidated*.safetensors", "consolidated*.pth"),
        "it is in the original format of Mistral or Meta (params.json, consolidated files): serve the checkpoint in the"
        " format of transformers, whose name often ends in -hf",
    ),
    (("model_index.json", "diffusion_pytorch_model*"), "it is a pipeline of diffusers, which generates no text"),
    (
        ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
        "it is a model of sentence-transformers, which embeds texts and generates none",
    ),
    (("openvino_model*.xml",), f"it is a model for OpenVINO; {_SAFE}"),
    (("*.onnx", "onnx/*.onnx"), f"it is a model in ONNX; {_SAFE}"),
    (("tf_model*.h5", "saved_model.pb", "*.ckpt.index", "*.keras"), f"it is a model for TensorFlow; {_SAFE}"),
    (("flax_model*.msgpack", "flax_model.msgpack.index.json"), f"it is a model for Flax; {_SAFE}"),
    (("*.tflite", "*.task", "*.litertlm"), f"it is a model for LiteRT; {_SAFE}"),
    (("*.mlpackage", "*.mlmodelc", "*.mlmodel"), f"it is a model for Core ML; {_SAFE}"),
    (("*.nemo",), f"it is a model for NeMo; {_SAFE}"),
    (("*.engine",), f"it is a model for TensorRT; {_SAFE}"),
    (("*.pte",), f"it is a model for ExecuTorch; {_SAFE}"),
    (("*.npz",), f"it is a model for MLX; {_SAFE}"),
    (
        ("*.distcp", "zero_to_fp32.py", "global_step*", "pytorch_model_fsdp*"),
        "it is the state of a training (DeepSpeed, FSDP or torch.distributed): save the model with save_pretrained",
    ),
    (
        ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "*.parquet", "data/*.parquet", "*.arrow",
         "*.jsonl"),
        "it is a dataset, not a model",
    ),
)  # fmt: skip
"""What a folder is, by patterns of files of which it has any."""
_ENCODER_DECODER: Final = "it is a model of an encoder and a decoder, and only decoders are served"
_ARCHITECTURES: Final = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (
            r"^(M?T5|UMT5|LongT5|M?Bart|Pegasus|Marian|M2M100|Blenderbot|ProphetNet|LED)([A-Z]|$)",
            _ENCODER_DECODER,
        ),
        (r"^(Whisper|Wav2Vec|Hubert|Speech|Seamless|Wavlm)", "it is a model of speech"),
        (
            r"For(Sequence|Token|Image|Audio)Classification$|ForQuestionAnswering$|ForMultipleChoice$|RewardModel$",
            "it classifies texts and generates none",
        ),
        (
            r"ForMaskedLM$|ForPreTraining$|^((XLM|Xlm)?-?Roberta|XLMRoberta|.*Bert|BERT|Deberta|Electra|Albert|MPNet)",
            "it is an encoder, which embeds texts and generates none",
        ),
        (r"^(CLIP|Siglip|ViT|Dino|Swin|ConvNext)", "it is a model of images"),
        (r"M[oO][eE]|^Mixtral|^Dbrx", f"it is a mixture of experts; {HINT}"),
        (r"Model$", "it has no head that predicts tokens"),
    )
)
"""What a model is, by the name of its architecture."""
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_INDEX: Final = "model.safetensors.index.json"
_TOKENIZER: Final = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "vocab.txt", "chat_template.jinja",
)  # fmt: skip
_NO_CONTENT: Final = frozenset((".git", ".gitattributes", ".gitignore", ".cache", ".DS_Store"))


def describe(folder: Path) -> str | None:
    """Return what a folder is instead of a checkpoint, and what to do; a clause. None if nothing tells.

    Args:
        folder: without config.json, or without the files that find_shards looks for.
    """
    try:
        names = sorted(it.name for it in islice(folder.iterdir(), _MOST_ENTRIES))
    except OSError:
        return None
    if (found := _adapter(folder, names)) is not None:
        return found
    has_config = "config.json" in names
    if has_config and not any(it.endswith(".safetensors") for it in names) and _pickles(names):
        return None  # with which `find_shards` deals
    return next(_matching(folder), None) or _weights(names) or _parts(folder, names)


def embeds(folder: Path) -> bool:
    """Whether a checkpoint is a model of sentence-transformers, although its architecture may be that of a decoder."""
    try:
        modules = read_text(folder, "modules.json", _MAX_BYTES, ModelFolderError)
    except ModelFolderError:
        return False
    return modules is not None and ".Pooling" in modules


def describe_architecture(config: Mapping[str, Any]) -> str | None:
    """Return what a model is whose architecture is not supported, a clause; None if its name does not tell."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if config.get("is_encoder_decoder") is True:
        return _ENCODER_DECODER
    return next((text for pattern, text in _ARCHITECTURES if pattern.search(name)), None)


def _adapter(folder: Path, names: list[str]) -> str | None:
    if "adapter_config.json" not in names and not any(
        it.startswith("adapter_model.") for it in names
    ):
        return None
    base = None
    try:
        config = read_json_object(folder, "adapter_config.json", _MAX_BYTES) or {}
        base = config.get("base_model_name_or_path")
    except ModelError:
        pass  # that it is an adapter says enough
    of = f" for {shorten(base)}" if isinstance(base, str) else ""
    return (
        f"it is an adapter of PEFT{of}, not a whole model: load both with peft, call merge_and_unload(), save the"
        " result with save_pretrained and serve that"
    )


def _matching(folder: Path) -> Iterator[str]:
    for patterns, text in _ROWS:
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            yield text


def _weights(names: list[str]) -> str | None:
    """Describe files of weights that are not all there, or have other names."""
    tensors = [it for it in names if it.endswith(".safetensors")]
    if "model.safetensors" in tensors or _INDEX in names:
        return (
            None
            if "config.json" in names
            else "it has weights; copy the config.json of their repository to it too"
        )
    if shards := [it for it in tensors if _SHARD.fullmatch(it)]:
        return (
            f"it has {', '.join(shards[:3])}{' and others' * (len(shards) > 3)}, but no {_INDEX}, which says what file"
            " holds which tensor: copy it from their repository too"
        )
    if tensors:
        return f"its weights are called {', '.join(tensors[:3])}: rename them to model.safetensors"
    return None


def _pickles(names: list[str]) -> list[str]:
    return [it for it in names if it.endswith(_PICKLES)]


def _parts(folder: Path, names: list[str]) -> str | None:
    """Describe a folder without weights in safetensors files."""
    inner = [it.parent.name for it in islice(sorted(folder.glob("*/config.json")), 3)]
    content = [
        it
        for it in names
        if it not in _NO_CONTENT and not it.lower().startswith(("readme", "license"))
    ]
    found = None
    if "config.json" in names:
        pass
    elif pickles := _pickles(names):
        found = (
            f"it has {', '.join(pickles[:3])}; copy the config.json of their repository to it too"
        )
    elif inner:
        found = f"folders in it have one: serve {' or '.join(str(folder / it) for it in inner)}"
    elif any(it.startswith("models--") for it in names):
        found = "it is a cache of the Hugging Face Hub: serve a model in it by its name, such as Qwen/Qwen3-0.6B"
    elif not content:
        found = f"it has no model, only {', '.join(names[:4])}" if names else "it is empty"
    elif any(it in _TOKENIZER for it in names):
        found = "it has only a tokenizer: serve the folder with config.json and the weights"
    return found
