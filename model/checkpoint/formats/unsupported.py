"""Formats of quantized checkpoints that are known and not read, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from model.errors import ModelError, UnsupportedModelError
from model.files import read_file

_OWN_KERNELS: Final = "which only kernels of its own read"
_AUTO_ROUND: Final = (
    "AutoRound has packings of which `auto_round:auto_gptq` and `auto_round:auto_awq` are read"
)
METHODS: Final[Mapping[str, str]] = {
    "bitsandbytes": "bitsandbytes has weights in NF4, FP4 or int8, " + _OWN_KERNELS,
    "mxfp4": "MXFP4 has weights in 4-bit floating-point numbers",
    "nvfp4": "NVFP4 has weights in 4-bit floating-point numbers",
    "modelopt_fp4": "ModelOpt NVFP4 has weights in 4-bit floating-point numbers",
    "petit_nvfp4": "NVFP4 has weights in 4-bit floating-point numbers",
    "fp_quant": "FP-Quant has weights in 4-bit floating-point numbers, rotated by Hadamard matrices",
    "fouroversix": "Four Over Six has weights in 4-bit floating-point numbers",
    "hqq": "HQQ has weights in a packing of its own",
    "torchao": "torchao stores tensors of its own classes",
    "quanto": "Quanto stores tensors of its own classes",
    "eetq": "EETQ has weights in int8 in the layout of its kernels",
    "auto-round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
    "inc": "Intel Neural Compressor has a packing of its own",
    "spqr": "SpQR has weights of 3 bits with sparse outliers, " + _OWN_KERNELS,
    "vptq": "VPTQ has weights as indices of a codebook, " + _OWN_KERNELS,
    "aqlm": "AQLM has weights as indices of codebooks, " + _OWN_KERNELS,
    "higgs": "HIGGS has weights as indices of a grid, rotated by Hadamard matrices",
    "quip": "QuIP has weights as indices of a codebook, " + _OWN_KERNELS,
    "bitnet": "BitNet has ternary weights",
    "quark": "AMD Quark has a configuration of its own",
    "sinq": "SINQ has scales of rows and of columns",
    "metal": "Metal quantization has weights in the layout of its kernels",
    "exl2": "EXL2 has weights in the layout of ExLlamaV2",
    "exl3": "EXL3 has weights in the layout of ExLlamaV3",
    "marlin": "Marlin has weights in the layout of its kernels",
    "squeezellm": "SqueezeLLM has weights as indices of a table",
    "qqq": "QQQ has weights in the layout of its kernels",
    "bitblas": "BitBLAS has weights in the layout of its kernels",
    "mxfp8": "MXFP8 has a scale for each 32 numbers, powers of two",
    "nvfp4-pack-quantized": "NVFP4 has weights in 4-bit floating-point numbers",
    "mxfp4-pack-quantized": "MXFP4 has weights in 4-bit floating-point numbers",
    "mxfp6-pack-quantized": "MXFP6 has weights in 6-bit floating-point numbers",
    "mxfp8-quantized": "MXFP8 has a scale for each 32 numbers, powers of two",
    "marlin-24": "Marlin 2:4 has sparse weights in the layout of its kernels",
    "sparse-24-bitmask": "2:4 sparse weights are stored as bit masks and values",
    "sparse-bitmask": "sparse weights are stored as bit masks and values",
    "dense": "the weights are full numbers beside scales, to be rounded at each step",
    "fakequant": "the weights are full numbers beside scales, to be rounded at each step",
}
"""What `quant_method`s and compression formats are; keys are in lower case, with underscores or hyphens as usual."""
MLX: Final = "quantization"
"""The key of config.json in which MLX describes its format."""

_INSTEAD: Final = (
    "serve the unquantized checkpoint, with --quantization fp8 on a GPU or int8 on a CPU, or the model in a format "
    "that is read (docs/models.md)"
)
_MAX_CARD_BYTES: Final = 2**20
_FRONT_MATTER: Final = re.compile(r"---\n(.*?)\n---", re.DOTALL)
_BASE: Final = re.compile(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?([^\s\"']+)", re.MULTILINE)
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class UnsupportedFormatError(UnsupportedModelError):
    """A checkpoint's matrices are stored in a way that is not read."""


def refuse_known(where: str, named: object) -> None:
    """Refuse a format by what it is and what to do instead.

    Args:
        where: the key that names it.
        named: its value.

    Raises:
        UnsupportedFormatError: it is one of `METHODS`.
    """
    name = str(named).lower()
    about = METHODS.get(name) or METHODS.get(name.replace("_", "-"))
    if about is not None:
        raise UnsupportedFormatError(f"{where} = {named!r} is not supported: {about}; {_INSTEAD}")


def refuse_mlx(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that MLX has quantized.

    Raises:
        UnsupportedFormatError: `config` describes one.
    """
    found = config.get(MLX)
    if isinstance(found, dict):
        bits = "".join(f" {found['bits']}-bit" for _ in range(isinstance(found.get("bits"), int)))
        raise UnsupportedFormatError(
            f"{MLX} is the key of MLX, whose{bits} weights have a packing of its own; {_INSTEAD}"
        )


def unquantized_hint(folder: Path, config: Mapping[str, Any]) -> str:
    """Return which checkpoint a quantized one was made from, the end of a sentence; "" if its files do not tell.

    Args:
        folder: of the quantized one; its README.md may name it.
        config: its config.json, which may too.
    """
    for found, place in (
        (_base_model(folder), "base_model in its README.md"),
        (config.get("_name_or_path"), "_name_or_path"),
    ):
        if isinstance(found, str) and _REPOSITORY.fullmatch(found):
            return f"; it was made from {found!r} ({place})"
    return ""


def _base_model(folder: Path) -> str | None:
    try:
        content = read_file(folder, "README.md", _MAX_CARD_BYTES, ModelError)
    except ModelError:
        return None  # a hint that cannot be had must not replace the error
    text = (content or b"").decode(errors="replace").replace("\r\n", "\n")
    front = _FRONT_MATTER.match(text)
    found = _BASE.search(front[1]) if front else None
    return found[1] if found else None
