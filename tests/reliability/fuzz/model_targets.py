"""Fuzzes the reading of models: tokenizer files, and configurations with weights.

A model folder is input from outside. Whatever it holds, the only errors are `ModelError`s, whose text is for the
operator.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.checkpoint.config import ModelConfig
from model.checkpoint.save import save_checkpoint
from model.checkpoint.weights import load_model
from model.decoder import DecoderLM
from model.errors import ModelError
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from tests.reliability.fuzz.target import mutate_tree
from tests.reliability.malformed import mutate

if TYPE_CHECKING:
    import random

_CORPUS = ["The quick brown fox", "Größe 你好 🙂", "def f(x):\n    return x"] * 5
_TEXT = "def f(x):  # Größe 🙂 </s><s>\n\treturn 'a\u0301' * 3  aaaaaaaaaaaaaaaaaaaaaaaaaaaa\x00"
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": [2, 3], "torch_dtype": "float32",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
    "sliding_window": None, "attention_bias": False,
}  # fmt: skip
_CONFIG_KEYS = (
    "rope_scaling", "rope_parameters", "layer_types", "use_sliding_window", "quantization_config", "auto_map",
    "partial_rotary_factor", "max_window_layers", "dtype", "num_local_experts",
)  # fmt: skip
_MAX_TENSOR_BYTES = 1 << 20


_Files: TypeAlias = dict[str, bytes | str | None]
"""Files of a model folder, by name; None for a file that is missing, text for the target of a link."""


class _FolderTarget:
    """Writes the files of a case to a folder."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-model-"))
        self._files: dict[str, bytes]

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, case: bytes) -> Path:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        files: _Files = msgspec.msgpack.decode(case)
        for name, content in files.items():
            file = self._folder / name
            if isinstance(content, str):
                file.symlink_to(content)
            elif content is not None:
                file.write_bytes(content)
        return self._folder


def _encode(files: _Files) -> bytes:
    return msgspec.msgpack.encode(files)


def _dump(tree: Any) -> bytes:
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _tokenizers() -> list[dict[str, Any]]:
    """Make one small tokenizer of each kind, as the content of its file."""
    unknown = "<unk>"
    special = [unknown, "<s>", "</s>"]
    made = []
    for model, trainer, pre, decoder in (
        (models.BPE(), trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False),
         pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
        (models.BPE(unk_token=unknown, byte_fallback=True),
         trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False), None,
         decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                            decoders.Strip(" ", 1, 0)])),
        (models.WordPiece(unk_token=unknown),
         trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False),
         pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()),
        (models.Unigram(),
         trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token=unknown, show_progress=False),
         pre_tokenizers.Metaspace(), decoders.Metaspace()),
        (models.WordLevel(unk_token=unknown), trainers.WordLevelTrainer(special_tokens=special, show_progress=False),
         pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\s+(?!\S)|."), "isolated"),
                                  pre_tokenizers.Digits()]), None),
    ):  # fmt: skip
        tokenizer = tokenizers.Tokenizer(model)
        if pre is not None:
            tokenizer.pre_tokenizer = pre
        if decoder is not None:
            tokenizer.decoder = decoder
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace("q", "qu")]
        )
        tokenizer.train_from_iterator(_CORPUS, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A",
            pair="<s> $A $B",
            special_tokens=[("<s>", tokenizer.token_to_id("<s>"))],
        )
        made.append(json.loads(tokenizer.to_str()))
    return made


