"""Times recorded decode steps with given launch configurations of their attention kernel.

Weights are random, all sequences have the same length, and blocks are in random order. Steps are recorded as in the
engine, and the recordings of the launch configurations are replayed alternately. The host's work is not measured.

    python -m benchmarks.decode_steps [--model qwen3-0.6b] [--sequences 16 64 256] [--contexts 128 384]
        [--launches table block_n=32,num_stages=2 hopper_keys_on_m_decode:table] [--kv-cache-dtype fp8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

import kernels
from benchmarks.attention_inputs import forced, parse_launch, spec_named
from benchmarks.report import add_bookkeeping, write_report
from kernels import PagedBatch, Phase
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import resolve_kv_dtype
from model.checkpoint.weights import load_model
from model.device.kv_cache import KVCache
from model.device.replay import CudaGraphs, Replay
from model.executors.layers.attention_plans import AttentionMetadata, PhasePlans
from model.executors.layers.network import PagedStep
from model.hub.resolve import resolve
from server.cli.bench.engine.options import shape_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kernels import GPUArch
    from kernels.attention.problem import AttentionProblem
    from kernels.attention.select import Selection
    from model.decoder import DecoderLM

BLOCK_SIZE = 16
TABLE = "table"
"""Name of the launch configuration from the tuning tables."""
_FEWEST_COLUMNS = 64
"""Minimum columns of a recording's block table, as in the engine."""
_FILLED_BLOCKS = 4096
"""Blocks filled at once, to limit the memory for float32 intermediates."""
_REPLAYS = 30
_WARM_REPLAYS = 3


def main() -> None:
    """Time the steps and write the result file."""
    arguments = _arguments()
    device = torch.device(arguments.device)
    model = _load(arguments.model, device)
    model.reserve_positions(max(arguments.contexts))
    rows: list[dict[str, Any]] = []
    for context in arguments.contexts:
        for sequences in arguments.sequences:
            cache = _cache(model, sequences, context, arguments.kv_cache_dtype)
            steps = {
                launch: record(step(model, cache, sequences, context, launch), device)
                for launch in arguments.launches
            }
            times: dict[str, list[float]] = {launch: [] for launch in steps}
            for _ in range(arguments.rounds):
                for launch, replay in steps.items():
                    times[launch].append(round(microseconds(replay, device), 1))
            rows += [
                {
                    "model": arguments.model,
                    "kv_cache_dtype": arguments.kv_cache_dtype,
                    "sequences": sequences,
                    "context": context,
                    "launch": launch,
                    "us": statistics.median(found),
                    "us_rounds": found,
                }
                for launch, found in times.items()
            ]
            shown = " | ".join(f"{name} {statistics.median(us):g}" for name, us in times.items())
            print(f"{arguments.model} {sequences} x {context}, us: {shown}", flush=True)
    libraries = ("torch", "triton") if device.type == "cuda" else ("torch",)
    write_report("steps", rows, libraries, device=device.type, folder=arguments.out,
        revision=arguments.commit, echo=False)  # fmt: skip


