"""The events of a step by column: a message of the step has the same columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from server.engine.core.request import FinishReason, SequenceUsage, TokenEvent


class StepEvents:
    """Generated tokens and ended sequences, in the order in which they were added.

    Iterated, it yields (request id, event) pairs, which are made then.

    Attributes:
        request_ids, token_ids, finish_reasons, logprobs, top_tokens, errors, usage: see `StepMessage`.
        ended: request ids of the sequences that ended.
    """

    __slots__ = (
        "ended", "errors", "finish_reasons", "logprobs", "request_ids", "token_ids", "top_tokens", "usage",
    )  # fmt: skip

    def __init__(self, events: Iterable[tuple[int, TokenEvent]] = ()) -> None:
        self.request_ids: list[int] = []
        self.token_ids: list[int] = []
        self.finish_reasons: list[int] = []
        self.logprobs: dict[int, float] = {}
        self.top_tokens: dict[int, list[tuple[int, float]]] = {}
        self.errors: dict[int, str] = {}
        self.usage: dict[int, SequenceUsage] = {}
        self.ended: list[int] = []
        for request_id, event in events:
            self.add(request_id, event)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __iter__(self) -> Iterator[tuple[int, TokenEvent]]:
        for i, request_id in enumerate(self.request_ids):
            token_id, reason = self.token_ids[i], self.finish_reasons[i]
            yield (
                request_id,
                TokenEvent(
                    token_id=token_id if token_id >= 0 else None,
                    logprob=self.logprobs.get(i),
                    top_tokens=tuple(self.top_tokens.get(i, ())),
                    finish_reason=FinishReason(reason) if reason else None,
                    error=self.errors.get(i),
                    usage=self.usage.get(i),
                ),
            )

    def add(self, request_id: int, event: TokenEvent) -> None:
        """Add an event."""
        i = len(self.request_ids)
        self.request_ids.append(request_id)
        self.token_ids.append(-1 if event.token_id is None else event.token_id)
        if event.logprob is not None:
            self.logprobs[i] = event.logprob
        if event.top_tokens:
            self.top_tokens[i] = list(event.top_tokens)
        if event.finish_reason is None:
            self.finish_reasons.append(0)
            return
        self.finish_reasons.append(int(event.finish_reason))
        self.ended.append(request_id)
        if event.error is not None:
            self.errors[i] = event.error
        if event.usage is not None:
            self.usage[i] = event.usage

    def add_run(self, request_id: int, token_ids: list[int], logprob: float | None) -> None:
        """Add tokens of one sequence, which continues.

        Args:
            request_id: of the sequence.
            token_ids: one or more.
            logprob: of the first, if requested.
        """
        if logprob is not None:
            self.logprobs[len(self.request_ids)] = logprob
        count = len(token_ids)
        self.request_ids += [request_id] * count
        self.token_ids += token_ids
        self.finish_reasons += [0] * count

    def add_tokens(
        self,
        request_ids: list[int],
        token_ids: list[int],
        logprobs: Mapping[int, float],
        first: int,
        stop: int,
    ) -> None:
        """Add the tokens of the rows `first .. stop` of a step, whose sequences continue.

        Args:
            request_ids: by row.
            token_ids: by row.
            logprobs: by row, where requested.
            first: the first of the rows.
            stop: the row after the last.
        """
        shift = len(self.request_ids) - first
        if not (first or shift) and stop == len(token_ids) == len(logprobs):
            self.logprobs.update(logprobs)  # as in nearly every step if all requests report them
        elif logprobs:
            for row in range(first, stop):
                if (logprob := logprobs.get(row)) is not None:
                    self.logprobs[row + shift] = logprob
        self.request_ids += request_ids[first:stop]
        self.token_ids += token_ids[first:stop]
        self.finish_reasons += [0] * (stop - first)
