"""The parameters of requests.

Type checkers see which parameters there are and their types; limits are the service's, which names them in its errors.
None means the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class _CommonParameters(TypedDict, total=False):
    """The parameters that /generate and chat share."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    stop_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    logit_bias: Mapping[str, float] | None
    ignore_eos: bool | None
    priority: int | None
    timeout_ms: int | None
    cache_salt: str | None
    deterministic: bool | None
    speculation: Mapping[str, object] | None
    receipt: bool | None


class GenerateParameters(_CommonParameters, total=False):
    """The parameters of `Client.generate` and `Client.generate_stream`: those of `POST /generate`.

    docs/http.md has their meanings, ranges and defaults.

    Example:
        >>> greedy: GenerateParameters = {"max_new_tokens": 9, "stop": ["return"]}
        >>> client.generate("def f(n):", **greedy).generated_text
        ' return'
    """

    best_of: int | None
    do_sample: bool | None
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    stop: Sequence[str] | None
    truncate: int | None
    return_full_text: bool | None
    details: bool | None
    decoder_input_details: bool | None
    top_n_tokens: int | None
    grammar: Mapping[str, object] | None


class ChatParameters(_CommonParameters, total=False):
    """The parameters of `Client.chat` and `Client.chat_stream` that most programs need.

    They are those of `POST /v1/chat/completions`; `extra_body` takes the others, which docs/http.md lists.

    Example:
        >>> short: ChatParameters = {"max_tokens": 9, "temperature": 0}
        >>> client.chat("What does f return?", **short).text
        ' return n'
    """

    model: str | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    n: int | None
    logprobs: bool | None
    top_logprobs: int | None
    tools: Sequence[Mapping[str, object]] | None
    tool_choice: str | Mapping[str, object] | None
    response_format: Mapping[str, object] | None
    stream_options: Mapping[str, object] | None
    chat_template_kwargs: Mapping[str, object] | None
    prediction: Mapping[str, object] | None
