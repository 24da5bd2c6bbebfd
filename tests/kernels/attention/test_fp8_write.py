"""Writing keys and values to an FP8 cache, with PyTorch and with the interpreted kernel."""

from __future__ import annotations

import pytest
import torch

from kernels.attention.pytorch.write_kv import write_kv as torch_write
from tests.kernels import triton_interpreter
from tests.kernels.references import reference

SLOTS = torch.tensor([5, -1, 17, 0, 31], dtype=torch.int32)


def triton_write(*arguments):
    from kernels.attention.portable.write_kv import write_kv

    write_kv(*arguments)


WRITERS = [
    pytest.param(torch_write, id="PyTorch"),
    pytest.param(triton_write, id="Triton", marks=triton_interpreter.interpreted),
]


def empty_cache(heads, head_dim, blocks=3, size=16):
    """Return a cache filled with NaN, and its scales."""
    kv = torch.full((2, blocks, size, heads, head_dim), float("nan"))
    scale = torch.full((2, blocks, heads, size), float("nan"))
    return kv.to(torch.float8_e4m3fn), scale


def by_slot(scale):
    """Return scales [2, N, K, S] as [2, N * S, K]."""
    return scale.transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 32), (3, 80), (2, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stored_bytes_and_scales_equal_the_reference(write, heads, head_dim, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((2, 5, heads, head_dim), generator=generator)
    rows = (rows * torch.randint(-10, 10, (2, 5, heads, 1), generator=generator).exp2()).to(dtype)
    kv, scale = empty_cache(heads, head_dim)

    write(rows[0], rows[1], kv, SLOTS, scale)

    numbers, scales = reference.quantize_kv(rows)
    kept = SLOTS >= 0
    slots = SLOTS[kept].long()
    stored = kv.view(torch.uint8).flatten(1, 2)[:, slots]
    assert torch.equal(stored, numbers[:, kept].view(torch.uint8))
    assert torch.equal(by_slot(scale)[:, slots], scales[:, kept])


@pytest.mark.parametrize("write", WRITERS)
def test_every_float16_number_rounds_to_the_nearest_e4m3_number(write):
    # All float16 numbers up to 448, of both signs, in rows whose scale is 1.
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    numbers = bits[bits.isfinite() & (bits.abs() <= 448)]
    rows = torch.full((-(-numbers.numel() // 255), 256), 448.0, dtype=torch.float16)
    rows[:, 1:].reshape(-1)
    padded = torch.zeros(rows.shape[0] * 255, dtype=torch.float16)
    padded[: numbers.numel()] = numbers
    rows[:, 1:] = padded.view(-1, 255)
    rows = rows[:, None]
    kv, scale = empty_cache(1, 256, blocks=-(-rows.shape[0] // 16))

    write(rows, -rows, kv, torch.arange(rows.shape[0], dtype=torch.int32), scale)

    stored = kv.flatten(1, 3)[:, : rows.shape[0]]
    assert torch.equal(
        stored[0].view(torch.uint8), rows[:, 0].to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert torch.equal(
        stored[1].view(torch.uint8), (-rows[:, 0]).to(torch.float8_e4m3fn).view(torch.uint8)
    )
    assert torch.equal(by_slot(scale)[:, : rows.shape[0]], torch.ones((2, rows.shape[0], 1)))
