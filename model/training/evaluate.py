"""Measures a checkpoint on the held-out files, for the model card: `python -m model.training.evaluate`."""

from __future__ import annotations

import argparse
import ast
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from model.checkpoint.config import ModelConfig
from model.checkpoint.generation_config import read_sampling_defaults
from model.checkpoint.weights import load_model
from model.decoder import DecoderLM
from model.sampling.parameters import SamplingParams
from model.training.card import figures_of
from model.training.completion import complete_prompts
from model.training.corpus import SourceFile, fragments_of
from model.training.infilling import MAX_CHARACTERS, infilling_prompt
from model.training.instructions import instruction
from model.training.network import model_logits
from model.training.prepare import CONTEXT_LENGTH, read_held_out, xz_bytes
from model.training.tokenization import ANSWER_START, END_OF_TEXT_ID, TURN_END, chat_turn

STRIDE = CONTEXT_LENGTH // 2
NUM_HEADERS = 200
MAX_NEW_TOKENS = 256
LONGEST_PERIOD = 80
SAMPLE_NEW_TOKENS = 96
NUM_LINES = 200
MAX_LINE_TOKENS = 48
NUM_INSTRUCTIONS = 100
SAMPLE_PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n",
    "class Stack:\n    def __init__",
    "for i in range(",
    "def read_json(path):\n",
    "with open(",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the evaluation from command-line arguments (default: `sys.argv`)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=Path("model/bundled"))
    parser.add_argument("--data", type=Path, default=Path("build/training-data"))
    parser.add_argument("--output", type=Path, default=Path("model/bundled/evaluation.json"))
    parser.add_argument(
        "--previous",
        type=Path,
        help="evaluation.json of the model before, for the card's comparison",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    config = ModelConfig.from_folder(options.model)
    model = load_model(options.model, config, torch.float32, options.device, pack=False)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    files = read_held_out(options.data)
    defaults = read_sampling_defaults(options.model)
    report = {
        "parameters": model.config.network.num_parameters,
        "compression": compression(model, tokenizer, files),
        "headers": header_completions(model, tokenizer, files, greedy(MAX_NEW_TOKENS)),
        "sampling_defaults": msgspec.to_builtins(defaults),
        "headers_with_defaults": header_completions(
            model,
            tokenizer,
            files,
            greedy(MAX_NEW_TOKENS, repetition_penalty=defaults.repetition_penalty),
        ),
        **special_figures(model, tokenizer, files),
        "sample_new_tokens": SAMPLE_NEW_TOKENS,
        "samples": samples(model, tokenizer, defaults.repetition_penalty),
        "data": json.loads((options.data / "manifest.json").read_text()),
    }
    if options.previous:
        report["previous"] = figures_of(json.loads(options.previous.read_text()))
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({key: report[key] for key in ("parameters", "compression", "headers")}))


def compression(
    model: DecoderLM, tokenizer: Tokenizer, files: Sequence[SourceFile]
) -> dict[str, Any]:
    """Compare the model's bits per byte with `xz -9e` on the same files.

    Every token is predicted once: at the beginning of a file from all tokens before it, later from at least `STRIDE`
    and fewer than `CONTEXT_LENGTH` tokens. Both the model and xz process each file separately.
    """
    bits = {True: 0.0, False: 0.0}
    sizes = {True: 0, False: 0}
    xz_sizes = {True: 0, False: 0}
    tokens = 0
    for file in tqdm(files, desc="held-out files"):
        ids = tokenizer.encode(file.text).ids
        bits[file.is_test] += file_bits(model, ids)
        sizes[file.is_test] += len(file.text.encode())
        xz_sizes[file.is_test] += xz_bytes(file.text)
        tokens += len(ids) - 1
    everything = "".join(file.text for file in files)
    return {
        "files": len(files),
        "bytes": sum(sizes.values()),
        "tokens": tokens,
        "context": CONTEXT_LENGTH,
        "stride": STRIDE,
        "bits_per_byte": round(sum(bits.values()) / sum(sizes.values()), 4),
        "library_bits_per_byte": round(bits[False] / max(1, sizes[False]), 4),
        "test_bits_per_byte": round(bits[True] / max(1, sizes[True]), 4),
        "xz_bits_per_byte": round(8 * sum(xz_sizes.values()) / sum(sizes.values()), 4),
        "xz_all_files_as_one_bits_per_byte": round(
            8 * xz_bytes(everything) / len(everything.encode()), 4
        ),
    }


