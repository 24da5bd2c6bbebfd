"""Runs requests in this process with drafts and without, in alternating rounds, and compares all answers."""

from __future__ import annotations

import itertools
import random
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from server.cli.bench.result import number
from server.engine.core.schedule.draft import NUM_MATCH_CLASSES, Draft

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.edits.cases import Case
    from benchmarks.local_engine import LocalEngine
    from model.checkpoint.config import ModelConfig
    from server.engine.core.request import TokenEvent
    from server.engine.core.sequence import Sequence as EngineSequence

WITHOUT: Final = 0
"""`max_draft_tokens` of the requests without drafts."""

_run_numbers = itertools.count()

Answers = dict[int, list["TokenEvent"]]


class Run(msgspec.Struct):
    """One run of all requests of a workload.

    Attributes:
        seconds: from the first request to the last token.
        tokens: of all answers.
        steps: of the engine.
        decode_seconds: of all requests together, each from its first token to its last.
        drafted: tokens that were proposed.
        accepted: those of them that were kept.
    """

    seconds: float
    tokens: int
    steps: int
    decode_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: Run) -> Run:
        """Return the sums."""
        sums = map(
            sum, zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        )
        return Run(*sums)


class ReplayedTokens:
    """A drafter that knows the answers of an earlier run, and proposes them with some tokens replaced.

    Args:
        answers: the tokens of each request, by its id.
        right: share of the tokens that are proposed as they were; each is replaced or not by chance, whatever steps
            the engine computes.
        vocab_size: a token that replaces another one is below it.
        seed: of the chance.
    """

    def __init__(
        self, answers: Mapping[int, Sequence[int]], right: float, vocab_size: int, seed: int = 0
    ) -> None:
        self._proposals = {}
        for request_id, tokens in answers.items():
            rng = random.Random(seed * 1_000_003 + request_id)
            self._proposals[request_id] = tuple(
                token if rng.random() < right else (token + 1) % vocab_size for token in tokens
            )

    def begin_step(self) -> None:
        """See `Drafter`."""

    def propose(self, sequence: EngineSequence, limit: int) -> Draft:
        """See `Drafter`."""
        known = sequence.num_output_tokens
        tokens = self._proposals.get(sequence.request_id, ())[known : known + limit]
        return Draft(tokens, NUM_MATCH_CLASSES - 1)

    def forget(self, sequence: EngineSequence) -> None:
        """See `Drafter`: all answers are kept."""


class Rounds:
    """Runs the requests of one workload again and again on one engine.

    Each run has another salt: it finds no blocks in the prefix cache and no text of the runs before.

    Args:
        engine: runs them.
        model: of the engine.
        cases: the requests.
        streams: so many run at the same time.
        max_draft_tokens: of the requests with drafts; None for the engine's setting.
    """

    def __init__(
        self,
        engine: LocalEngine,
        model: ModelConfig,
        cases: Sequence[Case],
        streams: int,
        max_draft_tokens: int | None = None,
    ) -> None:
        self._engine, self._model, self._cases, self._streams = engine, model, cases, streams
        self._max_draft_tokens = max_draft_tokens

    def run(self, *, drafts: bool, logprobs: bool = False) -> tuple[Run, Answers]:
        """Run all requests once.

        Args:
            drafts: whether tokens are proposed.
            logprobs: whether every other request has log-probabilities.
        """
        salt = f"run {next(_run_numbers)}"
        limit = self._max_draft_tokens if drafts else WITHOUT
        requests = [
            msgspec.structs.replace(
                case.request(i, self._model, salt=salt, logprobs=logprobs and bool(i % 2)),
                max_draft_tokens=limit,
            )
            for i, case in enumerate(self._cases)
        ]
        steps = self._engine.engine.stats().num_steps
        start = time.perf_counter()
        answers = self._engine.generate(requests, self._streams)
        seconds = time.perf_counter() - start
        usage = self._engine.usage.values()
        run = Run(
            seconds=seconds,
            tokens=sum(map(len, answers)),
            steps=self._engine.engine.stats().num_steps - steps,
            decode_seconds=sum(it.decode_seconds for it in usage),
            drafted=sum(it.num_draft_tokens for it in usage),
            accepted=sum(it.num_accepted_tokens for it in usage),
        )
        return run, dict(enumerate(answers))

    def compare(self, rounds: int) -> dict[str, Any]:
        """Measure A B B A, where B has drafts, and compare all answers of B with those of A.

        Before the measured runs there is one of each kind with log-probabilities for every other request, which are
        compared bit by bit; the measured ones have none.

        Args:
            rounds: of A B B A.

        Returns:
            A row of the report.
        """
        expected_scores = self.run(drafts=False, logprobs=True)[1]
        self._engine.use_idle_time()
        different = differences(expected_scores, self.run(drafts=True, logprobs=True)[1])
        self._engine.use_idle_time()
        expected: Answers | None = None
        found: dict[bool, list[Run]] = {False: [], True: []}
        for drafts in (False, True, True, False) * rounds:
            run, answers = self.run(drafts=drafts)
            self._engine.use_idle_time()
            found[drafts].append(run)
            expected = expected or answers
            different |= differences(expected, answers)
        return {"requests": len(self._cases), "streams": self._streams} | row(
            found[False], found[True], different
        )


def differences(expected: Answers, found: Answers) -> dict[int, str]:
    """Return by request id where answers differ in a token, a log-probability or the reason of their end."""
    different = {}
    for request_id, events in expected.items():
        other = found[request_id]
        if events != other:
            pairs = enumerate(zip(events, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(events), len(other)))
            different[request_id] = f"request {request_id} differs at token {at} of {len(events)}"
    return different


def row(without: list[Run], with_: list[Run], different: Mapping[int, str]) -> dict[str, Any]:
    """Return the figures of the runs without drafts and with them.

    Args:
        without: runs without drafts.
        with_: as many with drafts, of the same requests.
        different: by request id, where an answer differs from another run's.
    """
    a, b = (sum(runs[1:], runs[0]) for runs in (without, with_))
    return {
        "tokens": a.tokens // len(without),
        "tok_s_without": number(a.tokens / a.seconds),
        "tok_s_with": number(b.tokens / b.seconds),
        "speed_up": number(b.tokens / b.seconds / (a.tokens / a.seconds)),
        "decode_speed_up": number(a.decode_seconds / b.decode_seconds)
        if b.decode_seconds
        else None,
        "speed_ups": [number(x.seconds / y.seconds) for x, y in zip(without, with_, strict=True)],
        "steps_without": a.steps // len(without),
        "steps_with": b.steps // len(with_),
        "drafted_per_step": number(b.drafted / b.steps) if b.steps else None,
        "accepted_per_step": number(b.accepted / b.steps) if b.steps else None,
        "acceptance": number(b.accepted / b.drafted) if b.drafted else None,
        "different": [different[i] for i in sorted(different)],
    }
