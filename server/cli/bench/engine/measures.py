"""Measures workloads on a running engine, with their share of the roofline."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, TypeAlias

from server.cli.bench.engine.workloads import STREAM_TOKENS, Plan, Workload
from server.cli.bench.result import number
from server.engine.runner.explain.model_work import ModelWork, Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.random import Generator

    from server.cli.bench.engine.run import EngineRun, Trace

Row: TypeAlias = dict[str, Any]

_REPEATS = 3
_TTFT_REPEATS = 5
_TTFT_SECONDS = 10.0
"""Time for repeats of one prompt: a prompt of 131072 tokens takes seconds and hardly varies."""
_WARM_STEPS = 8
_STREAMED_EACH, _FEWEST_STREAMED = 4, 16
"""Requests for each in flight, and at least: as `tessera bench serve` sends."""


class EngineMeasures:
    """Measures one engine."""

    def __init__(
        self,
        engine: EngineRun,
        work: ModelWork,
        plan: Plan,
        generator: Generator,
        say: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._work = work
        self._plan = plan
        self._generator = generator
        self._say = say
        self._cached: list[int] = []

    def measure(self, workload: Workload) -> Row | None:
        """Measure a workload; return None and report it if it does not fit."""
        of_size = {
            "ttft": self._ttft,
            "hit": self._hit,
            "context": self._context,
            "mixed": self._mixed,
            "streams": self._streams,
        }
        if workload.kind in of_size:
            return of_size[workload.kind](workload.size)
        return self._decode(workload)

    def _ttft(self, size: int) -> Row | None:
        """Measure the milliseconds to the first token of a single prompt."""
        prompt = self._prompt_length(size, 1)
        if prompt is None:
            return None

        def seconds() -> float:
            return self._run([prompt], [1]).seconds

        return self._first_token("ttft_ms", prompt, prompt, seconds)

    def _hit(self, size: int) -> Row | None:
        """Measure the milliseconds to the first token of a single prompt that is in the prefix cache."""
        length = self._prompt_length(size, 1)
        if length is None:
            return None
        prompt = self._cached_prompt(length)
        cached = self._num_cached(prompt)
        if not cached:
            self._say(f"skipped: a prompt of {length} tokens is not in the prefix cache")
            return None

        def seconds() -> float:
            return self._run_prompt(prompt, 1).seconds

        row = self._first_token("hit_ttft_ms", length, length - cached, seconds)
        return row | {"cached_tokens": cached}

    def _first_token(
        self, metric: str, prompt: int, computed: int, seconds: Callable[[], float]
    ) -> Row:
        """Measure a prompt of which `computed` tokens are not cached, once without counting it."""
        repeats = max(1, min(_TTFT_REPEATS, int(_TTFT_SECONDS / seconds())))
        median = statistics.median(seconds() for _ in range(repeats))
        limit = self._work.limit(self._work.step([Rows(1, computed, prompt)]))
        row = _row(metric, 1, 1e3 * median, None if limit is None else limit.seconds, median)
        return row | {"prompt_tokens": prompt, "repeats": repeats}

    def _context(self, size: int) -> Row | None:
        """Measure the milliseconds per token of one sequence after a long prompt, which is in the prefix cache."""
        steps = self._plan.steps
        length = self._prompt_length(size, steps + 1)
        if length is None:
            return None
        prompt = self._cached_prompt(length)
        self._run_prompt(prompt, min(_WARM_STEPS, steps + 1))
        traces = [self._run_prompt(prompt, steps + 1) for _ in range(_REPEATS)]
        trace = sorted(traces, key=lambda trace: trace.decode_seconds)[_REPEATS // 2]
        least = self._work.decode_seconds(1, length + 2, trace.decode_steps)
        milliseconds = 1e3 * trace.decode_seconds / trace.decode_steps
        row = _row("context_ms", 1, milliseconds, least, trace.decode_seconds)
        return row | {"prompt_tokens": length, "steps": trace.decode_steps}

    def _cached_prompt(self, length: int) -> list[int]:
        """Return a prompt of this length that is in the prefix cache: the start of the last one if that is as long."""
        if len(self._cached) < length:
            vocabulary = self._engine.info.vocab_size
            self._cached = self._generator.integers(0, vocabulary, length).tolist()
        prompt = self._cached[:length]
        self._run_prompt(prompt, 1)  # other prompts may have evicted it
        return prompt

    def _num_cached(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt the engine finds in its prefix cache."""
        found: list[int] = []
        self._engine.run(
            [self._engine.request(prompt, 1)],
            lambda step: found.extend(started.num_cached_tokens for started in step.started),
        )
        return max(found, default=0)

    def _run_prompt(self, prompt: list[int], outputs: int) -> Trace:
        trace = self._engine.run([self._engine.request(prompt, outputs)])
        self._engine.use_idle_time()
        return trace

    def _prompt_length(self, size: int, outputs: int) -> int | None:
        """Return the tokens of a prompt of `size`, shortened if only the output exceeds the limit; None if it does."""
        limit = self._engine.info.max_total_tokens
        if not self._fits(f"a prompt of {size} tokens", min(size, limit + 1)):
            return None
        return min(size, limit - outputs)

    def _mixed(self, sequences: int) -> Row | None:
        """Measure the tokens per second of requests of mixed lengths, from sending all of them to the last token."""
        lengths = self._plan.lengths
        if not self._fits(f"prompts and outputs of {lengths} tokens", 2 * lengths.longest):
            return None
        prompts = lengths.sample(sequences, self._generator)
        outputs = lengths.sample(sequences, self._generator)
        self._run(prompts, outputs)  # compiles the kernels and records the steps for these lengths
        seconds = self._run(prompts, outputs).seconds
        least = self._work.requests_seconds(prompts, outputs)
        row = _row("mixed_tok_s", sequences, sum(outputs) / seconds, least, seconds)
        return row | {"prompt_tokens": str(lengths), "output_tokens": str(lengths)}

    def _streams(self, concurrency: int) -> Row | None:
        """Measure the tokens per second of the load of `tessera bench serve`, without HTTP."""
        if not self._fits(f"prompts and outputs of {STREAM_TOKENS} tokens", 2 * STREAM_TOKENS):
            return None
        count = max(_FEWEST_STREAMED, _STREAMED_EACH * concurrency)
        lengths = [STREAM_TOKENS] * count
        self._run(lengths[:concurrency], lengths[:concurrency])
        requests = self._engine.random_requests(lengths, lengths, self._generator)
        seconds = self._engine.run(requests, concurrency=concurrency).seconds
        self._engine.use_idle_time()
        row = _row("streams_tok_s", concurrency, sum(lengths) / seconds, None, seconds)
        return row | {"prompt_tokens": STREAM_TOKENS, "requests": count}

    def _decode(self, workload: Workload) -> Row | None:
        """Measure the tokens per second, or the milliseconds per token, while all sequences decode."""
        trace = self._decode_trace(workload.size)
        if trace is None:
            return None
        seconds = trace.decode_seconds / trace.decode_steps
        context = self._plan.prompt + trace.tokens_before + 1
        least = self._work.decode_seconds(workload.size, context, trace.decode_steps)
        if workload.kind == "batch":
            metric, value = "ms_per_token", 1e3 * seconds
        else:
            metric, value = "decode_tok_s", workload.size / seconds
        row = _row(metric, workload.size, value, least, trace.decode_seconds)
        return row | {"prompt_tokens": self._plan.prompt, "steps": trace.decode_steps}

    def _decode_trace(self, batch: int) -> Trace | None:
        """Return the run of median speed."""
        plan = self._plan
        outputs = plan.outputs(batch, self._engine.info.max_num_batched_tokens)
        if not self._fits(f"{batch} sequences", plan.prompt + outputs):
            return None
        ramp = outputs - plan.steps
        self._run([plan.prompt] * batch, [ramp + _WARM_STEPS] * batch)
        traces = [self._run([plan.prompt] * batch, [outputs] * batch) for _ in range(_REPEATS)]
        if not all(trace.decode_steps for trace in traces):
            self._say(
                f"skipped: {batch} sequences never decode together; --max-num-seqs may be too small"
            )
            return None
        traces.sort(key=lambda trace: trace.decode_seconds / trace.decode_steps)
        return traces[len(traces) // 2]

    def _run(self, prompts: list[int], outputs: list[int]) -> Trace:
        engine = self._engine
        trace = engine.run(engine.random_requests(prompts, outputs, self._generator))
        engine.use_idle_time()
        return trace

    def _fits(self, what: str, tokens: int) -> bool:
        limit = self._engine.info.max_total_tokens
        if tokens > limit:
            self._say(f"skipped: {what}: {tokens} tokens per sequence exceed the limit of {limit}")
        return tokens <= limit


def _row(metric: str, batch: int, value: float, least: float | None, seconds: float) -> Row:
    share = None if least is None else number(least / seconds)
    return {"metric": metric, "batch": batch, "value": number(value), "roofline": share}
