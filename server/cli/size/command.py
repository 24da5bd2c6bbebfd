"""`tessera size`: prints how many sequences fit on a GPU and how fast they are. The GPU may be absent.

Imports PyTorch only to ask for this machine's GPU.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

import msgspec

from model.checkpoint.config import ModelConfig
from model.errors import ModelError
from server.cli.command_settings import engine_config
from server.cli.output import fail, write_result
from server.cli.plan.processor import NoDeviceError, find_arch
from server.cli.size.estimate import (
    EXPECTED_SHARE,
    LAYER_SECONDS,
    Estimate,
    estimate,
    resolve_sizes,
    slots_text,
)
from server.engine.core.memory.kv_demand import GIB, NotEnoughMemoryError
from server.engine.core.start_checks import StartupError
from server.engine.runner.start.step_limits import step_limits

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from kernels.arch import GPUArch
    from server.cli.settings import Settings
    from server.cli.size.estimate import Decode, FirstToken

_NAME: Final = "size"
_WIDTH: Final = 120


def main(options: argparse.Namespace, settings: Settings, folder: Path) -> None:
    """Print the estimate; exits with status 1 if the model does not fit or is not supported.

    Args:
        options: has `gpu`, a key of the catalogue or None, `input_len`, `output_len` and `json`.
        settings: of the service.
        folder: of the model's configuration.
    """
    try:
        arch = find_arch(options.gpu, settings.device, "--gpu")
        config = engine_config(settings, folder)
        model = ModelConfig.from_folder(folder).within(config.max_model_len)
        _check(options, settings, arch, model.max_context)
        sizes = resolve_sizes(config, model, arch)
        # No GPU has kernels that need no chunks.
        chunk = model.network.state("float32").chunk
        limits = step_limits(config, model, arch, chunk)
        report = estimate(sizes, limits, config, arch, options.input_len, options.output_len)
    except (ModelError, NoDeviceError, NotEnoughMemoryError, StartupError) as error:
        fail(str(error), _NAME)
    if options.json:
        write_result(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        write_result(render(report, settings.model))


def render(report: Estimate, model: str) -> str:
    """Format an estimate for a terminal, without a newline at the end."""
    weights = "" if report.weight_dtype == report.dtype else f", weights in {report.weight_dtype}"
    cache = "" if report.kv_dtype == report.dtype else f", cache in {report.kv_dtype}"
    memory = report.memory
    used = memory.kv_tokens * memory.kv_bytes_per_token
    first, *rest = (f"{it.sequences} of {it.tokens} tokens" for it in report.capacity)
    longest = f", {rest[0]} (the longest)" if rest else ""
    parts = [
        f"{report.gpu_name}, {memory.total_bytes / GIB:.1f} GiB: {model} in {report.dtype}{weights}{cache}",
        f"memory    weights {memory.weight_bytes / GIB:.2f} GiB, activations about "
        f"{memory.activation_bytes / GIB:.2f} GiB, CUDA about {memory.cuda_bytes / GIB:.2f} GiB"
        f"{slots_text(memory.state_bytes, memory.state_snapshots, memory.adapter_bytes)}; "
        f"KV cache {used / GIB:.2f} GiB = {memory.kv_tokens} tokens of "
        f"{memory.kv_bytes_per_token / 2**10:g} KiB ({memory.kv_why})",
        f"requests  {first} (prompt {report.input_len}, answer {report.output_len}){longest} fit at the same "
        f"time; --max-num-seqs computes {report.max_num_seqs} at a time",
    ]
    lines = [
        line
        for part in parts
        for line in textwrap.wrap(part, _WIDTH, subsequent_indent=" " * 10, break_on_hyphens=False)
    ]
    return "\n".join([*lines, *_speeds(report.decode, report.first_token)])


def _speeds(decode: list[Decode], first: FirstToken) -> Iterator[str]:
    if first.limit_seconds is None or first.expected_seconds is None:
        yield "speed     not known: the catalogue has no bandwidth and no peak of this GPU"
        return
    yield (
        f"speed     at most by bandwidth and arithmetic; {EXPECTED_SHARE:.0%} of that is typical, and "
        f"{1e6 * LAYER_SECONDS:.0f} us for a layer that is small"
    )
    yield f"{'batch':>15}{'tokens/s at most':>20}{'typical':>12}{'ms per token':>15}  limited by"
    for row in decode:
        speed, typical = row.limit_tokens_per_second, row.expected_tokens_per_second
        assert speed is not None
        assert typical is not None
        note = "" if row.fits else "; more than runs at the same time"
        yield (
            f"{row.batch:>15}{speed:>20.0f}{typical:>12.0f}{1000 * row.batch / typical:>15.2f}  {row.bound}{note}"
        )
    yield (
        f"          first token of a prompt of {first.prompt_tokens} tokens: at least "
        f"{1000 * first.limit_seconds:.1f} ms, typically {1000 * first.expected_seconds:.1f} ms"
    )


def _check(options: argparse.Namespace, settings: Settings, arch: GPUArch, longest: int) -> None:
    if arch.is_cpu:
        fail(
            "this machine has no GPU; name one with --gpu, such as --gpu h100 (for a CPU, see `tessera plan`)",
            _NAME,
        )
    limit = settings.max_model_len or longest
    total = options.input_len + options.output_len
    if total > limit:
        fail(
            f"--input-len {options.input_len} and --output-len {options.output_len} are {total} tokens, "
            f"more than the limit of {limit}",
            _NAME,
        )
