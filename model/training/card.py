"""Writes the model card from the recorded figures: `python -m model.training.card`.

Every number of the card comes from `config.json`, `evaluation.json` or `training.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TEMPLATE = (Path(__file__).parent / "card_template.md").read_text()

_COMPARISON = """\
| compared with the model before | this | before |
|---|---|---|
{rows}

"""

_REPEATED = """\
Runs of lines of one form are shortened. Of the shingles of all files {files:.1%} occur more than once, of those
of files and fragments {files_and_fragments:.1%}; of the held-out files' {held_out_in_training:.1%} occur in the
training text.
"""

_TOKENS = """\
## Fill-in-the-middle and chat

{infilling_share:.0%} of the text is rearranged for fill-in-the-middle: {spm_share:.0%} of that in SPM
(`<|fim_prefix|><|fim_suffix|>` suffix `<|fim_middle|>` prefix), the rest in PSM (`<|fim_prefix|>` prefix
`<|fim_suffix|>` suffix `<|fim_middle|>`). The middle ends with a line in {lines_share:.0%} of the documents, else at a
random character. Of {lines} lines taken out of functions of held-out files, the first line that the greedy completion
fills in is the right one for **{exact_spm}** in SPM and **{exact_psm}** in PSM.

The chat template, `chat_template.jinja`, frames messages with `<|im_start|>` and `<|im_end|>`. The model has seen it on
{documents:,} documented functions of the training files: the docstring as the instruction, the function as the answer.
Of {requests} instructions made from held-out docstrings, {functions} are answered with a function that parses. Whether
it does what was asked was not measured, and it seldom does. The model has seen no other conversations: it answers
everything with Python, and a second turn means little to it.

