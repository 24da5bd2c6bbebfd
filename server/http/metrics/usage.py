"""What a request used: the record that every answer reports."""

from __future__ import annotations

import msgspec

from server.http.responses import Headers, header


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request used, summed over its completions; the times are those of the slowest completion.

    `server.engine.core.accounting` has the rules.

    Attributes:
        queue_ms: milliseconds in the engine before the first step.
        prefill_ms: from then to the first token.
        decode_ms: from then to the last token.
        computed_prompt_tokens: prompt tokens that were computed; the completions of a prompt each count it.
        cached_prompt_tokens: prompt tokens taken from the prefix cache.
        recomputed_tokens: tokens that were computed again because their blocks had been given to older sequences.
        steps: forward passes; one that computed tokens of several completions counts for each.
        draft_tokens: tokens that were proposed and computed.
        accepted_tokens: those of them that the model sampled too; they are in the answer.
        device_seconds: the request's share of the device time of these steps.
        kv_block_seconds: blocks of the KV cache that the request held, times seconds.
    """

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    recomputed_tokens: int
    steps: int
    draft_tokens: int = 0
    accepted_tokens: int = 0
    device_seconds: float
    kv_block_seconds: float


_HEADERS = tuple(
    f"x-tessera-{field.replace('_', '-')}".encode() for field in RequestUsage.__struct_fields__
)


def usage_headers(usage: RequestUsage) -> Headers:
    """Render a request's usage as response headers."""
    values = msgspec.structs.astuple(usage)
    return [header(name, value) for name, value in zip(_HEADERS, values, strict=True)]
