"""Rotary position embedding: inverse frequencies of each variant, and the cos and sin tables that the layers read."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor
from torch.nn import functional

from kernels import rope_tables
from model.network.spec import Rotary

_logger = logging.getLogger(__name__)
_CHUNK_POSITIONS = 16_384


def inverse_frequencies(rope: Rotary | None, head_dim: int, *, long: bool = False) -> Tensor:
    """Compute the radians by which each pair of dimensions rotates per position.

    For `dynamic` they hold within the original context; see `RotaryEmbedding` for longer sequences.

    Args:
        rope: the parameters; None for no rotation.
        head_dim: D.
        long: `longrope` only: whether the context is longer than the original one.

    Returns:
        [D / 2] float32, on the CPU; 0 for pairs that do not rotate.

    Source: RoFormer (arXiv 2104.09864) section 3.2; the scaled variants as in transformers 5,
        `modeling_rope_utils.py`, operation for operation, so that float32 results are equal.
    """
    if rope is None:
        return torch.zeros(head_dim // 2, device="cpu")
    if rope.rope_type == "proportional":
        rotating = _frequencies(rope, head_dim, long=long)[: rope.pairs] / rope.factor
        return functional.pad(rotating, (0, head_dim // 2 - rope.pairs))
    rotating = _frequencies(rope, rope.dims or head_dim, long=long)
    return functional.pad(rotating, (0, head_dim // 2 - len(rotating)))


def _frequencies(rope: Rotary, dims: int, *, long: bool) -> Tensor:
    """Compute the frequencies of a head of which all dimensions rotate."""
    exponents = torch.arange(0, dims, 2, dtype=torch.int64, device="cpu").float() / dims
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    if rope.rope_type == "longrope":
        factors = torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
        return 1.0 / (factors * rope.theta**exponents)
    if rope.rope_type == "yarn":
        return _yarn(rope, frequencies, rope.theta**exponents, dims)
    return frequencies


def _llama3(rope: Rotary, frequencies: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend linearly in between.

    Source: Llama 3.1 reference code, `apply_scaling`.
    """
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(rope: Rotary, frequencies: Tensor, periods: Tensor, dims: int) -> Tensor:
    """Keep the frequencies of fast dimensions, divide those of slow ones by the factor, interpolate in between.

    Source: YaRN (arXiv 2309.00071) section 3.2, "NTK-by-parts".
    """

    def dimension_turning(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return dims * math.log(turns) / (2 * math.log(rope.theta))

    first, last = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 0.001  # keeps the ramp finite, as the reference does
    dimensions = torch.arange(dims // 2, dtype=torch.float32, device="cpu")
    keep = 1 - torch.clamp((dimensions - first) / (last - first), 0, 1)
    return 1.0 / (rope.factor * periods) * (1 - keep) + frequencies * keep


class RotaryEmbedding:
    """Cosines and sines by position, in the layout of `kernels.apply_rope`.

    It owns a table for serving, whose rows never change once written, except where `longrope` passes the original
    context.

    `dynamic` (NTK) depends on a length L: beyond the original context, theta grows with L. transformers takes L from
    the longest sequence of a forward pass, so a token's rotation depends on the other tokens of the batch. In a cache
    that sequences share, a key must not depend on chunking, batching or preemption. Hence there are two rules:

    - serving (`table`): L = position + 1. This equals transformers' generation token by token, and its single forward
      pass over any prompt within the original context.
    - training (`dense`): L = the number of positions of the call. This equals transformers' single forward pass at any
      length.

    `longrope` has two sets of frequencies, for sequences up to the original context and for longer ones. A key must
    not change when its sequence passes that length. In serving the set is that of the longest sequence that the table
    is reserved for, so a service with a limit above the original context uses the long set for all sequences.

    Models with learned positions have frequencies of 0, so that all layers are computed by the same kernels: a rotation
    by 0 does not change a bit.

    Args:
        rope: the parameters; None for no rotation.
        head_dim: D.
    """

    def __init__(self, rope: Rotary | None, head_dim: int) -> None:
        self._stated = rope
        self._rope = Rotary() if rope is None else rope
        self._head_dim = head_dim
        self._frequencies: dict[bool, Tensor] = {}
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def dense(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cos and sin for whole sequences, without the table.

        Args:
            positions: [S] integers.
            dtype: dtype of the result.

        Returns:
            cos and sin, [S, 1, D] each.
        """
        frequencies = self._frequencies_on(positions.device, len(positions))
        if self._rope.rope_type == "dynamic":
            length = torch.tensor(
                [positions.shape[0]], dtype=torch.float32, device=positions.device
            )
            frequencies = self._dynamic(length)[0]
        angles = positions.float()[:, None] * frequencies
        return self._tables(angles, dtype)

    def reserve(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Grow the table to at least `num_positions` rows.

        Growing moves the table to a new address: reserve the longest context before capturing CUDA graphs.
        """
        old_cos, old_sin = self._cos, self._sin
        kept = old_cos.shape[0] if old_cos.dtype is dtype and old_cos.device == device else 0
        if kept >= num_positions:
            return
        if self._is_long(kept) != self._is_long(num_positions):
            kept = 0
        shape = (num_positions, 1, self._head_dim)
        self._cos = torch.empty(shape, dtype=dtype, device=device)
        self._sin = torch.empty(shape, dtype=dtype, device=device)
        frequencies = self._frequencies_on(device, num_positions)
        if self._is_long(num_positions) and not kept:
            _logger.info(
                "LongRoPE: with up to %d tokens, sequences of every length have the frequencies for long texts;"
                " --max-model-len %d selects those for short texts",
                num_positions,
                self._rope.original_max_positions,
            )
        if kept:
            self._cos[:kept], self._sin[:kept] = old_cos, old_sin
        # In chunks, because the float32 intermediates of 10^6 positions take gigabytes.
        for start in range(kept, num_positions, _CHUNK_POSITIONS):
            stop = min(start + _CHUNK_POSITIONS, num_positions)
            positions = torch.arange(start, stop, device=device).float()
            if self._rope.rope_type == "dynamic":
                frequencies = self._dynamic(positions + 1)
            angles = positions[:, None] * frequencies
            self._cos[start:stop], self._sin[start:stop] = self._tables(angles, dtype)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cos and sin of all reserved positions, [positions, 1, D] each, contiguous."""
        return self._cos, self._sin

    def _tables(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of angles, [..., D / 2]; [..., 1, D] each."""
        cos, sin = rope_tables(angles, self._rope.attention_factor, dtype)
        if self._rope.dims is not None and self._rope.attention_factor != 1:
            # The attention factor is of the dimensions that rotate.
            halves = cos.view(*cos.shape[:-1], 2, self._head_dim // 2)
            halves[..., self._rope.dims // 2 :] = 1
        return cos, sin

    def _is_long(self, num_positions: int) -> bool:
        """Return whether sequences of up to `num_positions` tokens have the frequencies for longer contexts."""
        rope = self._rope
        return rope.rope_type == "longrope" and num_positions > rope.original_max_positions

    def _frequencies_on(self, device: torch.device, num_positions: int) -> Tensor:
        """Return the frequencies for sequences of up to `num_positions` tokens."""
        # Not module buffers: `module.to(bfloat16)` would convert a buffer too, and a float32 position times a
        # bfloat16 frequency is wrong by whole rotations after a few hundred tokens.
        long = self._is_long(num_positions)
        found = self._frequencies.get(long)
        if found is None or found.device != device:
            found = inverse_frequencies(self._stated, self._head_dim, long=long).to(device)
            self._frequencies[long] = found
        return found

    def _dynamic(self, lengths: Tensor) -> Tensor:
        """Compute the frequencies for sequences of the given lengths (tokens).

        Args:
            lengths: [n] float32.

        Returns:
            [n, D / 2] float32.

        Source: transformers 5, `modeling_rope_utils.py`, `_compute_dynamic_ntk_parameters`.
        """
        rope, half = self._rope, self._head_dim // 2
        dims = rope.dims or self._head_dim
        original = rope.original_max_positions
        stretch = rope.factor * lengths.clamp(min=original) / original - (rope.factor - 1)
        theta = rope.theta * stretch ** (dims / (dims - 2))
        exponents = torch.arange(0, dims, 2, device=lengths.device).float() / dims
        return functional.pad(1.0 / (theta[:, None] ** exponents), (0, half - dims // 2))
