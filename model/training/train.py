"""Trains the bundled model: `python -m model.training.train --data build/training-data`.

First a larger, heavily regularized teacher, then the small model, which learns from the text and from the teacher's
predictions. Interrupted runs continue from their last state. The defaults are those of the bundled model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from model.checkpoint.weights import save_checkpoint
from model.network.decoder import DecoderLM
from model.training.loop import Shape, Stage, run_stage
from model.training.network import TrainedLM

MAX_SHARD_BYTES = 15 * 2**20
TEACHER = Stage(
    name="teacher",
    shape=Shape(768, 8, 12, 4, 2048),
    steps=2000,
    weight_decay=1.0,
    dropout=0.3,
)
STUDENT = Stage(
    name="student",
    shape=Shape(384, 6, 6, 2, 1024),
    steps=5000,
    weight_decay=1.0,
    dropout=0.1,
    distill_weight=0.8,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe from command-line arguments (default: `sys.argv`)."""
    options = _parse(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    work: Path = options.work
    began = time.monotonic()

    def train(stage: Stage, teachers: Sequence[TrainedLM] = ()) -> TrainedLM:
        return run_stage(
            stage,
            options.data,
            work / stage.name,
            teachers,
            device=device,
            compiled=options.compile,
            save_every=options.save_every,
        )

    teachers = [
        train(_override(TEACHER, options, "teacher", seed=options.seed + 1 + number))
        for number in range(options.teachers)
    ]
    student = _override(STUDENT, options, "student", seed=options.seed)
    model = train(student, teachers)
    export(model, options.data, options.output)
    record = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.monotonic() - began),
        "teachers": options.teachers,
        "teacher": dataclasses.asdict(_override(TEACHER, options, "teacher", seed=0)),
        "student": dataclasses.asdict(student),
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"trained in {record['seconds']} s; wrote {options.output}")


def export(model: DecoderLM, data: Path, output: Path) -> None:
    """Write the checkpoint in bfloat16, with the tokenizer and the chat template.

    Args:
        model: the trained model.
        data: folder written by `prepare`, for its tokenizer.
        output: checkpoint folder.
    """
    rounded = DecoderLM(model.config, torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    save_checkpoint(rounded, output, MAX_SHARD_BYTES)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(data / name, output / name)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("build/training-data"))
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="states and logs")
    parser.add_argument("--output", type=Path, default=Path("build/bundled"), help="checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=500, metavar="STEPS")
    parser.add_argument("--teachers", type=int, default=1, help="0 trains on the text alone")
    for role, stage in (("teacher", TEACHER), ("student", STUDENT)):
        group = parser.add_argument_group(role)
        for name, value in _settings(stage).items():
            group.add_argument(
                f"--{role}-{name.replace('_', '-')}",
                type=type(value),
                default=value,
                help=f"default {value}",
            )
    return parser.parse_args(arguments)


def _settings(stage: Stage) -> dict[str, int | float]:
    """Return the numbers of a stage that command-line flags can change."""
    flat = {**dataclasses.asdict(stage.shape), **dataclasses.asdict(stage)}
    return {
        name: value
        for name, value in flat.items()
        if isinstance(value, int | float) and name != "seed"
    }


def _override(stage: Stage, options: argparse.Namespace, role: str, seed: int) -> Stage:
    values = {name: getattr(options, f"{role}_{name}") for name in _settings(stage)}
    sizes = {field.name: values.pop(field.name) for field in dataclasses.fields(Shape)}
    name = f"{role}-{seed}" if role == "teacher" else role
    return dataclasses.replace(stage, name=name, shape=Shape(**sizes), seed=seed, **values)


if __name__ == "__main__":
    main()
