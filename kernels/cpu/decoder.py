"""Binds a decoder's weights to the C library, whose one call computes a step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.cpu.library import load
from kernels.cpu.matrix import CMatrix, PackedMatrix
from kernels.weight_format import LIBRARY_GROUP

_LANES: Final = 16
_MOST_HEAD_DIM: Final = 256
_MOST_GROUP: Final = 16
_MOST_LAYERS: Final = 400
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class SlotMatrices(Protocol):
    """The matrices of all slots of adapters for one linear layer, as `kernels.linear.lora.LoraWeights` has them."""

    @property
    def a(self) -> Tensor:
        """See there."""

    @property
    def b(self) -> Tensor:
        """See there."""

    @property
    def bounds(self) -> Sequence[tuple[int, int]]:
        """See there."""


class DecoderShape(NamedTuple):
    """The sizes of a decoder.

    Attributes:
        hidden: C.
        inner: F, of the MLP.
        heads: H query heads.
        kv_heads: K.
        head_dim: D.
        eps: of the RMS norms.
        softmax_scale: factor on the scores.
        windows: of each layer, tokens that a token attends to; 0 for all.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    softmax_scale: float
    windows: tuple[int, ...]


class LayerMatrices(NamedTuple):
    """The matrices of a layer and its norms, [C] float32 each; the heads' norms, [D], may be None."""

    qkv: PackedMatrix
    output: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class StepTensors(NamedTuple):
    """The input of a step: tensors as in `model.executors.columns.StepArrays`, and what surrounds them.

    Attributes:
        arrays: the step's arrays.
        rows: R, decode rows.
        queries: tokens of each decode row, or the most that one has.
        prompt_seqs: Q.
        columns: of the block tables.
        sampled: earlier sampled tokens, int64; None if no id is negative.
        layers: caches of the layers, [2, N, S, K, D] float16 or float32, contiguous. Within a block the library has an
            order of its own (native/attention.h).
        rope: cos and sin of all positions, [positions, 1, D] float32 each.
        slots: of the rows' adapters, [T] int32; None if no row has one.
    """

    arrays: Any
    rows: int
    queries: int
    prompt_seqs: int
    columns: int
    sampled: Tensor | None
    layers: Sequence[Tensor]
    rope: tuple[Tensor, Tensor]
    slots: Tensor | None = None


class _Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", CMatrix),
        ("output", CMatrix),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("input_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("window", _INT),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", _INT),
        ("hidden", _INT),
        ("inner", _INT),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("head_dim", _INT),
        ("eps", ctypes.c_double),
        ("softmax_scale", ctypes.c_double),
        ("layer", ctypes.POINTER(_Layer)),
        ("norm", _POINTER),
        ("head", ctypes.POINTER(CMatrix)),
        ("embedding", ctypes.POINTER(CMatrix)),
    )