"""


def render(config: dict[str, Any], evaluation: dict[str, Any], training: dict[str, Any]) -> str:
    """Return the card's text.

    Args:
        config: the checkpoint's `config.json`.
        evaluation: `evaluation.json`, written by `evaluate`.
        training: `training.json`, the run record written by `train`.
    """
    data, figures, headers = evaluation["data"], evaluation["compression"], evaluation["headers"]
    teacher, student = training["teacher"], training["student"]
    held_out = data["held_out"]
    versions = data["versions"]
    return _TEMPLATE.format(
        parameters=evaluation["parameters"],
        storage="matrices stored in 8 bits"
        if "quantization_config" in config
        else "stored in bfloat16",
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        context=figures["context"],
        stride=figures["stride"],
        bytes_per_token=figures["bytes"] / figures["tokens"],
        versions=", ".join(version.replace("python", "CPython ") for version in versions),
        library_files=data["library"]["files"],
        library_mb=data["library"]["bytes"] / 1e6,
        test_files=data["tests"]["files"],
        test_mb=data["tests"]["bytes"] / 1e6,
        fragments=data["library_fragments"]["documents"] + data["test_fragments"]["documents"],
        held_files=held_out["files"],
        held_mb=held_out["bytes"] / 1e6,
        held_library_share=held_out["library_bytes"] / held_out["bytes"],
        bpb=figures["bits_per_byte"],
        bpb_library=figures["library_bits_per_byte"],
        bpb_test=figures["test_bits_per_byte"],
        xz=figures["xz_bits_per_byte"],
        xz_one=figures["xz_all_files_as_one_bits_per_byte"],
        headers=headers["headers"],
        parse=headers["parse"],
        ended=headers["ended"],
        loops=headers["loops"],
        repeated=_repeated(data),
        with_defaults=_with_defaults(evaluation),
        comparison=_comparison(evaluation),
        how_sampled=_how_sampled(evaluation["sampling_defaults"]),
        max_new_tokens=headers["max_new_tokens"],
        sample_tokens=evaluation["sample_new_tokens"],
        uses=_uses(evaluation, student),
        samples="".join(_block(s["prompt"] + s["completion"]) for s in evaluation["samples"]),
        stdlib_arguments=" ".join(f"--stdlib .../lib/{version}" for version in versions),
        teacher_layers=teacher["shape"]["num_layers"],
        teacher_hidden=teacher["shape"]["hidden_size"],
        teacher_dropout=teacher["dropout"],
        teacher_steps=_steps(training, teacher),
        student_steps=_steps(training, student),
        batch_tokens=student["batch_tokens"],
        distill_weight=student["distill_weight"],
        weight_decay=student["weight_decay"],
        seconds=training["seconds"],
        device=training["device"],
        torch=training["torch"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the card into the checkpoint's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("model/bundled"))
    folder: Path = parser.parse_args(arguments).model
    records = [
        json.loads((folder / name).read_text())
        for name in ("config.json", "evaluation.json", "training.json")
    ]
    (folder / "README.md").write_text(render(*records))


def figures_of(evaluation: dict[str, Any]) -> dict[str, float]:
    """Return the figures in which two models are compared, by their names in the card."""
    headers = evaluation["headers"]
    with_defaults = evaluation.get("headers_with_defaults", headers)
    return {
        "parameters": evaluation["parameters"],
        "bits per byte": evaluation["compression"]["bits_per_byte"],
        f"of {headers['headers']} headers, greedy: parse": headers["parse"],
        "greedy: end in a loop": headers["loops"],
        "with the sampling defaults: parse": with_defaults["parse"],
        "with the sampling defaults: end in a loop": with_defaults["loops"],
        f"of {evaluation['infilling']['lines']} lines, filled in exactly: PSM": evaluation["infilling"]["exact_psm"],
        "filled in exactly: SPM": evaluation["infilling"]["exact_spm"],
        f"of {evaluation['instructions']['instructions']} instructions: a function that parses":
            evaluation["instructions"]["functions"],
    }  # fmt: skip


def _comparison(evaluation: dict[str, Any]) -> str:
    before = evaluation.get("previous")
    if before is None:
        return ""
    rows = "\n".join(
        f"| {name} | {value:,} | {_number(before.get(name))} |"
        for name, value in figures_of(evaluation).items()
    )
    return _COMPARISON.format(rows=rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,}"


def _with_defaults(evaluation: dict[str, Any]) -> str:
    penalty = evaluation["sampling_defaults"]["repetition_penalty"]
    found = evaluation["headers_with_defaults"]
    return (
        f"With a repetition penalty of {penalty:g} in the request, **{found['parse']}** parse and "
        f"**{found['loops']}** end in a loop.\n"
    )


def _how_sampled(defaults: dict[str, Any]) -> str:
    return f"Greedy, with a repetition penalty of {defaults['repetition_penalty']:g}"


def _repeated(data: dict[str, Any]) -> str:
    """Return a sentence on repeated text, if it was measured."""
    if "repeated_share" not in data:
        return ""
    share = data["repeated_share"]
    return _REPEATED.format(**share)


def _steps(training: dict[str, Any], stage: dict[str, Any]) -> int:
    """Return the steps of a stage, which the log has if it ended by the clock."""
    log = training.get("logs", {}).get(stage["name"])
    return int(log[-1]["step"] if log else stage["steps"])


def _uses(evaluation: dict[str, Any], student: dict[str, Any]) -> str:
    """Return the section on fill-in-the-middle and chat of a model that was trained on them."""
    infilling = evaluation["infilling"]
    return _TOKENS.format(
        infilling_share=student["infilling_share"],
        spm_share=evaluation["data"]["infilling"]["spm_share"],
        lines_share=evaluation["data"]["infilling"]["lines_share"],
        lines=infilling["lines"],
        exact_psm=infilling["exact_psm"],
        exact_spm=infilling["exact_spm"],
        documents=evaluation["data"]["instructions"]["documents"],
        requests=evaluation["instructions"]["instructions"],
        functions=evaluation["instructions"]["functions"],
    )


def _block(text: str) -> str:
    lines = (f"    {line}".rstrip() for line in text.rstrip().split("\n"))
    return "\n".join(lines) + "\n\n<!-- -->\n\n"


if __name__ == "__main__":
    main()