@torch.no_grad()
def file_bits(model: DecoderLM, ids: Sequence[int]) -> float:
    """Return the information content of a file's tokens after the leading separator, in bits."""
    device = model.device
    total = 0.0
    for tokens, context in scoring_windows(ids):
        window = torch.tensor(tokens, device=device)
        logits = model_logits(model, window[None, :-1])[0, context:].float()
        targets = window[1 + context :]
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return total / math.log(2)


def scoring_windows(ids: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
    """Cut a file's tokens into windows in which every token after the first is scored once.

    Yields:
        A window of at most `CONTEXT_LENGTH` inputs and the target of the last, and the number of its first inputs whose
        targets are not scored, because the window before it scores them.
    """
    scored = 0
    while scored < len(ids) - 1:
        first = max(0, scored - STRIDE)
        window = ids[first : first + CONTEXT_LENGTH + 1]
        yield window, scored - first
        scored = first + len(window) - 1


def greedy(max_new_tokens: int, repetition_penalty: float = 1.0) -> SamplingParams:
    """Return the parameters of a greedy completion."""
    return SamplingParams(
        max_new_tokens=max_new_tokens, temperature=0.0, repetition_penalty=repetition_penalty
    )


def header_completions(
    model: DecoderLM, tokenizer: Tokenizer, files: Sequence[SourceFile], sampling: SamplingParams
) -> dict[str, Any]:
    """Complete held-out function headers; count those that parse as Python and those that end in a loop.

    The prompt is the header alone, dedented. A completion is cut where the function ends; one that
    reaches the limit of tokens first is cut after its last full line.
    """
    limit = sampling.max_new_tokens
    headers = function_headers(files)
    order = np.random.default_rng(0).permutation(len(headers))[:NUM_HEADERS]
    prompts = [headers[index] for index in sorted(order)]
    ids = complete_ids(model, tokenizer, prompts, sampling)
    completions = tokenizer.decode_batch(ids, skip_special_tokens=False)
    functions = [
        cut_function(prompt, completion)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return {
        "headers": len(prompts),
        "max_new_tokens": limit,
        "parse": sum(parses(function) for function in functions),
        "ended": sum(len(tokens) < limit for tokens in ids),
        "loops": sum(is_loop(tokens) for tokens in ids),
    }


def is_loop(tokens: Sequence[int]) -> bool:
    """Return whether the last tokens, up to `LONGEST_PERIOD`, occur three times in a row."""
    return any(
        len(tokens) >= 3 * period and tokens[-2 * period :] == tokens[-3 * period : -period]
        for period in range(1, LONGEST_PERIOD + 1)
    )


def special_figures(
    model: DecoderLM, tokenizer: Tokenizer, files: Sequence[SourceFile]
) -> dict[str, Any]:
    """Measure fill-in-the-middle and instructions."""
    fragments = [f for file in files for f in fragments_of(file.text) if f.startswith("def ")]
    return {
        "infilling": infilled_lines(model, tokenizer, fragments),
        "instructions": answered_instructions(model, tokenizer, fragments),
    }


def infilled_lines(
    model: DecoderLM, tokenizer: Tokenizer, fragments: Sequence[str]
) -> dict[str, Any]:
    """Take one line out of functions of held-out files and count those that are filled in exactly.

    The model sees the lines before and after; the first line of what it fills in must be the one that was taken out, up
    to white space at its ends.
    """
    generator = np.random.default_rng(0)
    gaps: list[tuple[str, str]] = []
    wanted: list[str] = []
    for index in generator.permutation(len(fragments)):
        lines = fragments[index].splitlines(keepends=True)
        places = [i for i in range(1, len(lines) - 1) if lines[i].strip()]
        if not places or len(fragments[index]) > MAX_CHARACTERS:
            continue
        place = places[int(generator.integers(len(places)))]
        gaps.append(("".join(lines[:place]), "".join(lines[place + 1 :])))
        wanted.append(lines[place].strip())
        if len(gaps) == NUM_LINES:
            break
    figures = {"lines": len(gaps)}
    for order, spm in (("psm", False), ("spm", True)):
        prompts = [infilling_prompt(*gap, spm=spm) for gap in gaps]
        found = complete(model, tokenizer, prompts, greedy(MAX_LINE_TOKENS))
        figures[f"exact_{order}"] = sum(
            text.partition("\n")[0].strip() == line
            for text, line in zip(found, wanted, strict=True)
        )
    return figures


def answered_instructions(
    model: DecoderLM, tokenizer: Tokenizer, fragments: Sequence[str]
) -> dict[str, Any]:
    """Give instructions from held-out docstrings; count answers that parse as Python and define a function."""
    generator = np.random.default_rng(0)
    found = (instruction(fragment, generator) for fragment in dict.fromkeys(fragments))
    requests = [request for request in found if request is not None][:NUM_INSTRUCTIONS]
    prompts = [chat_turn("user", request) + ANSWER_START for request in requests]
    answers = [
        answer.partition(TURN_END)[0]
        for answer in complete(model, tokenizer, prompts, greedy(MAX_NEW_TOKENS))
    ]
    good = 0
    for answer in answers:
        header, _, body = answer.lstrip().partition("\n")
        good += header.startswith("def ") and parses(cut_function(f"{header}\n", body))
    return {"instructions": len(requests), "functions": good}


def function_headers(files: Sequence[SourceFile]) -> list[str]:
    """Return the distinct headers, each through its colon and line end, of all functions."""
    headers: dict[str, None] = {}
    for file in files:
        for fragment in fragments_of(file.text):
            if not fragment.startswith("def "):
                continue
            node = ast.parse(fragment).body[0]
            assert isinstance(node, ast.FunctionDef)
            header = "".join(fragment.splitlines(keepends=True)[: node.body[0].lineno - 1])
            if header.rstrip().endswith(":"):
                headers[header] = None
    return list(headers)


def complete(
    model: DecoderLM, tokenizer: Tokenizer, prompts: Sequence[str], sampling: SamplingParams
) -> list[str]:
    """Complete texts, up to the separator."""
    ids = complete_ids(model, tokenizer, prompts, sampling)
    return list(tokenizer.decode_batch(ids, skip_special_tokens=False))


def complete_ids(
    model: DecoderLM, tokenizer: Tokenizer, prompts: Sequence[str], sampling: SamplingParams
) -> list[list[int]]:
    """Complete texts and return the new tokens, up to the separator."""
    completions: list[list[int]] = []
    batch = 50
    for first in tqdm(range(0, len(prompts), batch), desc="completions"):
        ids = [tokenizer.encode(prompt).ids for prompt in prompts[first : first + batch]]
        completions += complete_prompts(model, ids, sampling, END_OF_TEXT_ID)
    return completions


def cut_function(prompt: str, completion: str) -> str:
    """Return prompt and completion up to the end of the function."""
    lines = completion.splitlines(keepends=True)
    for index, line in enumerate(lines):
        if line.strip() and not line[0].isspace() and line[0] != "#":
            return prompt + "".join(lines[:index])
    if lines and not lines[-1].endswith("\n") and len(lines) > 1:
        lines.pop()
    return prompt + "".join(lines)


def parses(source: str) -> bool:
    """Return whether the text is syntactically valid Python."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def samples(
    model: DecoderLM, tokenizer: Tokenizer, repetition_penalty: float
) -> list[dict[str, str]]:
    """Complete the card's prompts."""
    sampling = greedy(SAMPLE_NEW_TOKENS, repetition_penalty)
    completions = complete(model, tokenizer, SAMPLE_PROMPTS, sampling)
    return [
        {"prompt": prompt, "completion": completion}
        for prompt, completion in zip(SAMPLE_PROMPTS, completions, strict=True)
    ]


if __name__ == "__main__":
    main()
