"""Makes compressed-tensors checkpoints with the library itself, beside checkpoints of its dequantized weights."""

import json
import shutil

import pytest
import safetensors.torch
import torch

FILE = "model.safetensors"


def arguments(**changes):
    """Return `weights` of a config group: by default int8 with a scale for each output."""
    return {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    } | changes


def group(weights, targets=("Linear",), **others):
    return {"targets": list(targets), "weights": weights, "input_activations": None, **others}


def compress(folder, groups, form, ignore=("lm_head",), scale_dtype=torch.float32, **keys):
    """Compress the matrices of a folder; return a folder beside it with the library's dequantized weights.

    Args:
        groups: the config groups, by name; a group without a format has `form`.
        form: the compression format.
        ignore: names or patterns of modules that stay full.
        scale_dtype: of the scales in the file.
        keys: others of `quantization_config`.
    """
    library = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils.match import match_name, match_targets

    del library
    exact = folder.with_name(f"{folder.name} exact")
    shutil.copytree(folder, exact)
    tensors = safetensors.torch.load_file(folder / FILE)
    values = dict(tensors)
    schemes = {name: QuantizationScheme(**it) for name, it in groups.items()}
    by_target = {target: it for it in schemes.values() for target in it.targets}
    linear = torch.nn.Linear(1, 1)
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        if tensor.ndim != 2 or "embed" in name or any(match_name(module, it) for it in ignore):
            continue
        targets = match_targets(module, linear, by_target)
        if not targets:
            continue
        scheme = by_target[targets[0]]
        kind = scheme.format or form
        compressor = BaseCompressor.get_value_from_registry(getattr(kind, "value", kind))
        scale, zero = _scales(tensor.float(), scheme.weights)
        state = {
            "weight": tensor.float(),
            "weight_scale": scale.to(scale_dtype).float(),
            "weight_zero_point": zero,
        }
        packed = compressor.compress(state, scheme)
        values[name] = compressor.decompress(dict(packed), scheme)["weight"].contiguous()
        del tensors[name]
        packed["weight_scale"] = packed["weight_scale"].to(scale_dtype)
        tensors |= {f"{module}.{part}": it.contiguous() for part, it in packed.items()}
    safetensors.torch.save_file(tensors, folder / FILE)
    safetensors.torch.save_file(values, exact / FILE)
    described = {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": list(ignore),
        "quantization_status": "compressed", "kv_cache_scheme": None, **keys,
    }  # fmt: skip
    write_config(folder, quantization_config=described)
    return exact


def write_config(folder, **changes):
    """Change keys of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(folder, change):
    """Apply a function to the tensors of a folder, by name."""
    tensors = safetensors.torch.load_file(folder / FILE)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / FILE)


def _scales(weight, args):
    """Return the scales and zero points of a matrix, as the library calculates them from the extremes."""
    from compressed_tensors.quantization.utils import calculate_qparams

    outputs, inputs = weight.shape
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
        shape = (1,)
    elif args.strategy == "channel":
        parts, shape = weight, (outputs, 1)
    elif args.strategy == "group":
        parts = weight.reshape(-1, args.group_size)
        shape = (outputs, inputs // args.group_size)
    else:
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -inputs % width, 0, -outputs % height))
        blocks = padded.unfold(0, height, height).unfold(1, width, width)
        shape = blocks.shape[:2]
        parts = blocks.flatten(2).flatten(0, 1)
    scale, zero = calculate_qparams(parts.amin(1), parts.amax(1), args)
    return scale.view(shape), zero.view(shape)