def step(
    model: DecoderLM, cache: KVCache, sequences: int, context: int, launch: str
) -> Callable[[], Tensor]:
    """Return a function that computes a decode step: embeddings of the sampled tokens, layers, logits, argmax.

    Args:
        model: an optimized model.
        cache: must have blocks for all sequences.
        sequences: B.
        context: keys of each sequence, including the step's.
        launch: `TABLE`, or the fields of a `LaunchConfig` that differ from the table's; a kernel's name and a colon
            may precede either.
    """
    numbers = functools.partial(torch.full, (sequences,), device=model.device)
    blocks = -(-context // BLOCK_SIZE)
    columns = max(_FEWEST_COLUMNS, 1 << (blocks - 1).bit_length())
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(0))
    table = torch.zeros((sequences, columns), dtype=torch.int32)
    table[:, :blocks] = order[: sequences * blocks].view(sequences, blocks)
    last, offset = divmod(context - 1, BLOCK_SIZE)
    slots = (table[:, last] * BLOCK_SIZE + offset).to(model.device)
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=model.device)
    batch = PagedBatch(
        offsets, numbers(context, dtype=torch.int32), table.to(model.device),
        num_tokens=sequences,
        max_seqlen_q=1,
        max_seqlen_k=columns * BLOCK_SIZE,
        keys_settled=True,
    )  # fmt: skip
    (mixer,) = model.attention.mixers
    problem = model.attention.problem(mixer, Phase.DECODE, BLOCK_SIZE, cache.kv_dtype)
    selection = _select(problem, kernels.detect(model.device), launch, batch)
    ids = -1 - torch.arange(sequences, device=model.device)
    positions, sampled = numbers(context - 1), numbers(0)
    logits = torch.empty(sequences, model.network.vocab, dtype=model.dtype, device=model.device)
    tokens, logprobs = numbers(0), numbers(0.0, dtype=torch.float32)

    @torch.inference_mode()
    def compute() -> Tensor:
        plan = kernels.plan_attention(problem, batch, selection=selection)
        most = sequences * batch.max_seqlen_k
        metadata = AttentionMetadata(slots, sequences, (PhasePlans(plan, None),), most)
        layers = model.executors.layers
        step = PagedStep(
            None, cache, positions, layers.bound, deterministic=False, metadata=metadata
        )
        hidden = layers.hidden_states(step, ids, sampled)
        return sampled.copy_(layers.bound.head.argmax(hidden, logits, tokens, logprobs))

    return compute


def _select(problem: AttentionProblem, arch: GPUArch, launch: str, batch: PagedBatch) -> Selection:
    """Select the kernel and launch that `launch` names, as in `step`."""
    name, _, fields = launch.rpartition(":")
    if name:
        problem = dataclasses.replace(problem, unmeasured=True)
    selection = kernels.select(problem, arch, (spec_named(name),) if name else None)
    if fields == TABLE:
        return selection
    chosen = selection.launch_for(batch.max_seqlen_k, batch.num_seqs)
    return forced(selection.spec, arch, parse_launch(fields, chosen))


def record(compute: Callable[[], object], device: torch.device) -> Replay:
    """Record a step; on a CPU, for a dry run, return the function itself."""
    if device.type == "cuda":
        return CudaGraphs(device).record(compute)
    return compute


def microseconds(replay: Replay, device: torch.device) -> float:
    """Return the microseconds of one replay, averaged over consecutive replays."""
    if device.type != "cuda":
        begin = time.perf_counter()
        replay()
        return 1e6 * (time.perf_counter() - begin)
    for _ in range(_WARM_REPLAYS):
        replay()
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin_event.record()
    for _ in range(_REPLAYS):
        replay()
    end_event.record()
    end_event.synchronize()
    milliseconds: float = begin_event.elapsed_time(end_event)
    return 1e3 * milliseconds / _REPLAYS


def _load(name: str, device: torch.device) -> DecoderLM:
    path = shape_folder(name) or resolve(name)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(path, ModelConfig.from_folder(path), dtype, device, "dummy")
    if len(model.attention.mixers) > 1:
        raise SystemExit(f"{name} has two kinds of attention, which need different launches")
    return model


def _cache(model: DecoderLM, sequences: int, context: int, kv_cache_dtype: str) -> KVCache:
    state = model.network.state(resolve_kv_dtype(kv_cache_dtype, model.dtype))
    blocks = sequences * -(-context // BLOCK_SIZE)
    cache = KVCache(state, blocks, BLOCK_SIZE, model.device)
    for layer, scale in zip(cache.layers, cache.scales, strict=True):
        # Random values: computing with zeros takes a GPU less power, and therefore less time.
        rows = layer.flatten(0, 1)
        for start in range(0, len(rows), _FILLED_BLOCKS):
            part = rows[start : start + _FILLED_BLOCKS]
            part.copy_(torch.randn(part.shape, device=part.device))
        if scale is not None:
            scale.fill_(1.0)
    return cache


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-0.6b", help="name of a shape or of a checkpoint")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 384])
    parser.add_argument(
        "--launches", nargs="+", default=[TABLE], metavar="[KERNEL:]FIELD=NUMBER,..."
    )
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--rounds", type=int, default=3)
    add_bookkeeping(parser)
    parser.add_argument("--device", default="cuda", help="cpu: dry run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
