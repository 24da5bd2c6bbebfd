"""Writes GGUF files in bfloat16 for llama.cpp, which `llama-quantize` then converts to its 8- and 4-bit formats.

The tokenizer is a byte-level vocabulary of the model's size with a single merge: the benchmark sends token ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.files.shards import find_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALIGNMENT: Final = 32
"""Bytes; llama.cpp's default."""
ARCHITECTURES: Final = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""llama.cpp's names of the architectures that this file can write."""

_MAGIC, _VERSION = b"GGUF", 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_F32, _BF16 = 0, 30
_MOSTLY_BF16 = 32
_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3
_DRAW = 1 << 24
_MERGE: Final = "a b"
"""The one merge, without which llama.cpp reads no vocabulary of this kind."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a model.

    Attributes:
        name: in the GGUF file.
        source: in a Hugging Face checkpoint.
        shape: (rows, columns), or (length,) of a norm, which is stored in float32.
        rotated_heads: heads of a query or key projection whose rows llama.cpp expects in another order, else 0.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    rotated_heads: int = 0

    @property
    def num_bytes(self) -> int:
        """Size in the file without padding."""
        return int(np.prod(self.shape)) * (4 if len(self.shape) == 1 else 2)


def tensors(config: ModelConfig) -> list[Tensor]:
    """List the tensors of a model.

    Raises:
        ValueError: this file cannot write the architecture, or a model with biases.
    """
    network = config.network
    mixer, mlp = network.layers[0].mixer, network.layers[0].mlp
    if config.architecture not in ARCHITECTURES or mixer.bias or mlp.bias:
        raise ValueError(f"no GGUF is written for {config.architecture}, or one with biases")
    hidden, inner, vocab = network.hidden, mlp.inner, network.vocab
    queries, keys = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
    # The "llama" architecture rotates neighbouring pairs, a Hugging Face checkpoint the two halves of a head.
    pairs = ARCHITECTURES[config.architecture] == "llama"
    heads, kv_heads = (mixer.num_heads, mixer.num_kv_heads) if pairs else (0, 0)
    out = [
        Tensor("token_embd", "model.embed_tokens", (vocab, hidden)),
        Tensor("output_norm", "model.norm", (hidden,)),
    ]
    if not network.tied:
        out.append(Tensor("output", "lm_head", (vocab, hidden)))
    for i in range(len(network.layers)):
        to, of = f"blk.{i}", f"model.layers.{i}"
        out += [
            Tensor(f"{to}.attn_norm", f"{of}.input_layernorm", (hidden,)),
            Tensor(f"{to}.attn_q", f"{of}.self_attn.q_proj", (queries, hidden), heads),
            Tensor(f"{to}.attn_k", f"{of}.self_attn.k_proj", (keys, hidden), kv_heads),
            Tensor(f"{to}.attn_v", f"{of}.self_attn.v_proj", (keys, hidden)),
            Tensor(f"{to}.attn_output", f"{of}.self_attn.o_proj", (hidden, queries)),
            Tensor(f"{to}.ffn_norm", f"{of}.post_attention_layernorm", (hidden,)),
            Tensor(f"{to}.ffn_gate", f"{of}.mlp.gate_proj", (inner, hidden)),
            Tensor(f"{to}.ffn_up", f"{of}.mlp.up_proj", (inner, hidden)),
            Tensor(f"{to}.ffn_down", f"{of}.mlp.down_proj", (hidden, inner)),
        ]
        if mixer.qk_norm is not None:
            out += [
                Tensor(f"{to}.attn_q_norm", f"{of}.self_attn.q_norm", (mixer.head_dim,)),
                Tensor(f"{to}.attn_k_norm", f"{of}.self_attn.k_norm", (mixer.head_dim,)),
            ]
    return out


def metadata(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return the keys of the file's header. Long-context rope scaling is left out, which does not change the work."""
    arch = ARCHITECTURES[config.architecture]
    network, end = config.network, config.eos_token_ids[0] if config.eos_token_ids else 0
    mixer, mlp = network.layers[0].mixer, network.layers[0].mlp
    assert mixer.rotary is not None, arch
    return {
        "general.architecture": arch,
        "general.name": name,
        "general.file_type": _MOSTLY_BF16,
        f"{arch}.context_length": config.max_context,
        f"{arch}.embedding_length": network.hidden,
        f"{arch}.block_count": len(network.layers),
        f"{arch}.feed_forward_length": mlp.inner,
        f"{arch}.attention.head_count": mixer.num_heads,
        f"{arch}.attention.head_count_kv": mixer.num_kv_heads,
        f"{arch}.attention.key_length": mixer.head_dim,
        f"{arch}.attention.value_length": mixer.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": network.norm.eps,
        f"{arch}.rope.freq_base": mixer.rotary.theta,
        f"{arch}.rope.dimension_count": mixer.head_dim,
        f"{arch}.vocab_size": network.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocabulary(network.vocab),
        "tokenizer.ggml.token_type": [
            _CONTROL_TOKEN if i == end else _NORMAL_TOKEN for i in range(network.vocab)
        ],
        "tokenizer.ggml.merges": [_MERGE],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def vocabulary(size: int) -> list[str]:
    """Return the 256 bytes as GPT-2 spells them, what the merge makes, and distinct words for all other ids."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(plain))
    spelled = {byte: chr(byte) for byte in plain}
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    words = [spelled[byte] for byte in range(256)]
    return [*words, _MERGE.replace(" ", ""), *(f"token{i}" for i in range(257, size))][:size]


def write(path: Path, model: Path, *, random: bool, seed: int = 0) -> None:
    """Write a model in bfloat16 with norms in float32.

    Args:
        path: of the new file; it appears only when it is complete.
        model: folder with a config.json and, unless `random`, safetensors files.
        random: whether to write normally distributed weights, and norms of one.
        seed: of the random weights.

    Raises:
        ValueError: see `tensors`.
    """
    config = ModelConfig.from_folder(model)
    listed = tensors(config)
    get = _random(config.initializer_range, seed) if random else _stored(model)
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        keys = metadata(config, model.name)
        file.write(_MAGIC + struct.pack("<IQQ", _VERSION, len(listed), len(keys)))
        for key, value in keys.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for tensor in listed:
            kind = _F32 if len(tensor.shape) == 1 else _BF16
            dimensions = struct.pack(
                f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1]
            )
            name = _string(f"{tensor.name}.weight")
            file.write(name + dimensions + struct.pack("<IQ", kind, offset))
            offset += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
        _pad(file)
        for tensor in listed:
            for rows in get(tensor):
                file.write(rows.tobytes())
            _pad(file)
    part.rename(path)


def _random(deviation: float, seed: int) -> Callable[[Tensor], Iterator[np.ndarray]]:
    generator = np.random.default_rng(seed)

    def get(tensor: Tensor) -> Iterator[np.ndarray]:
        if len(tensor.shape) == 1:
            yield np.ones(tensor.shape, np.float32)
            return
        missing = int(np.prod(tensor.shape))
        while missing:
            drawn = generator.standard_normal(min(missing, _DRAW), np.float32) * deviation
            missing -= len(drawn)
            yield _bfloat16(torch.from_numpy(drawn))

    return get


def _stored(model: Path) -> Callable[[Tensor], Iterator[np.ndarray]]:
    from safetensors import safe_open  # noqa: PLC0415 - only for real weights

    files, index = find_shards(model)

    def get(tensor: Tensor) -> Iterator[np.ndarray]:
        name = f"{tensor.source}.weight"
        path = model / index[name] if index else files[0]
        with safe_open(path, "pt") as shard:
            values = shard.get_tensor(name)
        assert tuple(values.shape) == tensor.shape
        if len(tensor.shape) == 1:
            yield values.float().numpy()
            return
        if tensor.rotated_heads:
            halves = values.view(tensor.rotated_heads, 2, -1, values.shape[1])
            values = halves.transpose(1, 2).reshape(values.shape)
        yield _bfloat16(values)

    return get


def _bfloat16(values: torch.Tensor) -> np.ndarray:
    """Return the bits in an integer array, because NumPy has no bfloat16."""
    return values.bfloat16().contiguous().view(torch.int16).numpy()


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | bool | int | float | list[str] | list[int]) -> bytes:
    """Encode a value after its type."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    words = all(isinstance(item, str) for item in value)
    head = struct.pack("<IIQ", _ARRAY, _STRING if words else _INT32, len(value))
    if words:
        return head + b"".join(_string(str(item)) for item in value)
    return head + np.asarray(value, np.int32).tobytes()


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
