"""Trains the bundled model: `python -m model.training.train --data build/training-data`.

First larger, heavily regularized teachers, then the small model, which learns from the text and from the teachers'
predictions. Each has its minutes; the checkpoint is written whenever the small model is the best so far in the second
half of its time. `--minutes` limits the process: what is not finished by then is continued by the same command, and the
exit status is 75. Finished teachers and the state of an unfinished model are in the folder of the logs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from model.checkpoint.generation_config import FILE as GENERATION_CONFIG
from model.checkpoint.save import save_checkpoint
from model.decoder import DecoderLM
from model.training.loop import Shape, Stage, model_config, run_stage
from model.training.network import TrainedLM

MAX_SHARD_BYTES = 15 * 2**20
TEACHER = Stage("teacher", Shape(768, 8, 12, 4, 2048), seconds=240.0, dropout=0.3)
STUDENT = Stage(
    "student", Shape(512, 7, 8, 2, 1280), seconds=600.0, dropout=0.1, distill_weight=0.8
)
SAMPLING_DEFAULTS = {"repetition_penalty": 1.3}
"""Entries of generation_config.json: a model this small repeats itself without them."""
UNFINISHED = 75
"""Exit status of a process that another one must follow (`EX_TEMPFAIL`)."""
_EXPORT_SECONDS = 8.0
"""Time left for the last measurement, the export and the end of the process."""
_TEACHER_FILE = "teacher.pt"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe from command-line arguments (default: `sys.argv`).

    Raises:
        SystemExit: with status 75, the process's minutes are over before the training is.
        ValueError: an earlier process trained with other settings.
    """
    began = time.monotonic()
    options = _parse(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    work: Path = options.work
    deadline = began + 60 * options.minutes - _EXPORT_SECONDS if options.minutes else math.inf

    def train(stage: Stage, teachers: Sequence[TrainedLM] = ()) -> tuple[TrainedLM, float]:
        model, spent = run_stage(
            stage,
            options.data,
            work / stage.name,
            teachers,
            device=device,
            compiled=options.compile,
            keep=None if stage.name.startswith("teacher") else keep,
            deadline=deadline,
        )
        if model is None:
            print(f"{stage.name} is not finished: the same command continues it")
            raise SystemExit(UNFINISHED)
        return model, spent

    def keep(model: TrainedLM) -> None:
        export(model, options.data, options.output)

    stages, teachers, seconds = [], [], 0.0
    for number in range(options.teachers):
        stage = _override(TEACHER, options, "teacher", seed=options.seed + 1 + number)
        kept = work / stage.name / _TEACHER_FILE
        if kept.exists():
            teacher, spent = load_teacher(kept, stage, device)
        else:
            teacher, spent = train(stage)
            save_teacher(kept, stage, teacher, spent)
        stages.append(stage)
        teachers.append(teacher)
        seconds += spent
    student = _override(STUDENT, options, "student", seed=options.seed)
    if not teachers:
        student = dataclasses.replace(student, distill_weight=0.0)
    model, spent = train(student, teachers)
    seconds += spent
    export(model, options.data, options.output)
    record = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(seconds),
        "teachers": options.teachers,
        "teacher": dataclasses.asdict(stages[0]) if stages else None,
        "student": dataclasses.asdict(student),
        "logs": {stage.name: _read_log(work / stage.name) for stage in (*stages, student)},
    }
    (options.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"trained in {record['seconds']} s; wrote {options.output}")


def export(model: DecoderLM, data: Path, output: Path) -> None:
    """Write the checkpoint: matrices in 8 bits, the rest in bfloat16; sampling defaults, tokenizer, chat template."""
    rounded = DecoderLM(model.config, torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    save_checkpoint(rounded, output, MAX_SHARD_BYTES, int8=True)
    file = output / GENERATION_CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | SAMPLING_DEFAULTS, indent=2) + "\n")
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


def load_teacher(file: Path, stage: Stage, device: torch.device) -> tuple[TrainedLM, float]:
    """Read what `save_teacher` wrote: the teacher in evaluation mode, and the seconds.

    Raises:
        ValueError: the teacher is not one of this stage.
    """
    content = torch.load(file, map_location=device, weights_only=True)
    if content["stage"] != dataclasses.asdict(stage):
        raise ValueError(f"{file} was trained with other settings; train with those, or remove it")
    weights = content["weights"]
    config = model_config(stage.shape, len(weights["embed_tokens"]))
    model = TrainedLM(config, stage.dropout, device)
    model.load_state_dict(weights)
    return model.eval(), content["seconds"]


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
        "--minutes",
        type=float,
        default=0.0,
        help="of this process; 0 for as many as the training needs",
    )
    for role, stage in (("teacher", TEACHER), ("student", STUDENT)):
        parser.add_argument(
            f"--{role}-minutes",
            type=float,
            default=stage.seconds / 60,
            help=f"of the {role}, without compilation; 0 for as many as the steps need (default %(default).3g)",
        )
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
    seconds = 60 * getattr(options, f"{role}_minutes")
    return dataclasses.replace(
        stage, name=name, shape=Shape(**sizes), seed=seed, seconds=seconds, **values
    )


if __name__ == "__main__":
    main()
