"""A decoder with quantized weights in plain PyTorch: float64 sums of the numbers that the C library multiplies."""

import torch

from kernels.weight_format import INT4_GROUPS, INT8_GROUPS, LIBRARY_GROUP
from kernels.weights import quantize

FORMATS = {8: INT8_GROUPS, 4: INT4_GROUPS}


def rounded_weights(weight, bits):
    """Return the weights that a packed matrix stands for, float64."""
    return quantize(weight, FORMATS[bits]).dequantize().double()


def rounded_activations(x, group=LIBRARY_GROUP):
    """Return rows of activations after their quantization, float64."""
    groups = x.float().view(len(x), -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    numbers = torch.round(groups * torch.where(most > 0, 127 / most, 0))
    return (numbers.double() * (most * torch.tensor(1 / 127)).double()).flatten(1)


def product(x, weight, bits, bias=None):
    """Multiply rows [T, C] by a matrix [N, C] as the library does."""
    y = rounded_activations(x) @ rounded_weights(weight, bits).T
    return (y if bias is None else y + bias.double()).float()


def rms_norm(x, weight, eps):
    """Return the norm of rows in float64, rounded."""
    x = x.double()
    return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).float()


def rotate(x, positions, theta=10_000.0):
    """Rotate heads [T, H, D] by their positions."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half).double() / half)
    angles = positions.double()[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.double().split(half, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).float()


class Decoder:
    """The float weights of a decoder of a shape, and its logits for a whole sequence."""

    def __init__(self, shape, vocab, bits, *, seed=0, head_norms=False, bias=False, tied=True):
        generator = torch.Generator().manual_seed(seed)

        def normal(*size, mean=0.0, std=1.0):
            return mean + std * torch.randn(size, generator=generator)

        def matrix(outputs, inputs):
            return normal(outputs, inputs, std=inputs**-0.5)

        attended = shape.heads * shape.head_dim
        stacked = attended + 2 * shape.kv_heads * shape.head_dim
        self.shape, self.bits = shape, bits
        self.layers = [
            {
                "qkv": matrix(stacked, shape.hidden),
                "qkv_bias": normal(stacked, std=0.3) if bias else None,
                "output": matrix(shape.hidden, attended),
                "gate_up": matrix(2 * shape.inner, shape.hidden),
                "down": matrix(shape.hidden, shape.inner),
                "input_norm": normal(shape.hidden, mean=1.0, std=0.1),
                "mlp_norm": normal(shape.hidden, mean=1.0, std=0.1),
                "q_norm": normal(shape.head_dim, mean=1.0, std=0.1) if head_norms else None,
                "k_norm": normal(shape.head_dim, mean=1.0, std=0.1) if head_norms else None,
            }
            for _ in shape.windows
        ]
        self.norm = normal(shape.hidden, mean=1.0, std=0.1)
        self.head = matrix(vocab, shape.hidden)
        self.embedding = self.head if tied else normal(vocab, shape.hidden)

    def logits(self, ids, cache_dtype=torch.float16, adapters=None, slot=-1):
        """Return the logits [T, V] of one sequence, whose adapter is in a slot of the layers' `LoraWeights`."""
        shape = self.shape

        def multiply(index, name, x, bias=None):
            y = product(x, self.layers[index][name], self.bits, bias)
            if slot >= 0:
                it = adapters[index][name]
                for part, (start, stop) in enumerate(it.bounds):
                    low = x.double() @ it.a[slot, part].double().T
                    y[:, start:stop] += (low @ it.b[slot, :, start:stop].double()).float()
            return y

        positions = torch.arange(len(ids))
        hidden = rounded_weights(self.embedding, self.bits)[ids].float()
        for index, (layer, window) in enumerate(zip(self.layers, shape.windows, strict=True)):
            x = rms_norm(hidden, layer["input_norm"], shape.eps)
            qkv = multiply(index, "qkv", x, layer["qkv_bias"])
            heads = qkv.view(len(ids), -1, shape.head_dim)
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            if layer["q_norm"] is not None:
                q = rms_norm(q, layer["q_norm"], shape.eps)
                k = rms_norm(k, layer["k_norm"], shape.eps)
            q, k = rotate(q, positions), rotate(k, positions)
            k, v = (part.to(cache_dtype).double() for part in (k, v))
            group = shape.heads // shape.kv_heads
            scores = torch.einsum("thd,shd->hts", q.double(), k.repeat_interleave(group, 1))
            seen = positions[:, None] >= positions
            if window:
                seen &= positions[:, None] - positions < window
            scores = (scores * shape.softmax_scale).masked_fill(~seen, -torch.inf)
            attended = torch.einsum(
                "hts,shd->thd", scores.softmax(-1), v.repeat_interleave(group, 1)
            )
            hidden = hidden + multiply(index, "output", attended.flatten(1).float())
            x = rms_norm(hidden, layer["mlp_norm"], shape.eps)
            gate, up = multiply(index, "gate_up", x).chunk(2, -1)
            hidden = hidden + multiply(index, "down", torch.nn.functional.silu(gate) * up)
        return product(rms_norm(hidden, self.norm, shape.eps), self.head, self.bits)
