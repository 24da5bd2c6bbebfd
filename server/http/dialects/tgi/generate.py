"""Generation requests of TGI's routes: submits them and renders headers, JSON reply and stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from server.http.body.limits import longest_prompt
from server.http.context import AppContext, check_vocabulary
from server.http.dialects.tgi.frames import TokenHeads, TokenRenderer
from server.http.dialects.tgi.legacy import read_body
from server.http.dialects.tgi.limits import GenerateOptions, check, is_stream, with_prompt_length
from server.http.dialects.tgi.replies import (
    FINISH_REASONS,
    BestOfSequence,
    Details,
    GenerateReply,
    PromptToken,
    Token,
    json_logprob,
    render_token,
    render_top_tokens,
)
from server.http.reply.completion import Completion, Prompt, StopStrings
from server.http.reply.generation import Generation, Timings
from server.http.responses import Headers, header
from server.http.text.structured_output import compile_grammar

if TYPE_CHECKING:
    from server.engine.core.messages import EngineInfo

_encode = msgspec.json.Encoder().encode


def read_request(
    body: object,
    context: AppContext,
    info: EngineInfo,
    heads: TokenHeads,
    *,
    endpoint: str,
    stream: bool | None,
) -> GenerateAnswer:
    """Check a decoded JSON body and make the answer to it.

    Args:
        body: the decoded JSON.
        context: the application's context.
        info: reported by the running engine.
        heads: cached beginnings of frames, for streams.
        endpoint: name of the route.
        stream: whether the route streams. None for the routes where the field `stream` decides, the reply is an array
            of one, and the prompt comes before the generated text by default.

    Raises:
        ValidationError: the body is not valid.
        UnknownModelError: it names an adapter that does not exist.
    """
    request, warnings = read_body(body)
    if request.parameters is not None and request.parameters.adapter_id is not None:
        context.adapters.choose(request.parameters.adapter_id)
    streaming = is_stream(request, endpoint, stream)
    options = check(
        request,
        warnings=warnings,
        streaming=streaming,
        full_text=stream is None,
        config=context.config,
        info=info,
    )
    return GenerateAnswer(
        context, info, options, heads, streaming=streaming, as_list=stream is None
    )


class GenerateAnswer:
    """One request on a generate route; implements `server.http.exchange.Answer`.

    Raises:
        ValidationError: `best_of` asks for more sequences than are ever admitted.
    """

    operation = "text_completion"

    def __init__(
        self,
        context: AppContext,
        info: EngineInfo,
        options: GenerateOptions,
        heads: TokenHeads,
        *,
        streaming: bool,
        as_list: bool,
    ) -> None:
        self.num_sequences = options.best_of
        context.admission.check_sequences("best_of", options.best_of, info)
        self.streaming = streaming
        self.warnings = options.warnings
        self._as_list = as_list
        self._context = context
        self._info = info
        self._options = options
        self._heads = heads

    async def generate(self) -> Generation:
        """Tokenize the prompt and submit it, `best_of` times.

        Raises:
            ValidationError: the prompt cannot be tokenized, has no tokens, or is too long.
            UnavailableError: the engine is not ready.
        """
        options = self._options
        token_ids = await self._context.encode(
            options.inputs, "inputs", most=longest_prompt(self._info, options.truncate)
        )
        if options.truncate is not None:
            token_ids = token_ids[-options.truncate :]
        sampling = with_prompt_length(options, len(token_ids), self._info)
        check_vocabulary(token_ids, "inputs", self._info)
        if options.bad_words:
            bad_words = await self._context.encode_words(options.bad_words, "bad_words")
            sampling = msgspec.structs.replace(sampling, bad_words=bad_words)
        constraint = None
        if options.grammar is not None:
            constraint = await compile_grammar(self._context, options.grammar)
            sampling = msgspec.structs.replace(sampling, grammar=constraint.grammar)
        return Generation(
            self._context,
            [Prompt(token_ids, sampling)],
            completions_per_prompt=options.best_of,
            # TGI checks its limits before its stop strings.
            stop=StopStrings(options.stop, included=True, engine_first=True),
            keep_tokens=options.details,
            options=options.request,
            constraint=constraint,
        )

    def headers(self, generation: Generation, timings: Timings | None) -> Headers:
        """Render the headers: `x-compute-time` in seconds, the other times in whole milliseconds."""
        gpu = self._info.device.startswith("cuda")
        headers = [
            header(b"x-compute-type", "gpu+optimized" if gpu else "cpu"),
            header(b"x-compute-characters", len(self._options.inputs)),
            header(b"x-prompt-tokens", generation.prompt_tokens),
        ]
        if timings is not None:
            tokens = generation.completion_tokens
            headers += [
                header(b"x-compute-time", f"{timings.total:.9f}"),
                header(b"x-total-time", _milliseconds(timings.total)),
                header(b"x-validation-time", _milliseconds(timings.validation)),
                header(b"x-queue-time", _milliseconds(timings.queue)),
                header(b"x-inference-time", _milliseconds(timings.inference)),
                header(b"x-time-per-token", _milliseconds(timings.inference / tokens)),
                header(b"x-generated-tokens", tokens),
            ]
        return headers

    def reply(self, generation: Generation) -> bytes:
        """Render the completion with the highest mean log-probability, and details of the others."""
        others = generation.select_best(1)
        (best,) = generation.returned
        reply = GenerateReply(generated_text=self._options.full_text(best.text))
        if self._options.details:
            sequences = [
                BestOfSequence(
                    generated_text=self._options.full_text(other.text), **self._details(other)
                )
                for other in others
            ]
            details = Details(best_of_sequences=sequences or UNSET, **self._details(best))
            reply = msgspec.structs.replace(reply, details=details)
        if warnings := (*self.warnings, *generation.warnings):
            reply = msgspec.structs.replace(reply, warnings=list(warnings))
        reply = msgspec.structs.replace(reply, receipt=generation.receipt)
        return _encode([reply] if self._as_list else reply)

    def renderer(self, generation: Generation) -> TokenRenderer:
        """Make the renderer of the stream's events."""
        return TokenRenderer(generation, self._options, self._context.tokenizer, self._heads)

    def _details(self, completion: Completion) -> dict[str, Any]:
        """Return the fields that `Details` and `BestOfSequence` have in common."""
        tokenizer, options = self._context.tokenizer, self._options
        assert completion.finish_reason is not None
        prefill = []
        if options.prompt_details:
            prefill = [
                PromptToken(token_id, tokenizer.token_text(token_id), json_logprob(logprob))
                for token_id, logprob in zip(
                    completion.prompt.token_ids, completion.prompt_logprobs, strict=True
                )
            ]
        top_tokens: list[list[Token]] | UnsetType = UNSET
        if options.sampling.top_logprobs:
            top_tokens = [render_top_tokens(token, tokenizer) for token in completion.tokens]
        return {
            "finish_reason": FINISH_REASONS[completion.finish_reason],
            "generated_tokens": completion.num_tokens,
            "seed": None if options.seed is None else completion.seed,
            "prefill": prefill,
            "tokens": [render_token(token, tokenizer) for token in completion.tokens],
            "top_tokens": top_tokens,
        }


def _milliseconds(seconds: float) -> int:
    return int(1000 * seconds)