class CCache(ctypes.Structure):
    """`Cache` of native/attention.h."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("is_half", _INT),
        ("block_size", _INT),
        ("kv_heads", _INT),
        ("head_dim", _INT),
        ("by_token", _INT),
    )


class CSequences(ctypes.Structure):
    """`Sequences` of native/attention.h."""

    _fields_ = (
        ("count", _INT),
        ("columns", _INT),
        ("queries", _INT),
        ("first_row", _POINTER),
        ("lengths", _POINTER),
        ("tables", _POINTER),
    )


class CLora(ctypes.Structure):
    """`Lora` of native/rows.h."""

    MOST_PARTS: Final = 3
    _fields_ = (
        ("a", _POINTER),
        ("b", _POINTER),
        ("parts", _INT),
        ("inputs", _INT),
        ("outputs", _INT),
        ("ends", _INT * MOST_PARTS),
    )

    @classmethod
    def of(cls, weights: SlotMatrices) -> CLora:
        """Return the structure of the slots of one matrix."""
        _, parts, _, inputs = weights.a.shape
        ends = [end for _, end in weights.bounds]
        padded = (_INT * cls.MOST_PARTS)(*ends, *ends[-1:] * (cls.MOST_PARTS - parts))
        return cls(
            _address(weights.a), _address(weights.b), parts, inputs, weights.b.shape[2], padded
        )


class _LoraLayer(ctypes.Structure):
    _fields_ = tuple((name, CLora) for name in LayerMatrices._fields[:4])


class _Adapters(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_LoraLayer)),
        ("slots", _POINTER),
        ("ranks", _POINTER),
        ("rank", _INT),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", _INT),
        ("token_ids", _POINTER),
        ("sampled", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("decode", CSequences),
        ("prompts", CSequences),
        ("caches", ctypes.POINTER(CCache)),
        ("num_logits", _INT),
        ("logits_rows", _POINTER),
        ("normed", _POINTER),
        ("logits", _POINTER),
        ("best", _POINTER),
        ("adapters", ctypes.POINTER(_Adapters)),
    )


def unsupported(shape: DecoderShape) -> tuple[str, ...]:
    """List why the library cannot compute a decoder of this shape here; empty if it can."""
    library = load()
    odd = next((n for n in (shape.hidden, shape.inner) if n % LIBRARY_GROUP), None)
    tests = (
        (isinstance(library, str), str(library)),
        (odd is not None, f"a size of {odd} is not a multiple of {LIBRARY_GROUP}"),
        (shape.head_dim % (2 * _LANES) != 0, f"heads of {shape.head_dim}, no multiple of 32"),
        (
            len(shape.windows) > _MOST_LAYERS,
            f"{len(shape.windows)} layers, more than {_MOST_LAYERS}",
        ),
        (shape.head_dim > _MOST_HEAD_DIM, f"heads of {shape.head_dim}, more than {_MOST_HEAD_DIM}"),
        (
            shape.heads // shape.kv_heads > _MOST_GROUP,
            f"{shape.heads // shape.kv_heads} query heads for each key-value head, more than {_MOST_GROUP}",
        ),
    )
    return tuple(reason for fails, reason in tests if fails)


class CPUDecoder:
    """Computes steps of a decoder with quantized weights on a CPU.

    Args:
        shape: of the decoder; `unsupported` must be empty for it.
        layers: in order.
        norm: the final norm, [C] float32.
        head: the projection to the vocabulary.
        embedding: the matrix whose rows are the tokens' embeddings; may be the head.
        threads: that compute a step, the caller included.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerMatrices],
        norm: Tensor,
        head: PackedMatrix,
        embedding: PackedMatrix,
        threads: int,
    ) -> None:
        library = load()
        assert not isinstance(library, str), library
        self._library = library
        self._held = [layers, norm, head, embedding]  # their memory is that of the structures
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(
                    layer.qkv.c,
                    layer.output.c,
                    layer.gate_up.c,
                    layer.down.c,
                    *map(_address, layer[4:]),
                    window,
                )
                for layer, window in zip(layers, shape.windows, strict=True)
            )
        )
        self._model = _Model(
            len(layers),
            *shape[:7],
            self._layers,
            _address(norm),
            ctypes.pointer(head.c),
            ctypes.pointer(embedding.c),
        )
        self._caches: tuple[Sequence[Tensor], Any] | None = None
        self._adapters: tuple[Sequence[Mapping[str, SlotMatrices]], Tensor, Any] | None = None
        self.hidden, self.vocab_size = shape.hidden, head.c.outputs
        self.num_bytes = sum(matrix.num_bytes for layer in layers for matrix in layer[:4]) + sum(
            matrix.num_bytes for matrix in {id(m): m for m in (head, embedding)}.values()
        )
        self._engine = _POINTER(library.tessera_start(_INT(threads)))
        if not self._engine.value:
            raise MemoryError(f"the CPU library cannot start {threads} threads")
        weakref.finalize(self, library.tessera_end, self._engine)

    def bind_adapters(self, layers: Sequence[Mapping[str, SlotMatrices]], ranks: Tensor) -> None:
        """Use the slots of adapters in steps whose rows name them.

        Args:
            layers: of each layer those of its matrices by name, float32; read in each step.
            ranks: [slots] int64; likewise.
        """
        structures = (_LoraLayer * len(layers))(
            *(
                _LoraLayer(*(CLora.of(it[name]) for name in LayerMatrices._fields[:4]))
                for it in layers
            )
        )
        self._adapters = layers, ranks, structures

    def logits(
        self, step: StepTensors, rows: Tensor | None, num_logits: int
    ) -> tuple[Tensor, Tensor]:
        """Compute a step: write keys and values to the cache, and return logits.

        Args:
            step: the input.
            rows: [M] int64, the rows that have logits; None for all.
            num_logits: M.

        Returns:
            The logits, [M, V] float32, and their argmax, [M] int64, the smallest among equals; -1 where the largest
            logit is not finite or one is NaN.
        """
        logits, best = (
            torch.empty((num_logits, self.vocab_size)),
            torch.empty(num_logits, dtype=torch.int64),
        )
        self._compute(
            step,
            num_logits=num_logits,
            logits_rows=_address(rows),
            logits=_address(logits),
            best=_address(best),
        )
        return logits, best

    def hidden_states(self, step: StepTensors) -> Tensor:
        """Compute a step, and return the normalized hidden states of all rows, [T, C] float32."""
        out = torch.empty((len(step.arrays.token_ids), self.hidden))
        self._compute(step, normed=_address(out))
        return out

    def project(self, hidden: Tensor) -> Tensor:
        """Compute the logits [M, V] float32 of normalized hidden states [M, C] float32."""
        hidden = hidden.float().contiguous()
        out = torch.empty((len(hidden), self.vocab_size))
        call = _Step(num_logits=len(hidden), normed=_address(hidden), logits=_address(out))
        self._check(
            self._library.tessera_logits(
                self._engine, ctypes.byref(self._model), ctypes.byref(call)
            )
        )
        return out

    def _compute(self, step: StepTensors, **outputs: int | None) -> None:
        a = step.arrays
        call = _Step(
            len(a.token_ids),
            _address(a.token_ids),
            _address(step.sampled),
            _address(a.positions),
            _address(a.slot_mapping),
            *map(_address, step.rope),
            CSequences(
                step.rows,
                step.columns,
                step.queries,
                _address(a.cu_seqlens),
                _address(a.seq_lens),
                _address(a.block_table),
            ),
            CSequences(
                step.prompt_seqs,
                step.columns,
                0,
                _address(a.prompt_cu_seqlens),
                _address(a.prompt_seq_lens),
                _address(a.prompt_block_table),
            ),
            self._bound(step.layers),
            **outputs,
        )
        if step.slots is not None:
            assert self._adapters is not None
            layers, ranks, structures = self._adapters
            rank = layers[0]["qkv"].b.shape[1]
            slots = step.slots.contiguous()
            adapters = _Adapters(structures, _address(slots), _address(ranks), rank)
            call.adapters = ctypes.pointer(adapters)
        self._check(
            self._library.tessera_step(self._engine, ctypes.byref(self._model), ctypes.byref(call))
        )

    def _bound(self, layers: Sequence[Tensor]) -> Any:  # noqa: ANN401 - an array type made by ctypes
        """Return the structures of a cache, which are kept for the next step."""
        if self._caches is None or self._caches[0] is not layers:
            caches = (CCache * len(layers))(
                *(
                    CCache(
                        _address(layer[0]),
                        _address(layer[1]),
                        layer.dtype is torch.float16,
                        *layer.shape[2:],
                        False,
                    )
                    for layer in layers
                )
            )
            self._caches = layers, caches
        return self._caches[1]

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise MemoryError("no memory for the rows of a step")


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
