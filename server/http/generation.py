"""One request on its way through the engine: its sequences, their texts, and the reply.

Knows no sockets: `routes.generate` reads the body and sends what is made here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from model.errors import TokenizerError
from server.engine.core.request import GenerateRequest
from server.errors import IncompleteGenerationError, ValidationError
from server.http.dialects.tgi.limits import random_seed, with_prompt_length, with_seed
from server.http.dialects.tgi.replies import (
    BestOfSequence,
    Details,
    GenerateReply,
    PromptToken,
    Token,
)
from server.http.dialects.tgi.sse import wire_logprob
from server.http.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model.sampling.parameters import SamplingParams
    from model.text.tokenizer import Tokenizer
    from server.engine.core.request import TokenEvent
    from server.engine.link.client import RequestStream
    from server.engine.link.protocol import EngineInfo
    from server.http.context import AppContext
    from server.http.dialects.tgi.limits import GenerateOptions
    from server.http.metrics.records import RequestRecord


@dataclasses.dataclass(slots=True)
class Draw:
    """One sequence of a request.

    Attributes:
        stream: its events.
        transcript: its text.
        seed: as reported; None where nothing is sampled.
        tokens: in order, where details are asked for.
        top_tokens: alternatives at each position, where asked for.
        logprob_sum: of all its tokens.
    """

    stream: RequestStream
    transcript: Transcript
    seed: int | None
    tokens: list[Token] = dataclasses.field(default_factory=list)
    top_tokens: list[list[Token]] = dataclasses.field(default_factory=list)
    logprob_sum: float = 0.0

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; what `best_of` chooses by."""
        return self.logprob_sum / max(1, self.transcript.num_tokens)


class Generation:
    """A request that the engine works on. Whoever makes one calls `abort` in the end, whatever happens.

    Attributes:
        options: what was asked for.
        prompt_ids: the prompt as the engine sees it.
        submitted: when it was handed to the engine, `time.perf_counter` seconds.
        draws: its sequences: `best_of` many.
    """

    def __init__(
        self,
        context: AppContext,
        options: GenerateOptions,
        prompt_ids: list[int],
        sampling: SamplingParams,
    ) -> None:
        self.options = options
        self.prompt_ids = prompt_ids
        self.submitted = time.perf_counter()
        self.draws: list[Draw] = []
        self._tokenizer = context.tokenizer
        try:
            for i in range(options.best_of):
                seed = options.seed if i == 0 else random_seed()
                self._submit(context, sampling if i == 0 else with_seed(sampling, seed or 0), seed)
        except BaseException:
            self.abort()
            raise

    def _submit(self, context: AppContext, sampling: SamplingParams, seed: int | None) -> None:
        request = GenerateRequest(
            request_id=context.client.next_request_id(),
            prompt_token_ids=self.prompt_ids,
            sampling=sampling,
        )
        stream = context.submit(request)  # first of all: the engine computes meanwhile
        transcript = Transcript(
            context.tokenizer, self.prompt_ids, self.options.stop, sampling.min_new_tokens
        )
        self.draws.append(Draw(stream, transcript, seed))

    def abort(self) -> None:
        """Free what the engine holds for this request; does nothing where it has ended."""
        for draw in self.draws:
            draw.stream.abort()

    @property
    def queue_seconds(self) -> float:
        """How long the first sequence waited in the engine; valid from its first token on."""
        return self.draws[0].stream.queue_seconds

    async def finish(self, record: RequestRecord) -> Draw:
        """Wait until every sequence has ended.

        Returns:
            The sequence with the highest mean log-probability; it comes first in `draws` from then on.

        Raises:
            GenerationError: the engine gave up on one of them.
        """
        await asyncio.gather(*(self._finish(draw, record) for draw in self.draws))
        best = max(self.draws, key=lambda draw: draw.mean_logprob)
        self.draws.remove(best)
        self.draws.insert(0, best)
        return best

    async def _finish(self, draw: Draw, record: RequestRecord) -> None:
        transcript, details = draw.transcript, self.options.details
        clock = record.clock()

        def take(events: list[TokenEvent]) -> bool:
            for event in events:
                if details:
                    draw.tokens.append(transcript.token(event))
                    draw.top_tokens.append(transcript.top_tokens(event))
                else:
                    transcript.push(event)
                draw.logprob_sum += event.logprob or 0.0
                if transcript.finish_reason is not None:
                    break
            clock.tokens(len(events))
            return transcript.finish_reason is None

        await draw.stream.follow(take)
        if transcript.finish_reason is None:
            raise IncompleteGenerationError
        draw.stream.abort()  # at a stop string the engine would go on

    def reply(self) -> GenerateReply:
        """The answer, once `finish` has returned."""
        best, *others = self.draws
        if not self.options.details:
            return GenerateReply(generated_text=self.full_text(best))
        sequences = [
            BestOfSequence(
                generated_text=self.full_text(draw),
                finish_reason=_finish_reason(draw),
                generated_tokens=draw.transcript.num_tokens,
                seed=draw.seed,
                prefill=self._prefill(draw),
                tokens=draw.tokens,
                top_tokens=self._top_tokens(draw) or UNSET,
            )
            for draw in others
        ]
        details = Details(
            finish_reason=_finish_reason(best),
            generated_tokens=best.transcript.num_tokens,
            seed=best.seed,
            prefill=self._prefill(best),
            tokens=best.tokens,
            best_of_sequences=sequences or UNSET,
            top_tokens=self._top_tokens(best) or UNSET,
        )
        return GenerateReply(generated_text=self.full_text(best), details=details)

    def full_text(self, draw: Draw) -> str:
        """The generated text, after the prompt where that was asked for."""
        text = draw.transcript.text
        return self.options.inputs + text if self.options.return_full_text else text

    def _top_tokens(self, draw: Draw) -> list[list[Token]]:
        return draw.top_tokens if self.options.sampling.top_logprobs else []

    def _prefill(self, draw: Draw) -> list[PromptToken]:
        if not self.options.prompt_details:
            return []
        logprobs: list[float | None] = [None, *(draw.stream.prompt_logprobs or ())]
        logprobs += [None] * (len(self.prompt_ids) - len(logprobs))
        return [
            PromptToken(token_id, self._tokenizer.token_text(token_id), wire_logprob(logprob))
            for token_id, logprob in zip(self.prompt_ids, logprobs, strict=True)
        ]