class TokenizerTarget(_FolderTarget):
    """tokenizer.json, tokenizer_config.json and the chat template: read, then used for a text."""

    def __init__(self) -> None:
        super().__init__()
        self._tokenizers = _tokenizers()
        self._config = {
            "bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None,
            "added_tokens_decoder": {"900": {"content": "<x>", "special": True, "lstrip": False}},
            "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        }  # fmt: skip

    def make(self, rng: random.Random) -> bytes:
        """Mutate one of the two files, as JSON or as bytes."""
        tokenizer, config = rng.choice(self._tokenizers), dict(self._config)
        vocabulary = len(tokenizer["model"]["vocab"])
        config["added_tokens_decoder"] = {
            str(vocabulary): {"content": "<x>", "special": True, "lstrip": False}
        }
        which = rng.random()
        if which < 0.7:
            tokenizer = mutate_tree(
                tokenizer, rng, ("normalizer", "added_tokens", "type", "pattern", "unk_id")
            )
        elif which < 0.9:
            config = mutate_tree(config, rng, ("extra_special_tokens", "unk_token", "content"))
        text = _dump(tokenizer)
        if which >= 0.9:
            text = mutate(text, rng)
        return _encode({"tokenizer.json": text, "tokenizer_config.json": _dump(config)})

    def check(self, case: bytes) -> None:
        """Read the files; encode and decode with what was read."""
        with contextlib.suppress(ModelError):
            folder = self._write(case)
            tokenizer = Tokenizer.from_folder(folder)
            ids = tokenizer.encode(_TEXT)
            tokenizer.encode_with_offsets(_TEXT)
            tokenizer.decode(ids)
            for token_id in range(min(tokenizer.vocab_size, 30)):
                tokenizer.token_bytes(token_id)
                tokenizer.decode([token_id, 5, token_id])
            ChatTemplate.from_folder(folder, tokenizer)


class CheckpointTarget(_FolderTarget):
    """config.json, the index of the shards, and safetensors files: read, then a model is loaded."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "config.json").write_bytes(_dump(_CONFIG))
            model = DecoderLM(ModelConfig.from_folder(folder))
            model.init_weights(seed=0)
            save_checkpoint(model.to(torch.float32), folder, 24_000)
            self._sharded = {
                f.name: f.read_bytes() for f in folder.iterdir() if f.name != "config.json"
            }
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_checkpoint(model.to(torch.float32), folder)
            self._single = {
                f.name: f.read_bytes() for f in folder.iterdir() if f.name != "config.json"
            }

    def make(self, rng: random.Random) -> bytes:
        """Mutate the configuration, the index, or a file of weights: its header, its length, its bytes."""
        stored = self._sharded if rng.random() < 0.6 else self._single
        files: _Files = dict(stored)
        config: dict[str, Any] = dict(_CONFIG)
        shards = [name for name in stored if name.endswith(".safetensors")]
        which = rng.random()
        if which < 0.3:
            config = mutate_tree(config, rng, _CONFIG_KEYS)
        elif which < 0.4:
            generation = json.loads(stored["generation_config.json"])
            files["generation_config.json"] = _dump(mutate_tree(generation, rng, ("eos_token_id",)))
        elif which < 0.55 and stored is self._sharded:
            index = json.loads(stored["model.safetensors.index.json"])
            for name in rng.choices(list(index["weight_map"]), k=rng.randrange(2)):
                index["weight_map"][name] = rng.choice(
                    ["../model.safetensors", "/etc/passwd", "x.bin", "", ".", "a/b.safetensors", "\x00.safetensors",
                     "x" * 300 + ".safetensors", "config.json", *shards]
                )  # fmt: skip
            files["model.safetensors.index.json"] = _dump(mutate_tree(index, rng))
        elif which < 0.6:
            files[rng.choice(shards)] = rng.choice(
                ["/etc/passwd", "/dev/zero", "/dev/null", ".", "../x", shards[0], "missing"]
            )
        elif which < 0.65:
            files[rng.choice(list(files))] = rng.choice([None, b"", b"{}", b"[]", b"\xff" * 9])
        else:
            name = rng.choice(shards)
            files[name] = _damage(stored[name], rng)
        return _encode({"config.json": _dump(config), **files})

    def check(self, case: bytes) -> None:
        """Read the configuration and load the model, in two formats."""
        with contextlib.suppress(ModelError):
            folder = self._write(case)
            config = ModelConfig.from_folder(folder)
            load_model(folder, config, torch.float32, "cpu")


def _damage(data: bytes, rng: random.Random) -> bytes:
    """Damage a safetensors file."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    kind = rng.randrange(7)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        lengths = (0, 1, size - 1, size + 1, len(data), 2**31, 2**63, 2**64 - 1, 100 << 20)
        return struct.pack("<Q", rng.choice(lengths)) + data[8:]
    if kind == 2:
        return mutate(data[: 8 + size], rng) + body
    if kind == 3:
        body = body[: rng.randrange(len(body) + 1)] if rng.random() < 0.5 else body + bytes(16)
    elif kind == 4:
        names = [name for name in header if name != "__metadata__"]
        one, other = header[rng.choice(names)], header[rng.choice(names)]
        field = rng.choice(["data_offsets", "shape", "dtype"])
        one[field] = rng.choice(
            [
                other[field],
                [-1, 4],
                [0, 2**63],
                [2**64, 0],
                [0, 0],
                "F8_E4M3",
                "I64",
                "BOOL",
                [2**40, 2**40],
                [],
                None,
            ]
        )
    else:
        header = mutate_tree(header, rng, ("__metadata__", "x"))
    encoded = _dump(header)
    return struct.pack("<Q", len(encoded)) + encoded + body
