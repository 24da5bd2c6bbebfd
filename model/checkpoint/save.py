"""Saves a model as a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.weights import Weight
from model.checkpoint.fit import IN_LAYER
from model.checkpoint.formats.int_quantized import INT_QUANTIZED, compress, to_config
from model.checkpoint.parameter_parts import ParameterPart, named_parts
from model.decoder import DecoderLM
from model.weight_files import INDEX_NAME, SINGLE_NAME


def save_checkpoint(
    model: DecoderLM, path: Path, max_shard_bytes: int = 5 * 2**30, *, int8: bool = False
) -> None:
    """Write the model as a Hugging Face checkpoint: config, generation config and safetensors.

    Args:
        model: any dtype, any device.
        path: folder, created if it does not exist; weight files in it are replaced, other files are kept.
        max_shard_bytes: maximum size of a file with more than one tensor.
        int8: whether to store the matrices of the layers in 8 bits, see `model.checkpoint.formats.int_quantized`.
    """
    assert not model.is_quantized, "the format is for weights of one dtype"
    path.mkdir(parents=True, exist_ok=True)
    for stale in (*path.glob("model*.safetensors"), path / INDEX_NAME):
        stale.unlink(missing_ok=True)
    dtype = model.dtype
    config = dataclasses.replace(model.config, dtype=str(dtype).removeprefix("torch."))
    compression = {"quantization_config": to_config()} if int8 else {}
    _write_json(path / "config.json", config.to_dict() | compression)
    ends = list(config.eos_token_ids) or None
    _write_json(
        path / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": ends}
    )
    shards: list[list[str]] = [[]]
    parts = named_parts(model)
    tensors = _StoredTensors(parts, dtype, int8=int8)
    num_bytes = {name: tensors.num_bytes(name) for name in parts}
    size = 0
    for name, its_bytes in num_bytes.items():
        if shards[-1] and size + its_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += its_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE_NAME
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        saved = {key: value for name in names for key, value in tensors.of(name).items()}
        save_file(saved, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(saved, file)
    if len(shards) > 1:
        total = sum(num_bytes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(path / INDEX_NAME, index)


class _StoredTensors:
    """The tensors of a model as a checkpoint stores them."""

    def __init__(self, parts: dict[str, ParameterPart], dtype: torch.dtype, *, int8: bool) -> None:
        self._parts, self._dtype, self._int8 = parts, dtype, int8

    def of(self, name: str) -> dict[str, Tensor]:
        """Return a tensor, and its scales if it is compressed, by name."""
        stored = self._parts[name].to_stored(self._dtype)
        if not self._is_compressed(name):
            return {name: stored}
        ends = (INT_QUANTIZED.tensors[key] for key in ("numbers", "scale"))
        module = name.removesuffix("weight")
        return dict(zip((module + end for end in ends), compress(stored), strict=True))

    def num_bytes(self, name: str) -> int:
        """Size in a file."""
        shape = self._parts[name].stored_shape
        if self._is_compressed(name):
            return math.prod(shape) + shape[0] * torch.float32.itemsize
        return math.prod(shape) * self._dtype.itemsize

    def _is_compressed(self, name: str) -> bool:
        part = self._parts[name]
        assert not (self._int8 and part.transposed), "the format has a scale for each output"
        # `transformers` cannot load compressed embeddings, nor a compressed head that is tied to them.
        return self._int8 and isinstance(part.values, Weight) and IN_LAYER.search(name) is not None


def _write_json(file: Path, value: dict[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
