"""Measures structured output: how many outputs are valid, the time of compiling and of masks, and the throughput.

The first part follows the grammars of random schemas without a model. The second part compares requests with a schema
and requests without one on one engine; rounds alternate between the two, so that other load slows both.

    python -m benchmarks.structured_output [--schemas 300] [--batch 32] [--tokens 128] [--rounds 5] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np

from benchmarks.json_schemas import SchemaMaker, mutate
from benchmarks.local_engine import LocalEngine
from benchmarks.report import add_bookkeeping, write_report
from model.checkpoint.config import ModelConfig
from model.errors import GrammarError
from model.hub.resolve import resolve
from model.sampling.grammar import (
    WORD_BITS,
    GrammarMatcher,
    GrammarTokenizer,
    check,
    compile_matcher,
    serialize,
)
from model.sampling.parameters import SamplingParams
from model.sampling.token_masker import TokenMasker
from model.text.tokenizer import Tokenizer
from server.cli.bench.serve.metrics import Distribution
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

Schema = dict[str, Any]

LONG_SCHEMA: Schema = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "format": "email", "maxLength": 40},
            "role": {"enum": ["admin", "editor", "reader"]},
            "scores": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
        },
        "required": ["name", "age", "email", "role", "scores"],
        "additionalProperties": False,
    },
}
"""An output that follows it does not end before the limit of tokens."""


class Walker:
    """Samples tokens from a grammar's masks alone, with a preference for tokens that end strings and objects.

    Args:
        tokenizer: the checkpoint's.
        vocabulary: the same for grammars.
        seed: of the random choices.

    Attributes:
        vocabulary: see above.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: GrammarTokenizer, seed: int) -> None:
        self._tokenizer, self.vocabulary = tokenizer, vocabulary
        self._masker = TokenMasker(vocabulary)
        self.mask_seconds: list[float] = []
        self._is_closing = np.array(
            [
                tokenizer.token_text(i)[:1] in set('"}],')
                for i in range(vocabulary.num_words * WORD_BITS)
            ]
        )
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Continue like a new walker with this seed."""
        self._random = random.Random(seed)

    def walk(self, matcher: GrammarMatcher, most: int) -> str | None:
        """Return a text that follows the grammar; None if it is not complete after `most` tokens.

        Raises:
            GrammarError: the grammar exceeds a limit.
        """
        rng, ends = self._random, list(self.vocabulary.eos_token_ids)
        ids: list[int] = []
        for _ in range(most):
            start = time.perf_counter()
            self._masker.compute([matcher])
            if matcher.has_stopped and matcher.error:
                raise GrammarError(matcher.error)
            self.mask_seconds.append(time.perf_counter() - start)
            mask = self._masker.masks.words[matcher.slot]
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            bits[ends] = 0
            allowed = np.flatnonzero(bits)
            if not len(allowed) or (matcher.is_accepting and rng.random() < 0.5):
                return self._text(ids)
            closing = allowed[self._is_closing[allowed]]
            choices = closing if len(closing) and rng.random() < 0.3 else allowed
            ids.append(int(rng.choice(choices)))
            assert matcher.accept(ids[-1])
            if matcher.is_complete:
                return self._text(ids)
        return None

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def follows(matcher: GrammarMatcher, ids: Sequence[int]) -> bool:
    """Return whether a whole text follows a grammar."""
    return all(matcher.accept(token_id) for token_id in ids) and matcher.is_accepting


def validity(
    tokenizer: Tokenizer, vocabulary: GrammarTokenizer, count: int, seed: int, walks: int = 4
) -> dict[str, Any]:
    """Follow the grammars of random schemas.

    Args:
        tokenizer: the checkpoint's.
        vocabulary: the same for grammars.
        count: schemas that the library supports.
        seed: of the schemas.
        walks: outputs for each schema.
    """
    maker, rng = SchemaMaker(seed), random.Random(seed)
    walker = Walker(tokenizer, vocabulary, seed)
    compile_seconds: list[float] = []
    check_seconds: list[float] = []
    refused: dict[str, int] = {}
    invalid, wrong = [], []
    num_complete = num_mutants = 0
    while len(compile_seconds) < count:
        schema = maker.make()
        try:
            start = time.thread_time()
            grammar = serialize("json_schema", schema)
            matcher = compile_matcher(vocabulary, grammar)
            middle = time.thread_time()
            check(vocabulary, grammar)
        except GrammarError as error:
            refused[str(error)[:60]] = refused.get(str(error)[:60], 0) + 1
            continue
        compile_seconds.append(middle - start)
        check_seconds.append(time.thread_time() - middle)
        checker = jsonschema.FormatChecker()
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for _ in range(walks):
            text = walker.walk(matcher.copy(), 300)
            if text is None:
                continue
            num_complete += 1
            document = json.loads(text)
            if '"0000-' in text:
                continue  # the year 0000 is valid by RFC 3339; Python's dates begin with the year 1
            if not validator.is_valid(document):
                invalid.append([schema, text])
            for _ in range(8):
                changed = mutate(document, rng)
                if validator.is_valid(changed):
                    continue
                num_mutants += 1
                encoded = json.dumps(changed, ensure_ascii=False)
                if follows(matcher.copy(), tokenizer.encode(encoded, add_special_tokens=False)):
                    wrong.append([schema, encoded])
    return {
        "schemas": count,
        "refused": refused,
        "complete_outputs": num_complete,
        "invalid_outputs": invalid,
        "invalid_documents": num_mutants,
        "invalid_documents_accepted": wrong,
        "compile_cpu_ms": percentiles(compile_seconds),
        "check_cpu_ms": percentiles(check_seconds),
        "mask_ms": percentiles(walker.mask_seconds),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the maximum in milliseconds."""
    found = Distribution.of_seconds(seconds)
    assert found is not None
    return {"p50": found.percentiles[50], "p99": found.percentiles[99], "max": found.largest}


