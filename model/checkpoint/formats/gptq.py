"""Weights of 4 or 8 bits in the formats of GPTQ, as AutoGPTQ and GPTQModel write them.

    qweight    [C * bits / 32, N] int32, inputs that follow each other in a word
    qzeros     [G, N * bits / 32] int32, zero points less 1 ("gptq"), or zero points ("gptq_v2")
    scales     [G, N]
    g_idx      [C], the group of each input

With `desc_act` (act-order) the inputs of a group need not be beside each other. The 1 is added to words as a whole, as
it was subtracted: a zero point of 0 borrows from its neighbour. What is not converted, such as modules that are not
among `modules_in_block_to_quantize`, the files tell.

Source: E. Frantar et al., "GPTQ", https://arxiv.org/abs/2210.17323; the layout is that of the packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kernels.weight_format import WeightFormat
from model.checkpoint.formats.compressed_tensors import unsupported
from model.checkpoint.formats.format import FLOATS, Format, StoredTensor
from model.checkpoint.formats.integer_groups import (
    PER_WORD,
    check_tensors,
    integer_format,
    made,
    read_bits,
    read_group,
    refined,
)
from model.json_input import Harmless, check, refuse

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.weights import Weight

FILE: Final = "quantize_config.json"
"""Of older checkpoints, beside config.json."""
_NAME: Final = "gptq"
_SUBTRACTED: Final = {_NAME: 1, "gptq_v2": 0}
"""What is subtracted from zero points, by the version, which is the name of the format of matrices."""
_VERSION_KEYS: Final = ("checkpoint_format", "format")
"""The second is GPTQModel's later name."""
_HARMLESS: Final[Harmless] = (
    (("int32",), ("pack_dtype",)),
    ((False,), ("is_marlin_format",)),
    (({},), ("dynamic",)),
)
_ONES: Final = {4: 0x11111111, 8: 0x01010101}
"""1 for each number in a word."""


def from_file(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `quantization_config` from what the file of older checkpoints holds."""
    return {"quant_method": _NAME, **content}


def _detect(found: Mapping[str, Any], key: str) -> WeightFormat:
    refuse(found, _HARMLESS, f"{key}.")
    version = _NAME
    for name in _VERSION_KEYS:
        version = found.get(name) or version
        if version not in _SUBTRACTED:
            raise unsupported(f"{key}.{name}", version, tuple(_SUBTRACTED))
    bits = read_bits(found, key, "bits", tuple(PER_WORD))
    is_symmetric, is_ordered, is_static = (
        check(found.get(name) or False, bool, f"{key}.{name}")
        for name in ("sym", "desc_act", "static_groups")
    )
    return integer_format(
        version,
        bits,
        read_group(found, key, "group_size"),
        shifts=not is_symmetric,
        ordered=is_ordered and not is_static,
    )


def _shape(form: WeightFormat, tensors: Mapping[str, StoredTensor]) -> tuple[int, int]:
    words, outputs = tensors["numbers"].shape
    shape = _, inputs = outputs, words * PER_WORD[form.bits]
    groups, width = -(-inputs // (form.group or inputs)), outputs // PER_WORD[form.bits]
    expected = {
        "scale": ((groups, outputs), FLOATS),
        "zero": ((groups, width), ("I32",)),
        "order": ((inputs,), ("I32", "I64")),
    }
    return check_tensors(form, shape, tensors, expected)


def _read(form: WeightFormat, shape: tuple[int, int], tensors: Mapping[str, Tensor]) -> Weight:
    from model.checkpoint.formats import int32_packing as packing  # noqa: PLC0415 - imports PyTorch

    zero, stored = None, tensors.get("zero")
    if form.shifts:
        assert stored is not None, "as `check_tensors` says"
        zero = packing.unpack(stored + _SUBTRACTED[form.name] * _ONES[form.bits], form.bits).t()
    elif stored is not None:
        # Whether they are less 1 does not matter, and some files say the wrong one.
        zero, middle = packing.unpack(stored, form.bits), form.offset
        if not bool((zero == middle).all() or (zero == middle - 1).all()):
            raise ValueError(
                f"has zero points other than {middle}, although sym is true in config.json"
            )
        zero = None
    numbers = packing.along_inputs(tensors["numbers"])
    return made(form, shape, numbers, tensors["scale"].t(), zero)


GPTQ: Final = Format(
    name=_NAME,
    identity={"quant_method": "gptq"},
    detect=_detect,
    tensors={"numbers": "qweight", "scale": "scales", "zero": "qzeros", "order": "g_idx"},
    dtype="I32",
    is_kept=True,
    optional=("zero", "order"),
    dtypes=("I64",),
    ahead=("order",),
    shape=_shape,
    refine=refined,
    read=_read,
)
