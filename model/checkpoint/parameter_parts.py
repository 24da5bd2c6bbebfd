"""Maps the tensors of a Hugging Face checkpoint to the parameters of a model, as its family states.

A parameter may hold the rows of several tensors, and a tensor those of several modules: the model stacks q, k and v,
and gate and up, as some checkpoints do. Loading rewrites rows, so that the network of the model computes the function
of the checkpoint (`model.families.tensors.Rewrite`); saving does the reverse.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from kernels.fp8 import quantize_rows
from model.families.table import FAMILIES
from model.families.tensors import HEAD, Rewrite
from model.network.layers import stacked_rows
from model.network.parallel import shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from model.families.tensors import Tensors
    from model.network.decoder import DecoderLM
    from model.network.layers import DecoderLayer
    from model.network.spec import Attention

_STACKED: Final = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""The modules whose rows a parameter stacks; without a gate it has those of the last one."""
_ROTATED: Final = ("q", "k", "q_norm", "k_norm")
"""Modules whose rows have the order of the pairs that rotate."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a parameter that belong to one module.

    Attributes:
        count: number of rows.
        factor: multiplies them as they are loaded.
        offset: added to them then.
        order: for each row of a head its index in the checkpoint, the same in all heads; None for no other order.
    """

    count: int
    factor: float = 1.0
    offset: float = 0.0
    order: tuple[int, ...] | None = None

    def loaded(self, stored: Tensor) -> Tensor:
        """Return the rows of a checkpoint as the model holds them."""
        rows = stored if self.order is None else _reordered(stored, self.order)
        return rows if self._is_equal else rows.float() * self.factor + self.offset

    def stored(self, rows: Tensor) -> Tensor:
        """Return rows of the model as the checkpoint holds them."""
        values = rows if self._is_equal else (rows.float() - self.offset) / self.factor
        if self.order is None:
            return values
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return _reordered(values, tuple(inverse))

    @property
    def _is_equal(self) -> bool:
        return self.factor == 1 and not self.offset


def _reordered(rows: Tensor, order: tuple[int, ...]) -> Tensor:
    return rows.reshape(-1, len(order), *rows.shape[1:])[:, list(order)].flatten(0, 1)