async def encode_prompt(
    context: AppContext, options: GenerateOptions, info: EngineInfo
) -> tuple[list[int], SamplingParams]:
    """Tokenize the prompt and bad words, off the event loop where they are long, and settle the request's length.

    Raises:
        ValidationError: a text cannot be tokenized or has no tokens, or the prompt is too long.
    """

    def work() -> tuple[list[int], tuple[tuple[int, ...], ...]]:
        tokenizer = context.tokenizer
        return encode(tokenizer, options.inputs), encode_bad_words(tokenizer, options.bad_words)

    characters = len(options.inputs) + sum(map(len, options.bad_words))
    prompt_ids, bad_words = await context.on_text(characters, work)
    if options.truncate is not None:
        prompt_ids = prompt_ids[-options.truncate :]
    sampling = with_prompt_length(options, len(prompt_ids), info)
    if (largest := max(prompt_ids)) >= info.vocab_size:
        raise ValidationError(
            f"`inputs` has a token that the model does not know: its vocabulary has "
            f"{info.vocab_size} tokens. Given: token {largest}"
        )
    return prompt_ids, msgspec.structs.replace(sampling, bad_words=bad_words)


def encode_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of words at the beginning and within a text: without and with a space before.

    Raises:
        ValidationError: a word cannot be tokenized, or has no tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        bare = word.removeprefix(" ")
        try:
            encoded = [tokenizer.encode(text, False) for text in (bare, f" {bare}") if text]
        except TokenizerError as error:
            raise ValidationError(f"`bad_words.{i}` cannot be tokenized: {error}") from None
        if not any(encoded):
            raise ValidationError(f"`bad_words.{i}` has no tokens")
        found |= {tuple(ids): None for ids in encoded if ids}
    return tuple(found)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ValidationError: it cannot be tokenized, or has no tokens.
    """
    try:
        prompt_ids = tokenizer.encode(text)
    except TokenizerError as error:
        raise ValidationError(f"`inputs` cannot be tokenized: {error}") from None
    if not prompt_ids:
        raise ValidationError("`inputs` has no tokens")
    return prompt_ids


def _finish_reason(draw: Draw) -> str:
    assert draw.transcript.finish_reason is not None
    return draw.transcript.finish_reason
