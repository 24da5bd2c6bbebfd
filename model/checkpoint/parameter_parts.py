"""Maps the tensors of a Hugging Face checkpoint to the parameters of a model, as its family states.

A parameter may hold the rows of several tensors, and a tensor those of several modules: the model stacks q, k and v,
and gate and up, as some checkpoints do. Loading rewrites rows, so that the network of the model computes the function
of the checkpoint (`model.families.tensors.Rewrite`); saving does the reverse.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import Tensor, nn

from kernels.weights import Weight
from model.families.tensors import CONVOLUTION, HEAD, Rewrite, Tensors
from model.network.layers import DecoderLayer
from model.network.matrix import Matrix, shard, shard_sections
from model.network.matrix_shapes import stacked_modules
from model.network.new_parameters import stacked_rows
from model.network.parallel import Section, sections
from model.network.spec import Attention

if TYPE_CHECKING:
    from model.decoder import DecoderLM
    from model.network.spec import Network

StoredValues = TypeVar("StoredValues", Weight, Tensor)
_XIELU: Final = ("alpha_p", "alpha_n")
"""The modules whose rows `activation` stacks."""
_WITHOUT_SUFFIX: Final = ("activation", "scale", "altup_scale", "a_log", "dt_bias", "d")
"""Parameters whose tensors have no `.weight` or `.bias` after the name of the module."""
_GATED: Final = ("q_gate", "q")
_STREAMS: Final = ("streams_in", "streams_out")
"""Parameters that stack square matrices of modules with the name of one and a number."""
_OF_KEYS: Final = ("k", "v", "k_norm", "v_norm")
"""Modules that a layer with the keys and values of another one does not have."""
_HEAD_NORMS: Final = ("q_norm", "k_norm")
_ROTATED: Final = ("q", "k", *_HEAD_NORMS)
"""Modules whose rows have the order of the pairs that rotate."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a parameter that belong to one module.

    Attributes:
        count: number of rows.
        factor: multiplies them as they are loaded.
        offset: added to them then.
        order: for each row of a head its index in the checkpoint, the same in all heads; None for no other order.
        sections: how ranks divide the rows; empty if they divide them by the number of rows alone.
    """

    count: int
    factor: float = 1.0
    offset: float = 0.0
    order: tuple[int, ...] | None = None
    sections: tuple[Section, ...] = ()

    @property
    def stored_count(self) -> int:
        """The number of rows in the checkpoint, of which a rank may have a part."""
        return sum(it.whole for it in self.sections) or self.count

    def of_rank(self, stored: StoredValues, columns: tuple[int, ...], rank: int) -> StoredValues:
        """Return a rank's rows and columns of the module, as the checkpoint holds them."""
        if self.sections:
            stored = shard_sections(stored, self.sections, rank)
        return shard(stored, (self.count, *columns), rank)

    def loaded(self, stored: StoredValues) -> StoredValues:
        """Return the rows of a checkpoint as the model holds them."""
        rows = stored if self.order is None else _reordered(stored, self.order)
        if self.factor == 1 and not self.offset:
            return rows
        if isinstance(rows, Tensor):
            return rows.float() * self.factor + self.offset
        assert not self.offset, "of norms alone"
        return rows.scaled(self.factor)

    def stored(self, rows: Tensor) -> Tensor:
        """Return rows of the model as the checkpoint holds them."""
        is_equal = self.factor == 1 and not self.offset
        values = rows if is_equal else (rows.float() - self.offset) / self.factor
        if self.order is None:
            return values
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return _reordered(values, tuple(inverse))


def _reordered(rows: StoredValues, order: tuple[int, ...]) -> StoredValues:
    heads = torch.arange(0, rows.shape[0], len(order))[:, None]
    return _indexed(rows, (heads + torch.tensor(order)).flatten())


def _indexed(rows: StoredValues, index: Tensor) -> StoredValues:
    return rows[index] if isinstance(rows, Tensor) else rows.permuted(index)


