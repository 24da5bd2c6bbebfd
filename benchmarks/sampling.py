"""What do sampling and text cost per step and per token on one core of this CPU?

Logits are random: "flat" ones (standard deviation 1) are the worst case of a nucleus, which then holds most of the
vocabulary; "peaked" ones (4) are closer to a trained model's.

    python -m benchmarks.sampling [--rounds 15] [--model bundled]
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

import torch
from tokenizers.decoders import DecodeStream

from benchmarks.report import write_report
from model.checkpoint.hub import resolve
from model.sampling.parameters import SamplingParams
from model.sampling.rows import SamplingRow, TokenHistory
from model.sampling.sampler import Sampler
from model.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, 5 top logprobs": {"temperature": 0.0, "top_logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20, top_p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.9": {"typical_p": 0.9},
}
SHAPES = ((4096, 1), (4096, 8), (151936, 1))
PROMPT = "def find_files(directory, suffix):\n    return [f for f in os.listdir(directory)]\n"


def microseconds(call: Callable[[], object], rounds: int, repeats: int) -> float:
    """Best of `rounds`, each the mean of `repeats` calls: what disturbs a call only ever adds to it."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
    return round(best * 1e6, 2)


def sampling_rows(rounds: int) -> list[dict[str, Any]]:
    """Time one call of the sampler for each kind of row, alone and in a batch."""
    sampler, rows = Sampler(), []
    for vocabulary, batch in SHAPES:
        for name, deviation in (("flat", 1.0), ("peaked", 4.0)):
            generator = torch.Generator().manual_seed(0)
            logits = torch.randn(batch, vocabulary, generator=generator) * deviation
            for kind, fields in KINDS.items():
                asked = [
                    SamplingRow(
                        SamplingParams(max_new_tokens=9, seed=i, **fields), 7, TokenHistory()
                    )
                    for i in range(batch)
                ]
                took = microseconds(
                    lambda logits=logits, asked=asked: sampler.forward(logits, asked),  # type: ignore[misc]
                    rounds,
                    400_000 // (vocabulary * batch) + 2,
                )
                rows.append(
                    {"vocab": vocabulary, "rows": batch, "logits": name, "kind": kind, "us": took}
                )
    return rows


def text_rows(model: str, rounds: int) -> list[dict[str, Any]]:
    """Time a stream of tokens through the detokenizer, the library's, and the stop checker."""
    tokenizer = Tokenizer.from_folder(resolve(model))
    ids = tokenizer.encode(PROMPT * 50, add_special_tokens=False)
    texts = [tokenizer.token_text(token_id) for token_id in ids]

    def ours() -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        for token_id in ids:
            detokenizer.push(token_id)

    def library() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in ids:
            stream.step(tokenizer.library, token_id)

    def stops() -> None:
        checker = StopChecker(["\n\nclass ", "\n\n\n", "</code>", "# end"])
        for text in texts:
            checker.push(text)
            checker.release()

    contenders = {"IncrementalDetokenizer": ours, "DecodeStream": library, "StopChecker": stops}
    return [
        {"text": name, "us_per_token": round(microseconds(run, rounds, 1) / len(ids), 3)}
        for name, run in contenders.items()
    ]


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="bundled", help="whose tokenizer is timed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = sampling_rows(arguments.rounds) + text_rows(arguments.model, arguments.rounds)
    write_report("sampling", rows, ("torch", "numpy", "tokenizers"))


if __name__ == "__main__":
    main()
