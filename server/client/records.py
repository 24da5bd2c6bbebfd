"""The answers of Tessera's own routes.

The fields are those of the JSON, which docs/http.md describes; fields that a newer service adds are left out.
"""

from __future__ import annotations

from typing import Any

import msgspec


class PromptToken(msgspec.Struct, frozen=True):
    """A token of the prompt. The first one has no log-probability.

    Attributes:
        id: in the vocabulary.
        text: what it adds to the prompt.
        logprob: natural logarithm of its probability.

    Example:
        >>> reply = client.generate("def", max_new_tokens=1, details=True, decoder_input_details=True)
        >>> [token.text for token in reply.details.prefill]
        ['d', 'e', 'f']
    """

    id: int
    text: str
    logprob: float | None = None


class Token(msgspec.Struct, frozen=True):
    """A generated token.

    Attributes:
        id: in the vocabulary.
        text: what it adds to the generated text; the name of a special token.
        logprob: natural logarithm of its probability; None if that is not finite.
        special: whether it is no part of the generated text, such as the end token.

    Example:
        >>> reply = client.generate("def f(n):", max_new_tokens=2, details=True)
        >>> [token.text for token in reply.details.tokens]
        [' ', 'r']
    """

    id: int
    text: str
    logprob: float | None = None
    special: bool = False


class BestOfSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One of the sequences that `best_of` did not choose; the fields are those of `Details`.

    Example:
        >>> reply = client.generate("def f(n):", do_sample=True, best_of=2, details=True)
        >>> [sequence.generated_text for sequence in reply.details.best_of_sequences]
        [' return n']
    """

    generated_text: str
    finish_reason: str
    generated_tokens: int
    seed: int | None = None
    prefill: tuple[PromptToken, ...] = ()
    tokens: tuple[Token, ...] = ()
    top_tokens: tuple[tuple[Token, ...], ...] = ()


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """How a text was generated.

    Attributes:
        finish_reason: `length`, `eos_token`, `stop_sequence` or `timeout`.
        generated_tokens: their number, with the one that ended the text.
        seed: of the sampling; None if nothing was sampled.
        prefill: the prompt's tokens; only with `decoder_input_details`.
        tokens: the generated ones.
        top_tokens: the most likely tokens at each position; only with `top_n_tokens`.
        best_of_sequences: those that were not chosen; only with `best_of`.

    Example:
        >>> reply = client.generate("def f(n):", max_new_tokens=9, details=True)
        >>> reply.details.finish_reason, reply.details.generated_tokens
        ('length', 9)
    """

    finish_reason: str
    generated_tokens: int
    seed: int | None = None
    prefill: tuple[PromptToken, ...] = ()
    tokens: tuple[Token, ...] = ()
    top_tokens: tuple[tuple[Token, ...], ...] = ()
    best_of_sequences: tuple[BestOfSequence, ...] = ()


class GenerateReply(msgspec.Struct, frozen=True, kw_only=True):
    """The continuation of a prompt.

    Attributes:
        generated_text: without special tokens.
        details: only if the request asked for them.
        warnings: a sentence for each accepted field without effect.
        receipt: from which `tessera replay` computes it again, as the service wrote it; only if the
            request asked for it.

    Example:
        >>> client.generate("def f(n):", max_new_tokens=9).generated_text
        ' return n'
    """

    generated_text: str
    details: Details | None = None
    warnings: tuple[str, ...] = ()
    receipt: dict[str, Any] | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request used.

    Attributes:
        queue_ms: milliseconds in the engine before the first step.
        prefill_ms: from then to the first token.
        decode_ms: from then to the last token.
        computed_prompt_tokens: prompt tokens that were computed.
        cached_prompt_tokens: prompt tokens taken from the prefix cache.
        recomputed_tokens: tokens that were computed again after a preemption.
        steps: forward passes.
        draft_tokens: tokens that were proposed and computed.
        accepted_tokens: those of them that the model sampled too.
        device_seconds: the request's share of the device time of these steps.
        kv_block_seconds: blocks of the KV cache that the request held, times seconds.

    Example:
        >>> with client.generate_stream("def f(n):", max_new_tokens=9, details=True) as stream:
        ...     *_, last = stream
        >>> last.details.usage.computed_prompt_tokens
        4
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    device_seconds: float = 0.0
    kv_block_seconds: float = 0.0


class StreamDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of a stream was generated: `Details` without the tokens, which the events had.

    Attributes:
        finish_reason: `length`, `eos_token`, `stop_sequence` or `timeout`.
        generated_tokens: their number, with the one that ended the text.
        seed: of the sampling; None if nothing was sampled.
        input_length: tokens of the prompt.
        usage: what the request used.

    Example:
        >>> with client.generate_stream("def f(n):", max_new_tokens=9, details=True) as stream:
        ...     *_, last = stream
        >>> last.details.input_length, last.details.generated_tokens
        (9, 9)
    """

    finish_reason: str
    generated_tokens: int
    seed: int | None = None
    input_length: int = 0
    usage: Usage = Usage()


class StreamEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: a token.

    Attributes:
        index: of the token, from 1.
        token: the token.
        top_tokens: the most likely tokens at its position; only with `top_n_tokens`.
        generated_text: the whole text; only in the last event.
        details: only in the last event, if the request asked for them.
        warnings: a sentence for each accepted field without effect; only in the last event.
        receipt: from which `tessera replay` computes the answer again, as the service wrote it; only in the last event,
            if the request asked for it.

    Example:
        >>> with client.generate_stream("def f(n):", max_new_tokens=9) as stream:
        ...     print("".join(event.token.text for event in stream))
         return n
    """

    index: int
    token: Token
    top_tokens: tuple[Token, ...] = ()
    generated_text: str | None = None
    details: StreamDetails | None = None
    warnings: tuple[str, ...] = ()
    receipt: dict[str, Any] | None = None


class PromptSpan(msgspec.Struct, frozen=True):
    """A token of a text and the characters that it covers, [start, stop).

    Example:
        >>> [(span.text, span.start, span.stop) for span in client.tokenize("def")]
        [('d', 0, 1), ('e', 1, 2), ('f', 2, 3)]
    """

    id: int
    text: str
    start: int
    stop: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a service takes requests.

    Attributes:
        state: `starting`, `ready`, `restarting`, `draining` or `stopped`.
        phase: what the engine is doing.
        error: why requests are not served; None if they are.
        error_type: the name of this error.

    Example:
        >>> health = client.health()
        >>> health.is_ready, health.state
        (True, 'ready')
    """

    state: str
    phase: str
    error: str | None = None
    error_type: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.error is None