@dataclasses.dataclass(frozen=True)
class ParameterPart:
    """The part of a model's parameter that one tensor of a checkpoint holds.

    Attributes:
        parameter: its name in the model.
        values: of the part, views without gradients: a matrix, or a vector.
        rows: those of its modules, in order.
        transposed: whether the checkpoint stores the transpose.
        grouped_by: the head dim, if the checkpoint stores the rows of the queries, the key and the value of each
            key-value head together; else None.
        row_size: if the checkpoint stores a vector as a matrix, the elements of a row of that; else None.
        depthwise: whether the part is that of a convolution of each channel alone, [channels, W], which the checkpoint
            stores as [channels, 1, W].
        gated_by: the head dim, if the checkpoint stores the rows of the query and of the gate of each head together,
            those of the query first; else None. The part has those of all gates first.
    """

    parameter: str
    values: Weight | Tensor
    rows: tuple[Rows, ...]
    transposed: bool = False
    grouped_by: int | None = None
    row_size: int | None = None
    depthwise: bool = False
    gated_by: int | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        shape = tuple(self.values.shape)
        if self.row_size is not None:
            return (shape[0] // self.row_size, self.row_size)
        if self.depthwise:
            return (shape[0], 1, shape[1])
        return shape[::-1] if self.transposed else shape

    def load(self, stored: StoredValues, rank: int = 0) -> None:
        """Copy what the checkpoint holds, or a rank's part of it, to the parameter, rounded to its format.

        Raises:
            ValueError: numbers that would have to be rounded are not finite.
        """
        values: Any = self.values.split_with_sizes([rows.count for rows in self.rows])
        for part, loaded in zip(values, self.loaded(stored, rank), strict=True):
            part.copy_(loaded)

    def loaded(self, stored: StoredValues, rank: int) -> list[StoredValues]:
        """Return the rows of each module of a rank's parameter from what the checkpoint holds."""
        if self.transposed:
            stored = (
                stored.t() if isinstance(stored, Tensor) else Weight.full(stored.dequantize().t())
            )
        if self.row_size is not None:
            matrix: Any = stored if isinstance(stored, Tensor) else stored.dequantize()
            stored = matrix.flatten()
        if self.depthwise:
            taps: Any = stored if isinstance(stored, Tensor) else stored.dequantize()
            stored = taps.flatten(1)
        columns: tuple[int, ...] = tuple(self.values.shape[1:])
        return [
            rows.loaded(rows.of_rank(module, columns, rank))
            for rows, module in zip(self.rows, self._modules(stored), strict=True)
        ]

    def to_stored(self, dtype: torch.dtype) -> Tensor:
        """Return a copy as the checkpoint stores it, on the CPU."""
        held = self.values.dequantize() if isinstance(self.values, Weight) else self.values
        parts = held.cpu().split_with_sizes([rows.count for rows in self.rows])
        modules = [rows.stored(part) for rows, part in zip(self.rows, parts, strict=True)]
        whole = modules[0] if len(modules) == 1 else self._joined(modules)
        if self.row_size is not None:
            whole = whole.view(-1, self.row_size)
        if self.depthwise:
            whole = whole.unsqueeze(1)
        # A copy, because safetensors rejects tensors that share memory, as parts of a stacked tensor do.
        return (whole.t() if self.transposed else whole).to(dtype, copy=True).contiguous()

    def _modules(self, whole: StoredValues) -> list[StoredValues]:
        """Split the rows of the checkpoint by modules."""
        if len(self.rows) == 1:
            return [whole]
        return [_indexed(whole, index) for index in self._indices(whole.shape[0])]

    def _joined(self, modules: list[Tensor]) -> Tensor:
        """Stack modules as the checkpoint does, the reverse of `_modules`."""
        stacked = torch.cat(modules)
        whole = torch.empty_like(stacked)
        whole[torch.cat(self._indices(len(stacked)))] = stacked
        return whole

    def _indices(self, count: int) -> list[Tensor]:
        """Return the rows of each module in `count` rows of the checkpoint."""
        counts = [rows.stored_count for rows in self.rows]
        index = torch.arange(count)
        if self.gated_by is not None:
            queries, gates = index.view(-1, 2, self.gated_by).unbind(1)
            return [gates.flatten(), queries.flatten()]
        if self.grouped_by is None:
            return list(index.split_with_sizes(counts))
        heads = [it // counts[-1] for it in counts]
        groups = index.view(-1, sum(heads), self.grouped_by)
        return [it.flatten() for it in groups.split_with_sizes(heads, 1)]


def named_parts(model: DecoderLM) -> dict[str, ParameterPart]:
    """Map every tensor name of the checkpoint to the part of the model that holds it, in layer order."""
    assert not model.is_packed, "packed weights cannot be split: load with pack=False"
    tensors, rewrites = model.config.tensors(), model.config.rewrites()
    outside: dict[str, nn.Parameter | Matrix] = dict(model.named_parameters(recurse=False))
    outside |= {name: it for name, it in model.named_children() if isinstance(it, Matrix)}
    parts = {}

    def add(*parameters: str) -> None:
        for parameter in filter(outside.__contains__, parameters):
            module, suffix = _module(parameter)
            prefix = "" if module == HEAD else tensors.prefix
            held = outside[parameter]
            values = _values(held if isinstance(held, Matrix) else held.detach())
            rows = _rows(values.shape[0], rewrites.get(module), suffix)
            name = f"{prefix}{tensors.modules[module]}{suffix}"
            parts[name] = ParameterPart(parameter, values, (rows,))

    add(
        "embed_tokens",
        "embed_positions",
        "embed_per_layer",
        "per_layer_projection",
        "per_layer_norm",
    )
    size = model.network.hidden
    for parameter, stacked in model.named_parameters(recurse=False):
        for index in range(len(stacked) // size if parameter in _STREAMS else 0):
            square = Weight.full(stacked.detach()[index * size : (index + 1) * size])
            name = f"{tensors.prefix}{tensors.modules[parameter]}.{index}.weight"
            parts[name] = ParameterPart(parameter, square, (Rows(size),))
    for index, layer in enumerate(model.decoder_layers):
        prefix = f"{tensors.prefix}{tensors.layers}{index}."
        whole = model.whole_network.layers[index]
        divided = functools.partial(sections, layer.spec, whole, model.num_ranks)
        for name, part in _layer_parts(layer, f"layers.{index}.", tensors, rewrites, divided):
            parts[prefix + name] = part
    add("norm", "norm_bias", HEAD, f"{HEAD}_bias")
    return parts


def _values(held: Tensor | Matrix) -> Weight | Tensor:
    if isinstance(held, Matrix):
        return held.weight.detach()
    return held if held.ndim == 1 else Weight.full(held)


def _module(parameter: str) -> tuple[str, str]:
    """Return the module of a parameter, and what follows the module's name in a checkpoint."""
    if parameter in _WITHOUT_SUFFIX:
        return parameter, ""
    module = parameter.removesuffix("_bias")
    return module, ".weight" if module == parameter else ".bias"


def _rows(
    count: int, rewrite: Rewrite | None, suffix: str, order: tuple[int, ...] | None = None
) -> Rows:
    rewrite = rewrite or Rewrite()
    if suffix == ".bias" and rewrite.bias is not None:
        return Rows(count, rewrite.bias, order=order)
    return Rows(count, rewrite.factor, rewrite.offset if suffix == ".weight" else 0.0, order)


def _layer_parts(
    layer: DecoderLayer,
    prefix: str,
    tensors: Tensors,
    rewrites: Mapping[str, Rewrite],
    divided: Callable[[str], tuple[Section, ...]],
) -> Iterator[tuple[str, ParameterPart]]:
    """Yield the name of each tensor of a layer, after the layer's index, and what holds it.

    Args:
        layer: of a rank.
        prefix: of the names of its parameters.
        tensors: of the family.
        rewrites: of the modules.
        divided: returns the sections of a parameter.
    """
    head_dim = norm_dim = gate_dim = None
    orders: dict[str, tuple[int, ...] | None] = {}
    mixer = next((it for it in layer.spec.mixers if isinstance(it, Attention)), None)
    if mixer is not None:
        orders = dict.fromkeys(_ROTATED, head_order(mixer, tensors))
        head_dim = mixer.head_dim if tensors.grouped_qkv else None
        norm_dim = mixer.head_dim if mixer.qk_norm_by_head else None
        gate_dim = mixer.head_dim if mixer.gate else None
    for key, tensor in layer.named_parameters():
        parameter = key.removesuffix(".numbers")
        matrix = getattr(layer, parameter)
        values = _values(matrix if isinstance(matrix, Matrix) else tensor.detach())
        if parameter == CONVOLUTION:
            values = tensor.detach()
        base, suffix = _module(parameter)
        counts = stacked_rows(layer.spec, parameter) or [values.shape[0]]
        stacked = _XIELU if base == "activation" else stacked_modules(base, len(counts))
        modules = dict(zip(stacked, counts, strict=True))
        grouped_by = head_dim if base == "qkv" else None
        of_modules = _by_module(divided(parameter), modules)
        start = 0
        for name, group in itertools.groupby(modules, tensors.layer_modules.__getitem__):
            same = tuple(group)
            rows = tuple(
                dataclasses.replace(
                    _rows(modules[it], rewrites.get(it), suffix, orders.get(it)),
                    sections=of_modules[it],
                )
                for it in same
            )
            count = sum(it.count for it in rows)
            part = values.narrow(0, start, count)
            transposed = tensors.transposed and isinstance(part, Weight)
            row_size = norm_dim if base in _HEAD_NORMS else None
            yield (
                name + suffix,
                ParameterPart(
                    prefix + parameter,
                    part,
                    rows,
                    transposed,
                    grouped_by,
                    row_size,
                    depthwise=parameter == CONVOLUTION,
                    gated_by=gate_dim if same == _GATED else None,
                ),
            )
            start += count


def _by_module(
    divided: tuple[Section, ...], modules: Mapping[str, int]
) -> dict[str, tuple[Section, ...]]:
    """Return the sections of each of the modules with these numbers of rows."""
    if not divided:
        return dict.fromkeys(modules, ())
    ends = itertools.accumulate(modules.values())
    rows = [0, *itertools.accumulate(it.rows for it in divided)]
    places = [0, *(rows.index(end) for end in ends)]
    return {
        name: divided[start:stop]
        for name, (start, stop) in zip(modules, itertools.pairwise(places), strict=True)
    }


def unread_names(network: Network, tensors: Tensors) -> frozenset[str]:
    """Return the modules that files may have of layers which read the keys and values of another one."""
    names = [tensors.layer_modules.get(it, f"self_attn.{it}") for it in _OF_KEYS]
    return frozenset(
        f"{tensors.prefix}{tensors.layers}{index}.{name}"
        for index, layer in enumerate(network.layers)
        if isinstance(layer.mixer, Attention) and layer.mixer.kv_layer is not None
        for name in names
    )


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
