"""Computes latencies, rates and goodput of a run.

Definitions, for a request sent at s whose events with tokens arrive at t1 .. tn, with k tokens in all: time to first
token t1 - s; time per output token (tn - t1) / (k - 1), for k of at least 2; inter-token latency each t(i+1) - t(i), 0
for events that arrive together; end to end tn - s.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

PERCENTILES = (50, 90, 95, 99)


class RequestRecord(msgspec.Struct):
    """One request, as measured by the client.

    Attributes:
        started: when it was sent, `time.perf_counter()` seconds, the same clock in all processes of the client.
        asked_tokens: requested output tokens.
        prompt_tokens: the server's count, else the client's.
        output_tokens: the server's count, else the number of events with tokens.
        times: arrival of each event with tokens.
        reads: pieces of the stream in which they arrived.
        lag: seconds between the planned arrival and `started`.
        error: category of the error; None for a complete response.
        detail: text of the error.
        counted: whether `output_tokens` is the server's count.
        ended: when the response ended or failed, on the clock of `started`.
        retry_after: the header of a refusal, seconds; None without one.
    """

    started: float
    asked_tokens: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    times: list[float] = []
    reads: int = 0
    lag: float = 0.0
    error: str | None = None
    detail: str = ""
    counted: bool = False
    ended: float = 0.0
    retry_after: int | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.started

    @property
    def e2e(self) -> float:
        """Seconds to the last token."""
        return self.times[-1] - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of a sample, linearly interpolated between its values; milliseconds.

    Attributes:
        count: number of values.
        percentiles: by rank in percent.
    """

    count: int
    mean: float
    largest: float
    percentiles: dict[int, float]

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution | None:
        """Compute the distribution of a sample in seconds; None for an empty one."""
        if not values:
            return None
        sample = 1e3 * np.asarray(values)
        ranks = np.percentile(sample, PERCENTILES).tolist()
        return cls(
            len(values),
            float(sample.mean()),
            float(sample.max()),
            dict(zip(PERCENTILES, ranks, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a good request; milliseconds, None for no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Limits:
        """Parse `ttft:200,tpot:20`.

        Raises:
            ValueError: a name is unknown, or a limit is not a positive number.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            if name not in names or name in limits:
                raise ValueError(
                    f"{part!r}: give each of {', '.join(names)} at most once, such as ttft:200"
                )
            try:
                limits[name] = float(number)
            except ValueError:
                limits[name] = 0.0
            if not limits[name] > 0:
                raise ValueError(f"{part!r}: a limit is milliseconds, more than 0")
        return cls(**limits)

    def allow(self, record: RequestRecord) -> bool:
        """Whether a complete response is within the limits; a single token has no time per token."""
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e))
        return all(
            limit is None or seconds is None or 1e3 * seconds <= limit for limit, seconds in pairs
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Rates count complete responses, over the time from the first request to the last token.

    Attributes:
        completed: complete responses.
        failed: requests without one.
        errors: number of failed requests by category, most frequent first.
        examples: for each category, the text of one error.
        short: complete responses with fewer tokens than requested.
        uncounted: complete responses without the server's count of tokens; their events are counted.
        seconds: from the first request to the last token of the last complete response.
        input_tokens, output_tokens: of the complete responses.
        requests_per_second: complete responses per second.
        goodput: good requests per second; None without limits.
        tokens_per_read: events with tokens in one piece of the stream, on average; above 1, tokens arrive together.
        lag_ms: delay of requests after their planned arrival; None without planned arrivals.
    """

    completed: int
    failed: int
    errors: dict[str, int]
    examples: dict[str, str]
    short: int
    uncounted: int
    seconds: float
    input_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput: float | None
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    tokens_per_read: float
    lag_ms: Distribution | None


def summarize(
    records: Sequence[RequestRecord], limits: Limits | None = None, *, planned: bool = False
) -> Summary:
    """Compute the figures of a run.

    Args:
        records: one for each request, at least one.
        limits: for the goodput.
        planned: whether the requests had arrival times.
    """
    whole = [record for record in records if record.error is None]
    errors = Counter(record.error for record in records if record.error is not None)
    details = {record.error: record.detail for record in reversed(records) if record.error}
    last = max((record.times[-1] for record in whole), default=0.0)
    seconds = max(0.0, last - min(record.started for record in records))
    inputs = sum(record.prompt_tokens for record in whole)
    outputs = sum(record.output_tokens for record in whole)
    gaps = [gap for record in whole for gap in np.diff(record.times).tolist()]
    reads = sum(record.reads for record in whole)
    good = None if limits is None else sum(limits.allow(record) for record in whole)

    def per_second(count: int) -> float:
        return count / seconds if seconds else 0.0

    return Summary(
        completed=len(whole),
        failed=len(records) - len(whole),
        errors=dict(errors.most_common()),
        examples={kind: details[kind] for kind in errors},
        short=sum(record.output_tokens < record.asked_tokens for record in whole),
        uncounted=sum(not record.counted for record in whole),
        seconds=seconds,
        input_tokens=inputs,
        output_tokens=outputs,
        requests_per_second=per_second(len(whole)),
        output_tokens_per_second=per_second(outputs),
        total_tokens_per_second=per_second(inputs + outputs),
        goodput=None if good is None else per_second(good),
        ttft_ms=Distribution.of_seconds([record.ttft for record in whole]),
        tpot_ms=Distribution.of_seconds([r.tpot for r in whole if r.tpot is not None]),
        itl_ms=Distribution.of_seconds(gaps),
        e2e_ms=Distribution.of_seconds([record.e2e for record in whole]),
        tokens_per_read=sum(len(record.times) for record in whole) / reads if reads else 0.0,
        lag_ms=Distribution.of_seconds([record.lag for record in records]) if planned else None,
    )
