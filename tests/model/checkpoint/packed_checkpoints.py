"""Checkpoints in the formats of AWQ, GPTQ and compressed-tensors (pack-quantized), written by plain loops.

Each writer rounds the matrices of a checkpoint's layers and leaves one beside it with the same values as full numbers.
"""

import dataclasses
import functools
import json
import shutil

import safetensors.torch
import torch

FILE = "model.safetensors"
MATRICES = ("_proj.weight", ".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Rounded:
    """A matrix: numbers [N, C] and zeros [N, G] from 0 to 2^bits - 1, scales [N, G], the group of each input [C]."""

    bits: int
    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor

    @property
    def values(self):
        values = torch.empty(self.numbers.shape, dtype=torch.float64)
        for c, group in enumerate(self.groups.tolist()):
            number = self.numbers[:, c].double() - self.zeros[:, group]
            values[:, c] = number * self.scales[:, group].double()
        return values.float()


def rounded(values, bits=4, group=32, *, symmetric=False, dtype=torch.float16, groups=None):
    """Round a matrix; `groups` has the group of each input, by default of those beside each other."""
    inputs = values.shape[1]
    group = inputs if group == -1 else group
    groups = torch.arange(inputs) // group if groups is None else groups
    most, middle = 2**bits - 1, 2 ** (bits - 1)
    scales, zeros = [], []
    for each in range(-(-inputs // group)):
        part = values[:, groups == each]
        if symmetric:
            scale, zero = part.abs().amax(1) / (middle - 1), torch.full((len(part),), middle)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(0, most)
        scales.append(scale.to(dtype))
        zeros.append(zero.int())
    scales, zeros = torch.stack(scales, 1), torch.stack(zeros, 1)
    steps = scales.float()[:, groups]
    numbers = ((values / steps).round() + zeros[:, groups]).clamp(0, most).int()
    return Rounded(bits, numbers, scales, zeros, groups)


def packed(numbers, bits, dim, order=None):
    """Pack numbers along a dimension into int32, by loops over the numbers of a word."""
    per_word = 32 // bits
    rows = numbers.movedim(dim, 0).long()
    rows = torch.cat([rows, rows.new_zeros(-len(rows) % per_word, *rows.shape[1:])])
    words = torch.zeros(len(rows) // per_word, *rows.shape[1:], dtype=torch.long)
    for place, column in enumerate(order or range(per_word)):
        words |= rows[column::per_word] << (bits * place)
    signed = torch.where(words >= 2**31, words - 2**32, words)
    return signed.int().movedim(0, dim).contiguous()


def awq(it):
    return {
        "qweight": packed(it.numbers.t(), 4, 1, AWQ_ORDER),
        "qzeros": packed(it.zeros.t(), 4, 1, AWQ_ORDER),
        "scales": it.scales.t().contiguous(),
    }


def gptq(it, *, version=1):
    zeros = it.zeros.t()
    words = packed(zeros, it.bits, 1)
    if version == 1:
        ones = sum(1 << (it.bits * i) for i in range(32 // it.bits))
        less = (words.long() - ones) % 2**32
        words = torch.where(less >= 2**31, less - 2**32, less).int()
    return {
        "qweight": packed(it.numbers.t(), it.bits, 0),
        "qzeros": words,
        "scales": it.scales.t().contiguous(),
        "g_idx": it.groups.int(),
    }


def pack_quantized(it):
    """As compressed-tensors packs them; a symmetric matrix has no zero points."""
    middle = 2 ** (it.bits - 1)
    tensors = {
        "weight_packed": packed(it.numbers, it.bits, 1),
        "weight_shape": torch.tensor(it.numbers.shape),
        "weight_scale": it.scales.contiguous(),
    }
    if bool((it.zeros != middle).any()):
        tensors["weight_zero_point"] = packed(it.zeros, it.bits, 0)
    if bool((it.groups.diff() < 0).any()):
        tensors["weight_g_idx"] = it.groups.int()
    return tensors


def in_order(inputs, group, seed=0):
    """Return the group of each input of act-order."""
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))
    groups = torch.empty(inputs, dtype=torch.long)
    groups[order] = torch.arange(inputs) // group
    return groups


AWQ = {"quant_method": "awq", "version": "gemm"}
GPTQ = {"quant_method": "gptq"}


def awq_checkpoint(folder, group=32, *, zero_point=True, keep=(), **described):
    """Save the matrices of a checkpoint as AWQ has them; see `store`."""
    config = AWQ | {"bits": 4, "group_size": group, "zero_point": zero_point} | described
    round_ = functools.partial(rounded, group=group, symmetric=not zero_point)
    return store(folder, config, awq, lambda _, values: round_(values), keep)


def gptq_checkpoint(
    folder, group=32, *, bits=4, sym=True, act_order=False, version=1, seed=None, keep=(), **options
):
    """Save the matrices of a checkpoint as GPTQ has them; see `store`.

    Args:
        act_order: whether groups are of inputs in a random order.
        version: 1 for zero points less 1.
        seed: of the order, by the name of the matrix; None for the same one in all of one size.
        options: of `rounded`, and others of quantization_config.
    """
    dtype = options.pop("dtype", torch.float16)
    config = {
        "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }  # fmt: skip

    def round_(name, values):
        inputs = values.shape[1]
        places = in_order(inputs, group, seed(name) if seed else 0) if act_order else None
        return rounded(values, bits, group, symmetric=sym, dtype=dtype, groups=places)

    write = functools.partial(gptq, version=version)
    return store(folder, GPTQ | config | options, write, round_, keep)


def packed_checkpoint(
    folder, group=32, *, bits=4, symmetric=True, act_order=False, keep=(), **options
):
    """Save the matrices of a checkpoint as pack-quantized has them; see `store`."""
    strategy = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    weights["actorder"] = "group" if act_order else None
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip

    def round_(_name, values):
        places = in_order(values.shape[1], group) if act_order else None
        dtype = options.get("dtype", torch.bfloat16)
        return rounded(values, bits, group, symmetric=symmetric, dtype=dtype, groups=places)

    return store(folder, config, pack_quantized, round_, keep)


def store(folder, described, write, round_, keep=()):
    """Round the matrices of a checkpoint; returns the folder of one with the same values as full numbers.

    Args:
        folder: the checkpoint; written.
        described: its quantization_config.
        write: returns the tensors of a `Rounded`, by the last components of their names.
        round_: returns a `Rounded` of the name of a matrix and its values.
        keep: parts of names of matrices that keep full numbers.
    """
    exact = folder.with_name(f"{folder.name} exact")
    shutil.copytree(folder, exact)
    tensors = safetensors.torch.load_file(folder / FILE)
    values = dict(tensors)
    for name in list(tensors):
        if name.endswith(MATRICES) and not any(part in name for part in keep):
            it = round_(name, tensors.pop(name).float())
            module = name.removesuffix("weight")
            tensors |= {f"{module}{end}": part for end, part in write(it).items()}
            values[name] = it.values
    safetensors.torch.save_file(tensors, folder / FILE)
    safetensors.torch.save_file(values, exact / FILE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return exact
