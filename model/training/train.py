"""Trains the bundled model: `python -m model.training.train --data build/training-data --minutes 7`.

First larger, heavily regularized teachers, then the small model, which learns from the text and from the teachers'
predictions. All stop by the clock, and the checkpoint is written whenever the small model is the best so far in the
second half of its time. Teachers are kept in the folder of the logs, so that two processes can share the work:
`--minutes 9 --only teachers`, then `--minutes 9 --only student`.
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
from model.training.loop import Shape, Stage, model_config, run_stage
from model.training.network import TrainedLM

MAX_SHARD_BYTES = 15 * 2**20
TEACHER = Stage(name="teacher", shape=Shape(768, 8, 12, 4, 2048), dropout=0.3)
STUDENT = Stage(name="student", shape=Shape(512, 7, 8, 2, 1280), dropout=0.1, distill_weight=0.8)
_EXPORT_SECONDS = 8.0
"""Time left for the last measurement, the export and the end of the process."""
_TEACHER_FILE = "teacher.pt"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe from command-line arguments (default: `sys.argv`)."""
    options = _parse(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    work: Path = options.work
    began = time.monotonic()
    whole = 60 * options.minutes - _EXPORT_SECONDS if options.minutes else 0.0

    def train(stage: Stage, teachers: Sequence[TrainedLM] = ()) -> TrainedLM:
        return run_stage(
            stage,
            options.data,
            work / stage.name,
            teachers,
            device=device,
            compiled=options.compile,
            keep=None if stage.name.startswith("teacher") else keep,
        )

    def keep(model: TrainedLM) -> None:
        export(model, options.data, options.output)

    share = (1.0 if options.only else options.teacher_share) * whole / max(1, options.teachers)
    stages = []
    teachers = []
    earlier = 0.0
    for number in range(options.teachers):
        stage = _override(TEACHER, options, "teacher", seed=options.seed + 1 + number)
        stage = dataclasses.replace(stage, seconds=share)
        kept = work / stage.name / _TEACHER_FILE
        if options.only == "student":
            stage, teacher, seconds = load_teacher(kept, device)
            earlier += seconds
        else:
            started = time.monotonic()
            teacher = train(stage)
            save_teacher(kept, stage, teacher, time.monotonic() - started)
        stages.append(stage)
        teachers.append(teacher)
    if options.only == "teachers":
        print(f"trained {len(teachers)} teachers in {time.monotonic() - began:.0f} s")
        return
    student = _override(STUDENT, options, "student", seed=options.seed)
    if whole:
        left = max(1.0, whole - (time.monotonic() - began))
        student = dataclasses.replace(student, seconds=left)
    if not teachers:
        student = dataclasses.replace(student, distill_weight=0.0)
    model = train(student, teachers)
    export(model, options.data, options.output)
    record = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(earlier + time.monotonic() - began),
        "teachers": options.teachers,
        "teacher": dataclasses.asdict(stages[0]) if stages else None,
        "student": dataclasses.asdict(student),
        "logs": {stage.name: _read_log(work / stage.name) for stage in (*stages, student)},
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"trained in {record['seconds']} s; wrote {options.output}")


def export(model: DecoderLM, data: Path, output: Path) -> None:
    """Write the checkpoint with matrices in 8 bits and the rest in bfloat16, the tokenizer and the chat template.

    Args:
        model: the trained model.
        data: folder written by `prepare`, for its tokenizer.
        output: checkpoint folder.
    """
    rounded = DecoderLM(model.config, torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    save_checkpoint(rounded, output, MAX_SHARD_BYTES, int8=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(data / name, output / name)


def save_teacher(file: Path, stage: Stage, model: TrainedLM, seconds: float) -> None:
    """Write a teacher, how it was trained and how long that took."""
    content = {
        "stage": dataclasses.asdict(stage),
        "weights": model.state_dict(),
        "seconds": seconds,
    }
    torch.save(content, file)


def load_teacher(file: Path, device: torch.device) -> tuple[Stage, TrainedLM, float]:
    """Read what `save_teacher` wrote: the stage, the teacher in evaluation mode, and the seconds.

    Raises:
        FileNotFoundError: the teacher was not trained.
    """
    content = torch.load(file, map_location=device, weights_only=True)
    stage = Stage(**content["stage"] | {"shape": Shape(**content["stage"]["shape"])})
    weights = content["weights"]
    config = model_config(stage.shape, len(weights["embed_tokens"]))
    model = TrainedLM(config, stage.dropout, device)
    model.load_state_dict(weights)
    return stage, model.eval(), content["seconds"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("build/training-data"))
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="logs")
    parser.add_argument("--output", type=Path, default=Path("build/bundled"), help="checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available()
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="for everything; 0 for as long as the steps need"
    )
    parser.add_argument(
        "--teacher-share", type=float, default=0.3, help="of the minutes, unless --only is given"
    )
    parser.add_argument("--teachers", type=int, default=1, help="0 trains on the text alone")
    parser.add_argument(
        "--only",
        choices=("teachers", "student"),
        help="train these; the student's teachers are read from --work",
    )
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


def _read_log(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def _settings(stage: Stage) -> dict[str, int | float]:
    """Return the numbers of a stage that command-line flags can change."""
    flat = {**dataclasses.asdict(stage.shape), **dataclasses.asdict(stage)}
    return {
        name: value
        for name, value in flat.items()
        if isinstance(value, int | float) and name not in ("seed", "seconds")
    }


def _override(stage: Stage, options: argparse.Namespace, role: str, seed: int) -> Stage:
    values = {name: getattr(options, f"{role}_{name}") for name in _settings(stage)}
    sizes = {field.name: values.pop(field.name) for field in dataclasses.fields(Shape)}
    name = f"{role}-{seed}" if role == "teacher" else role
    return dataclasses.replace(stage, name=name, shape=Shape(**sizes), seed=seed, **values)


if __name__ == "__main__":
    main()
