"""Requests to /v1/completions: reads the prompts, submits them, and renders reply and stream."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from server.errors import ValidationError
from server.http.body.limits import longest_prompt
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.frames import ChunkRenderer, TokenTexts, event_frame
from server.http.dialects.openai.logprobs import (
    TextOffsets,
    completion_logprobs,
    generated,
    of_prompt,
    prompt_offsets,
)
from server.http.dialects.openai.options import Logprobs, Options, OutputLimit, check, submit
from server.http.dialects.openai.prompts import (
    PromptInput,
    count_prompts,
    encode_gap,
    encode_prompts,
    end_token_ids,
    read_prompts,
    require_family,
)
from server.http.dialects.openai.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Usage,
    usage_of,
)
from server.http.dialects.openai.reply_format import ReplyFormat
from server.http.dialects.openai.schema import CompletionBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model.text.tokenizer import Tokenizer
    from server.engine.core.messages import EngineInfo
    from server.http.context import AppContext
    from server.http.reply.completion import Completion, Token
    from server.http.reply.generation import Generation, Timings
    from server.http.responses import Headers
    from server.receipts.record import Receipt

_DEFAULT_TOKENS = 16
_encode = msgspec.json.Encoder().encode


class CompletionAnswer:
    """One request to /v1/completions; implements `server.http.exchange.Answer`.

    Raises:
        ValidationError: the body is not valid.
        UnknownModelError: it names a model that is not served.
    """

    operation = "text_completion"

    def __init__(
        self, context: AppContext, info: EngineInfo, body: object, texts: TokenTexts
    ) -> None:
        request, self.warnings = parse_body(CompletionBody, body, context)
        self._context = context
        self._info = info
        self._texts = texts
        self._suffix = request.suffix or None
        self._echo = bool(request.echo)
        self._add_special_tokens = request.add_special_tokens is not False
        self._max_tokens = request.max_tokens
        if self._max_tokens == 0 and not self._echo:
            raise ValidationError("`max_tokens` must be >= 1, or 0 with `echo`. Given: 0")
        # Before each prompt is checked: a body may have 100,000 of them.
        context.admission.check_sequences("prompt", count_prompts(request.prompt), info)
        self._prompts = read_prompts(request.prompt)
        self._options = check(
            request,
            logprobs=Logprobs(
                reported=request.logprobs is not None,
                top=request.logprobs or 0,
                prompt=self._echo and request.logprobs is not None,
            ),
            best_of=request.best_of,
            config=context.config,
            info=info,
        )
        self.streaming = bool(request.stream)
        if self._suffix is not None:
            self._options = _for_gap(self._options, self._prompts, context, echo=self._echo)
        self.num_sequences = len(self._prompts) * self._options.completions
        context.admission.check_sequences("prompt", self.num_sequences, info)

    async def generate(self) -> Generation:
        """Tokenize the prompts and submit them.

        Raises:
            ValidationError: a prompt cannot be tokenized, has no tokens, or is too long.
            UnavailableError: the engine is not ready.
        """
        context, options = self._context, self._options
        most = longest_prompt(self._info, options.truncate)
        if self._suffix is None:
            token_ids = await encode_prompts(
                self._prompts, context, add_special_tokens=self._add_special_tokens, most=most
            )
        else:
            family = require_family(context.tokenizer)
            token_ids = [
                await encode_gap(family, str(prompt), self._suffix, context, most=most)
                for prompt in self._prompts
            ]
        # The engine generates at least one token; the reply leaves it out if none was wanted.
        limit = OutputLimit(
            wanted=None if self._max_tokens is None else max(1, self._max_tokens),
            default=_DEFAULT_TOKENS,
            prompt_field="prompt",
            field="max_tokens",
        )
        return await submit(context, self._info, options, token_ids, limit)

    def headers(self, generation: Generation, timings: Timings | None) -> Headers:  # noqa: ARG002 - of the protocol
        """Return no headers."""
        return []

    def reply(self, generation: Generation) -> bytes:
        """Render the returned completions, in the order of the prompts."""
        generation.select_best(self._options.n)
        return _encode(self._format(generation).reply())

    def renderer(self, generation: Generation) -> ChunkRenderer:
        """Make the renderer of the stream's events."""
        chunks = self._format(generation)
        return ChunkRenderer(generation, chunks, self._context.tokenizer, self._texts)

    def _format(self, generation: Generation) -> _CompletionFormat:
        return _CompletionFormat(
            generation,
            self._options,
            self._context.tokenizer,
            self.warnings,
            echoed=self._prompt_texts(generation) if self._echo else None,
            omit_output=self._max_tokens == 0,
        )

    def _prompt_texts(self, generation: Generation) -> list[str]:
        """Return the text of the prompt of each completion; after truncation, of the tokens that were kept."""
        tokenizer, options = self._context.tokenizer, self._options
        texts = []
        for i, completion in enumerate(generation.completions):
            prompt = self._prompts[i // options.completions]
            if isinstance(prompt, list) or options.truncate is not None:
                prompt = tokenizer.decode(completion.prompt.token_ids, options.skip_special_tokens)
            texts.append(prompt)
        return texts


class _CompletionFormat(ReplyFormat):
    """Builds the reply or the events of one request; implements `server.http.dialects.openai.frames.ChunkFormat`.

    Args:
        generation: the request's completions.
        options: the request's options.
        tokenizer: the model's tokenizer.
        warnings: fields without effect.
        echoed: text of the prompt of each completion that comes before its text; None if it does not.
        omit_output: whether the generated token is left out.
    """

    def __init__(
        self,
        generation: Generation,
        options: Options,
        tokenizer: Tokenizer,
        warnings: tuple[str, ...],
        *,
        echoed: Sequence[str] | None,
        omit_output: bool,
    ) -> None:
        super().__init__(generation, options, tokenizer, "cmpl-", warnings)
        self.plain = self.plain and not omit_output
        self._echoed = None
        if echoed is not None:
            self._echoed = dict(zip(generation.completions, echoed, strict=True))
        self._omit_output = omit_output
        self._tokenizer = tokenizer
        self._offsets: dict[Completion, TextOffsets] = {}

    def usage(self) -> Usage:
        """Return the usage so far, without output that is left out."""
        if not self._omit_output:
            return super().usage()
        omitted = sum([completion.num_tokens for completion in self.generation.completions])
        return usage_of(self.generation, unreported=omitted)

    def finish_reason(self, completion: Completion) -> str | None:
        """Return why a completion ended; None if it continues."""
        reason = super().finish_reason(completion)
        return "length" if reason is not None and self._omit_output else reason

    def reply(self) -> CompletionReply:
        """Build the whole reply."""
        choices = [
            self._choice(completion, index, completion.text, completion.tokens, begins=True)
            for index, completion in enumerate(self.generation.returned)
        ]
        return self._record(choices, self.usage(), self.warnings, self.generation.receipt)

    def begin(self, completion: Completion, index: int) -> bytes:
        """Render the event with the prompt, if it is reported."""
        if self._echoed is None and not self.options.token_ids:
            return b""
        choice = self._choice(completion, index, "", (), begins=True)
        return event_frame(self._record([choice], self.event_usage(), UNSET))

    def chunk(
        self, completion: Completion, index: int, text: str, token: Token | None
    ) -> CompletionReply:
        """Build the event of a token; see `ChunkFormat`."""
        tokens = () if token is None else (token,)
        choice = self._choice(completion, index, text, tokens, begins=False)
        return self._record(
            [choice],
            self.event_usage(),
            self.event_warnings(completion),
            self.event_receipt(completion),
        )

    def end(self) -> bytes:
        """Render the event with the usage, if requested."""
        if not self.options.usage_event:
            return b""
        return event_frame(self._record([], self.usage(), self.warnings, self.generation.receipt))

    def _choice(
        self,
        completion: Completion,
        index: int,
        text: str,
        tokens: Sequence[Token],
        *,
        begins: bool,
    ) -> CompletionChoice:
        """Build a choice.

        Args:
            completion: the choice's completion.
            index: the choice's number.
            text: generated text that the choice reports.
            tokens: generated tokens that it reports.
            begins: whether it also reports the prompt, if requested.
        """
        options = self.options
        if self._omit_output:
            text, tokens = "", ()
        with_prompt = begins and self._echoed is not None
        logprobs = self._logprobs(completion, tokens, with_prompt=with_prompt)
        if with_prompt:
            text = self._echo(completion) + text
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=self.finish_reason(completion),
            stop_reason=None if self._omit_output else completion.stop_reason,
            prompt_token_ids=completion.prompt.token_ids if begins and options.token_ids else UNSET,
            token_ids=[token.id for token in tokens] if options.token_ids else UNSET,
        )

    def _echo(self, completion: Completion) -> str:
        """Return the text before that of a completion."""
        return "" if self._echoed is None else self._echoed[completion]

    def _logprobs(
        self, completion: Completion, tokens: Sequence[Token], *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        options = self.options
        if not options.logprobs.reported:
            return None
        prompt_ids, echoed = completion.prompt.token_ids, self._echo(completion)
        if completion not in self._offsets:
            self._offsets[completion] = TextOffsets(
                self._tokenizer,
                prompt_ids,
                skip_special_tokens=options.skip_special_tokens,
                begin=len(echoed),
            )
        scored = generated(tokens)
        offsets = [self._offsets[completion].push(token.id) for token in tokens]
        if with_prompt and options.logprobs.prompt:
            scored = of_prompt(completion) + scored
            offsets = prompt_offsets(self._tokenizer, prompt_ids, echoed) + offsets
        return completion_logprobs(scored, self.names, offsets)

    def _record(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        warnings: tuple[str, ...] | UnsetType,
        receipt: Receipt | UnsetType = UNSET,
    ) -> CompletionReply:
        return CompletionReply(
            id=self.id,
            object="text_completion",
            created=self.created,
            model=self.options.model,
            system_fingerprint=self.options.fingerprint,
            choices=choices,
            usage=usage,
            warnings=warnings,
            receipt=receipt,
        )


def _for_gap(
    options: Options, prompts: list[PromptInput], context: AppContext, *, echo: bool
) -> Options:
    """Return the options of a request to fill in the middle, which ends at the tokens that end such a text.

    Raises:
        ValidationError: the model has no tokens for it, or another field excludes it.
    """
    if echo:
        raise ValidationError("`suffix` and `echo` exclude each other")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ValidationError("`suffix` needs a `prompt` that is text, not token ids")
    family = require_family(context.tokenizer)
    stop = (*options.sampling.stop_token_ids, *end_token_ids(family, context.tokenizer))
    sampling = msgspec.structs.replace(options.sampling, stop_token_ids=stop)
    return dataclasses.replace(options, sampling=sampling)
