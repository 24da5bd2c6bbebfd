"""`tessera bench engine`: measures the engine without HTTP and, with `--profile`, where its time is spent.

Imports PyTorch, so `server.cli.command_groups` imports it only for this command.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels import FP8, GPUArch, KernelError, detect
from kernels.collective.communicator import AbsentRanks
from kernels.weight_format import LIBRARY_FORMATS
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from model.device.quantizations import QUANTIZATIONS, loaded_format
from model.errors import UnsupportedModelError
from model.families.unlisted import NAME
from model.progress import Status, watched
from server.cli.bench import result
from server.cli.bench.engine import table as engine_table
from server.cli.bench.engine.measures import EngineMeasures, Row
from server.cli.bench.engine.options import adapt, make_plan
from server.cli.bench.engine.profile import Profiler, StepProfile
from server.cli.bench.engine.run import EngineRun, EngineRunError
from server.engine.core.start_checks import StartupError
from server.engine.link.engine_process.process_setup import freeze_startup_objects
from server.engine.runner.explain.model_work import ModelWork
from server.version import version

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from server.cli.bench.engine.workloads import Plan, Workload
    from server.engine.core.messages import EngineConfig


def main(
    arguments: Sequence[str],
    options: argparse.Namespace,
    config: EngineConfig,
    given: set[str],
    began: float,
) -> None:
    """Measure, print and write the result; exits with status 1 if the engine does not start or a run fails.

    Args:
        arguments: after `tessera bench engine`, for the result.
        options: the parsed flags.
        config: of the engine.
        given: names of the settings that the operator gave.
        began: `time.perf_counter()` when the command began.

    Raises:
        ModelError: the model cannot be loaded.
    """
    plan = make_plan(options)
    model = ModelConfig.from_folder(Path(config.model_path), config.model_backend)
    if model.network.modules is not None:
        raise UnsupportedModelError(
            f"{NAME}: the work of its modules is not known; `tessera bench serve` measures a service"
        )
    config = adapt(config, plan, given, model.max_context)
    try:
        engine = EngineRun(config, options.idle_seconds)
        ready = time.perf_counter() - began
        engine.use_idle_time()
        freeze_startup_objects()
        arch = detect(engine.info.device)
        kv_dtype = engine.info.kv_cache_dtype
        quantization = QUANTIZATIONS.get(engine.info.quantization, model.weight_format)
        # The C library's cache in float16 and its weights count as the model's dtype: a CPU's peaks are not known.
        work = ModelWork(
            DecoderLM(
                model,
                getattr(torch, engine.info.dtype),
                "meta",
                loaded_format(quantization, None, in_library=quantization in LIBRARY_FORMATS),
                AbsentRanks(config.tensor_parallel) if config.tensor_parallel > 1 else None,
            ),
            config.block_size,
            arch,
            kv_dtype if kv_dtype == FP8 else None,
        )
        generator = np.random.default_rng(options.seed)
        measures = EngineMeasures(engine, work, plan, generator, _say)
        rows, measured = _measure(measures, plan, ready)
        profiles: list[StepProfile] = []
        if options.profile:
            profiles = Profiler(engine, work, plan, generator).profile(measured)
            print(*map(engine_table.render, profiles), sep="\n", flush=True)
    except (StartupError, EngineRunError, KernelError) as error:
        _say(f"tessera bench engine: error: {error}")
        raise SystemExit(1) from None
    if options.json is not None:
        label = options.label or result.model_label(config.model_id)
        record = _record(
            [{"model": label} | row for row in rows],
            profiles,
            arguments,
            options.commit,
            arch,
            engine,
        )
        print(result.write(record, options.json, arch.key, label))


def _measure(
    measures: EngineMeasures, plan: Plan, ready: float
) -> tuple[list[Row], list[Workload]]:
    """Measure the workloads that fit the model, and print each row at once."""
    rows: list[Row] = [
        {"metric": "ready_s", "batch": 1, "value": result.number(ready), "roofline": None}
    ]
    print(engine_table.HEADER)
    print(engine_table.line(rows[0]), flush=True)
    measured = []
    total = len(plan.workloads)
    for number, workload in enumerate(plan.workloads, start=1):
        text = f"measuring {number} of {total}: {workload.kind}{workload.size}"
        with watched(Status(_say), text):
            row = measures.measure(workload)
        if row is not None:
            measured.append(workload)
            rows.append(row)
            print(engine_table.line(row), flush=True)
    return rows, measured


def _record(
    rows: list[Row],
    profiles: list[StepProfile],
    arguments: Sequence[str],
    commit: str | None,
    arch: GPUArch,
    engine: EngineRun,
) -> dict[str, Any]:
    info = engine.info
    versions = {"tessera": version(), "torch": str(torch.__version__)}
    machine = arch.name
    if arch.is_cpu:
        machine = result.host_name(torch.get_num_threads(), arch.num_sms)
    else:
        versions["triton"] = importlib.metadata.version("triton")
    extra: dict[str, Any] = {
        "plan": {phase.phase: phase.kernel for phase in info.plan.phases},
        "limits": {
            "max_model_len": info.max_total_tokens,
            "max_num_seqs": info.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
        },
        "startup_seconds": info.startup_seconds,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
    }
    if profiles:
        extra["profiles"] = [dataclasses.asdict(profile) for profile in profiles]
    return result.record(
        "engine",
        rows,
        machine=machine,
        versions=versions,
        command=result.shown_command(["tessera", "bench", "engine"], arguments),
        commit=commit,
        extra=extra,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
