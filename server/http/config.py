"""The limits and intervals of the HTTP layer, fixed when the application is created."""

from __future__ import annotations

import dataclasses
from typing import Literal

from model.checkpoint.generation_config import SamplingDefaults


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HTTPConfig:
    """Limits and intervals; `server.cli.serve` sets them from the settings and the model's configuration.

    Attributes:
        model_id: the name the operator gave the model; the only text from outside that becomes a
            metric label.
        served_model_names: names that requests may give the model; empty means `model_id`.
        strict_fields: whether unknown fields are refused in dialects that otherwise accept and report them.
        eos_token_ids: the model's own end tokens, from its configuration.
        sampling_defaults: sampling parameters of the checkpoint, in dialects where requests that set none take them.
        chat_template: source of a chat template that takes the place of the checkpoint's; None for that one.
        tool_call_format: name of the format of calls of tools (`model.text.tools.formats`); `auto` finds the
            checkpoint's.
        max_concurrent_requests: sequences in flight; further ones are refused with 429. A request with
            `best_of` counts as that many. None means a multiple of the engine's `max_num_seqs`.
        max_queue_seconds: a request is refused with 429 if it would wait longer before its computation begins.
        max_queued_tokens: a request is refused with 429 if prompts of more tokens would be queued; None for no limit.
        max_best_of: sequences that one request may ask for.
        max_stop_sequences: stop strings of one request.
        max_stop_characters: length of one stop string.
        max_stop_token_ids: stop token ids of one request.
        max_top_n_tokens: alternatives reported at each position.
        max_client_batch_size: prompts in one request; only reported by /info, since TGI's routes take one.
        max_body_bytes: largest request body.
        max_connections: connections of one front end. At the limit a new one takes the place of one that waits for its
            next request; if there is none, it is refused. None means 8,192, or fewer if the limit of descriptors is
            lower.
        max_header_bytes: header fields of a request, and separately its trailers and extensions of chunks.
        max_header_count: header fields of a request.
        max_url_bytes: path and query of a request.
        header_timeout_seconds: a new connection must send its first request within this time, and a head that has
            begun must be complete within it.
        keep_alive_timeout_seconds: a connection is closed after it has waited this long for its next request.
            Longer than the 60 s for which many proxies keep connections: they close them first.
        max_buffered_body_bytes: bytes of request bodies, and of tokens of replies of /tokenize, that this process holds
            at a time; requests that would exceed it are refused with 429. The first 64 KiB of each request do not
            count. A body counts until its prompt is submitted to the engine.
        body_timeout_seconds: a body that takes longer to arrive is refused with 408.
        validation_workers: threads that tokenize.
        inline_characters: prompts of up to this length are tokenized on the event loop, longer ones in a
            thread. 1,000 characters take 0.16 ms in a tight loop and 0.6 to 0.9 ms between the tokens of a
            stream; switching to a thread takes 0.05 ms (byte-level BPE, EPYC Zen 4).
        keep_alive_seconds: a stream without events for this long gets a comment, so that proxies do not
            close it.
        send_timeout_seconds: a client that accepts no bytes of a response for this long is disconnected.
        restart_wait_seconds: requests that arrive while the engine is being started again, and those that it has lost
            before their first token, wait for it this long; 0 refuses the first and ends the others.
        drain_delay_seconds: after a signal to end, requests are served for this long while health checks already fail.
        drain_timeout_seconds: then requests in progress may run for this long, while new ones are refused.
        api_keys: a request must have one of them; empty for a service open to all.
        prefix_cache_sharing: `key`: requests share cached prefixes only with those of the same API key; `all`: with
            all requests.
        cors_allow_origins: origins whose pages may read the answers, or "*" for all.
        allowed_hosts: a request's Host must be one of them; empty for any. `*.example.com` stands for subdomains.
        access_log: whether each request is logged.
        otlp_endpoint: address of an OpenTelemetry collector, which receives a span of each generation request; None
            for no traces.
    """

    model_id: str
    served_model_names: tuple[str, ...] = ()
    strict_fields: bool = False
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = dataclasses.field(default_factory=SamplingDefaults)
    chat_template: str | None = None
    tool_call_format: str = "auto"
    max_concurrent_requests: int | None = None
    max_queue_seconds: float = 60.0
    max_queued_tokens: int | None = None
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_stop_characters: int = 1_000
    max_stop_token_ids: int = 64
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    max_body_bytes: int = 2_000_000
    max_connections: int | None = None
    max_header_bytes: int = 1 << 15
    max_header_count: int = 100
    max_url_bytes: int = 1 << 13
    header_timeout_seconds: float = 10.0
    keep_alive_timeout_seconds: float = 75.0
    max_buffered_body_bytes: int = 64 << 20
    body_timeout_seconds: float = 30.0
    validation_workers: int = 2
    inline_characters: int = 1_000
    keep_alive_seconds: float = 15.0
    send_timeout_seconds: float = 30.0
    restart_wait_seconds: float = 10.0
    drain_delay_seconds: float = 0.0
    drain_timeout_seconds: float = 30.0
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    prefix_cache_sharing: Literal["key", "all"] = "key"
    cors_allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    access_log: bool = True
    otlp_endpoint: str | None = None