def throughput(
    engine: LocalEngine, prompt: list[int], batch: int, sampling: SamplingParams
) -> float:
    """Return tokens per second of `batch` requests with the same sampling parameters, apart from seeds."""
    requests = [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                max_new_tokens=sampling.max_new_tokens,
                temperature=1.0,
                grammar=sampling.grammar,
                logprobs=sampling.logprobs,
                seed=i,
            ),
        )
        for i in range(batch)
    ]
    start = time.perf_counter()
    answers = engine.generate(requests)
    seconds = time.perf_counter() - start
    for number, events in enumerate(answers):
        if len(events) != sampling.max_new_tokens:
            raise RuntimeError(
                f"request {number} of {batch} has {len(events)} tokens, not {sampling.max_new_tokens}: {events[-1]}"
            )
    return sum(map(len, answers)) / seconds


def main() -> None:
    """Run the benchmark and write its report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    add_bookkeeping(parser)
    options = parser.parse_args()
    path = resolve(options.model)
    config = ModelConfig.from_folder(path)
    tokenizer = Tokenizer.from_folder(path)
    vocabulary = GrammarTokenizer(tokenizer, config.network.vocab, config.eos_token_ids)
    rows: list[dict[str, Any]] = []
    if options.schemas:
        rows.append(validity(tokenizer, vocabulary, options.schemas, options.seed))
    if options.rounds:
        rows.append(compare(options, str(path), tokenizer))
    write_report(
        "structured",
        rows,
        ("torch", "llguidance", "jsonschema"),
        device=options.device,
        folder=options.out,
        revision=options.commit,
    )


def compare(options: argparse.Namespace, path: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Measure tokens per second with and without a grammar, in alternating rounds."""
    engine = LocalEngine(
        EngineConfig(
            model_path=path,
            model_id=options.model,
            device=options.device,
            quantization="none",
            max_num_seqs=options.batch,
            max_num_batched_tokens=max(512, options.batch),
        )
    )
    prompt = tokenizer.encode("A list of users as JSON:\n")
    grammar = serialize("json_schema", LONG_SCHEMA)
    tokens = options.tokens
    contenders = {
        "free": SamplingParams(max_new_tokens=tokens),
        "structured": SamplingParams(max_new_tokens=tokens, grammar=grammar),
        "free, log-probabilities": SamplingParams(max_new_tokens=tokens, logprobs=True),
        "structured, log-probabilities": SamplingParams(
            max_new_tokens=tokens, grammar=grammar, logprobs=True
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(options.rounds + 1):
        for name, sampling in contenders.items():
            rate = throughput(engine, prompt, options.batch, sampling)
            if round_:  # the first one warms up
                rates[name].append(rate)
    return {
        "batch": options.batch,
        "tokens_per_second": {name: round(statistics.median(r)) for name, r in rates.items()},
        "structured_to_free": _median_ratio(rates["structured"], rates["free"]),
        "without_forced_tokens": _median_ratio(
            rates["structured, log-probabilities"], rates["free, log-probabilities"]
        ),
    }


def _median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