@dataclasses.dataclass(frozen=True)
class ParameterPart:
    """The part of a model's parameter that one tensor of a checkpoint holds.

    Attributes:
        values: a contiguous view of the parameter, without gradients.
        rows: those of its modules, in order.
        scale: the scales of its rows, float32, if the parameter is quantized; else None.
        transposed: whether the checkpoint stores the transpose.
        grouped_by: the head dim, if the checkpoint stores the rows of the queries, the key and the value of each
            key-value head together; else None.
    """

    values: Tensor
    rows: tuple[Rows, ...]
    scale: Tensor | None = None
    transposed: bool = False
    grouped_by: int | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        shape = tuple(self.values.shape)
        return shape[::-1] if self.transposed else shape

    def load(self, stored: Tensor, rank: int = 0) -> bool:
        """Copy a tensor of the checkpoint, or a rank's part of it, to the parameter, quantized if the parameter is.

        Returns:
            Whether that was possible: quantized weights must be finite.
        """
        whole = stored.t() if self.transposed else stored
        counts = [rows.count for rows in self.rows]
        for rows, module, values, scale in zip(
            self.rows,
            self._modules(whole),
            self.values.split_with_sizes(counts),
            self._scales(counts),
            strict=True,
        ):
            loaded = rows.loaded(shard(module, values.shape, rank))
            if scale is None:
                values.copy_(loaded)
                continue
            loaded = loaded.to(values.device)
            if not bool(loaded.isfinite().all()):
                return False
            numbers, its_scale = quantize_rows(loaded)
            values.copy_(numbers)
            scale.copy_(its_scale)
        return True

    def to_stored(self, dtype: torch.dtype) -> Tensor:
        """Return a copy as the checkpoint stores it, on the CPU."""
        parts = self.values.cpu().split_with_sizes([rows.count for rows in self.rows])
        modules = [rows.stored(part) for rows, part in zip(self.rows, parts, strict=True)]
        whole = modules[0] if len(modules) == 1 else self._joined(modules)
        # A copy, because safetensors rejects tensors that share memory, as parts of a stacked tensor do.
        return (whole.t() if self.transposed else whole).to(dtype, copy=True).contiguous()

    def _modules(self, whole: Tensor) -> list[Tensor]:
        """Split the rows of the checkpoint by modules; their ratios are those of the part."""
        if len(self.rows) == 1:
            return [whole]
        counts = [rows.count for rows in self.rows]
        if self.grouped_by is None:
            ranks = len(whole) // sum(counts)
            return list(whole.split_with_sizes([count * ranks for count in counts]))
        heads = [count // counts[-1] for count in counts]
        groups = whole.reshape(-1, sum(heads), self.grouped_by, *whole.shape[1:])
        return [module.flatten(0, 2) for module in groups.split_with_sizes(heads, 1)]

    def _joined(self, modules: list[Tensor]) -> Tensor:
        """Stack modules as the checkpoint does, the reverse of `_modules`."""
        if self.grouped_by is None:
            return torch.cat(modules)
        num_groups, columns = self.rows[-1].count // self.grouped_by, modules[0].shape[1:]
        groups = [it.reshape(num_groups, -1, self.grouped_by, *columns) for it in modules]
        return torch.cat(groups, 1).flatten(0, 2)

    def _scales(self, counts: list[int]) -> tuple[Tensor | None, ...]:
        return (None,) * len(counts) if self.scale is None else self.scale.split_with_sizes(counts)


def named_parts(model: DecoderLM) -> dict[str, ParameterPart]:
    """Map every tensor name of the checkpoint to the part of the model that holds it, in layer order."""
    assert not model.is_packed, "packed weights cannot be split: load with pack=False"
    tensors, rewrites = FAMILIES[model.config.architecture].tensors, model.config.rewrites()
    outside = dict(model.named_parameters(recurse=False))
    parts = {}

    def add(*parameters: str) -> None:
        for parameter in filter(outside.__contains__, parameters):
            module, suffix = _module(parameter)
            prefix = "" if module == HEAD else tensors.prefix
            values = outside[parameter].detach()
            rows = _rows(len(values), rewrites.get(module), suffix)
            parts[f"{prefix}{tensors.modules[module]}{suffix}"] = ParameterPart(values, (rows,))

    add("embed_tokens", "embed_positions")
    for index, layer in enumerate(model.decoder_layers):
        prefix = f"{tensors.prefix}{tensors.layers}{index}."
        for name, part in _layer_parts(layer, tensors, rewrites):
            parts[prefix + name] = part
    add("norm", "norm_bias", HEAD)
    return parts


def full_names(tensors: Tensors, stored: Iterable[str]) -> dict[str, str]:
    """Map the names in a checkpoint's files to those with the name of the base model, which the files may omit."""
    base, head = tensors.prefix.partition(".")[0] + ".", f"{tensors.modules[HEAD]}.weight"
    names = list(stored)
    omitted = not any(name.startswith(base) for name in names)
    return {name: base + name if omitted and name != head else name for name in names}


def _module(parameter: str) -> tuple[str, str]:
    """Return the module of a parameter, and what follows the module's name in a checkpoint."""
    module = parameter.removesuffix("_bias")
    return module, ".weight" if module == parameter else ".bias"


def _rows(
    count: int, rewrite: Rewrite | None, suffix: str, order: tuple[int, ...] | None = None
) -> Rows:
    rewrite = rewrite or Rewrite()
    return Rows(count, rewrite.factor, rewrite.offset if suffix == ".weight" else 0.0, order)


def _layer_parts(
    layer: DecoderLayer, tensors: Tensors, rewrites: Mapping[str, Rewrite]
) -> Iterator[tuple[str, ParameterPart]]:
    """Yield the name of each tensor of a layer, after the layer's index, and what holds it."""
    orders = dict.fromkeys(_ROTATED, head_order(layer.spec.mixer, tensors))
    buffers = dict(layer.named_buffers())
    for parameter, tensor in layer.named_parameters():
        base, suffix = _module(parameter)
        counts = stacked_rows(layer.spec, parameter) or [len(tensor)]
        modules = dict(zip(_STACKED.get(base, (base,))[-len(counts) :], counts, strict=True))
        scale, start = buffers.get(f"{parameter}_scale"), 0
        for name, same in itertools.groupby(modules, tensors.layer_modules.__getitem__):
            rows = tuple(
                _rows(modules[it], rewrites.get(it), suffix, orders.get(it)) for it in same
            )
            stop = start + sum(it.count for it in rows)
            yield (
                name + suffix,
                ParameterPart(
                    tensor.detach()[start:stop],
                    rows,
                    None if scale is None else scale[start:stop],
                    transposed=tensors.transposed and tensor.ndim > 1,
                    grouped_by=layer.spec.mixer.head_dim
                    if tensors.grouped_qkv and base == "qkv"
                    else None,
                ),
            )
            start = stop


def head_order(mixer: Attention, tensors: Tensors) -> tuple[int, ...] | None:
    """Return, for each row of a head of queries or keys, its index in the checkpoint; None if it is the same.

    The model rotates pairs that are half a head apart, of which those that rotate come first.
    """
    if mixer.rotary is None or (mixer.rotary.dims is None and not tensors.interleaved_rotary):
        return None
    dims = mixer.rotary.dims or mixer.head_dim
    first = range(0, dims, 2) if tensors.interleaved_rotary else range(dims // 2)
    second = range(1, dims, 2) if tensors.interleaved_rotary else range(dims // 2, dims)
    middle = (dims + mixer.head_dim) // 2
    return (*first, *range(dims, middle), *second, *range(middle, mixer.head_dim))
