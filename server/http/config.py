"""The limits and intervals of the HTTP layer, fixed when the application is created."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from model.sampling.parameters import SamplingDefaults
from model.text.tokens.end_token import EndToken
from server.http.adapters.loaded import AdapterBase, LoadedAdapter
from server.http.edge.key_limits import KeyLimits
from server.setting import Form, Setting

_ORIGIN = Form(
    r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:-]+",
    "is not an origin: it must be * or a scheme, a host and possibly a port, such as https://example.com:8443, without "
    "a path",
)
_HOST = Form(
    r"\*|(\*\.)?[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]",
    "is not a host: it must be a name, *. and a name, an IPv4 address, an IPv6 address in brackets, or *, without a "
    "scheme and a port",
)
_ADDRESS = Form(
    r"https?://[^\s/?#]+(/[^\s?#]*)?",
    "is not the address of a collector: it must begin with http:// or https://, such as http://localhost:4318",
)


_ADAPTER = Form(
    r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?=.+",
    "is not an adapter: it must be a name of letters, digits, '_', '.' and '-', then = and a path, such as "
    "sql=/adapters/sql",
)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class HTTPSettings:
    """The part of the service's settings that the HTTP layer reads. Help texts and documents show the descriptions.

    Attributes:
        chat_template: file with a chat template in Jinja, or the template itself; default: the checkpoint's.
        tool_call_format: format in which the model writes calls of tools; auto finds it by the chat template, or takes
            hermes.
        served_model_name: name of the model in the OpenAI API; several by repeating the flag or separated by commas, of
            which replies have the first; default: --model.
        lora_modules: adapter of the model, name=path with its folder or a repository of the Hub; several by repeating
            the flag or separated by commas; requests choose it by its name in place of the model's.
        lora_folder: folder whose folders are adapters, named after them and read when a request chooses one.
        max_concurrent_requests: limit of requests in progress; more are refused with 429; default: twice --max-num-seqs
            on a CPU, 16 times on a GPU.
        max_queue_seconds: a request that would wait longer in the queue, by the measured rates, is refused with 429.
        max_queued_tokens: limit of the prompt tokens in the queue; more are refused with 429; default: no limit.
        max_connections: limit of open connections of one front end, of which addresses have equal shares; at the limit
            a new connection takes the place of one that waits for its next request, or of one of the address that has
            the most; default: 8192, or 128 fewer than the limit of open files.
        header_timeout: seconds in which a new connection must send its first request, and in which a request's header
            fields must arrive.
        keep_alive_timeout: seconds after which a connection without requests is closed; should be longer than a proxy
            in front keeps its connections.
        max_header_bytes: limit of the header fields of a request, in bytes.
        max_body_bytes: largest request body, in bytes.
        max_buffered_body_bytes: bytes of all request bodies that a front end reads or tokenizes at a time; more are
            refused with 429; the first 64 KiB of each body do not count.
        api_key: key that requests must have, as Authorization: Bearer KEY or X-API-Key: KEY; several by repeating the
            flag or separated by commas; without a key the service is open to all; other users of the machine can see
            flags, so prefer the variable or --api-key-file.
        prefix_cache_sharing: key: a request shares cached prefixes only with requests of the same API key, so that no
            key can find out by its speed what another has sent; all: with all requests.
        cors_allow_origin: origin, such as https://example.com, whose pages may use the service from a browser; several
            as with --api-key; * for all; without one no CORS headers are sent.
        allowed_hosts: host names that requests may have in Host, without a port; several as with --api-key;
            *.example.com for all subdomains, * for any; default: any, but only those of this machine if the service
            listens on a loopback address and has no API key.
        access_log: log a line for each request; those of probes (/health, /ping, /metrics) at level debug.
        otlp_endpoint: address of an OpenTelemetry collector, such as http://localhost:4318, which receives a trace of
            each generation request over OTLP/HTTP; needs the extra otel.
        strict_fields: refuse unknown fields of the OpenAI API instead of reporting that they have no effect.
        restart_wait: seconds for which requests wait for an engine that is being started again; then, or at once with
            0, they get 503.
        drain_delay: seconds for which requests are still served after SIGTERM or SIGINT, while health checks already
            fail: set it to the time that a load balancer needs to notice.
        drain_timeout: seconds after that for which requests in progress may run, while new ones get 503; those that are
            left get an error. A second signal ends both times.
    """

    chat_template: Annotated[str | None, Setting("model")] = None
    tool_call_format: Annotated[
        Literal["auto", "hermes", "qwen3-coder", "llama3", "mistral", "mistral-args"],
        Setting("model"),
    ] = "auto"
    served_model_name: Annotated[tuple[str, ...], Setting("model")] = ()
    lora_modules: Annotated[tuple[str, ...], Setting("model", form=_ADAPTER)] = ()
    lora_folder: Annotated[str | None, Setting("model")] = None
    # A request with `best_of` counts as that many.
    max_concurrent_requests: Annotated[int | None, Setting(ge=1)] = None
    max_queue_seconds: Annotated[float, Setting(gt=0)] = 60.0
    max_queued_tokens: Annotated[int | None, Setting(ge=1)] = None
    max_connections: Annotated[int | None, Setting(ge=1)] = None
    header_timeout: Annotated[float, Setting(gt=0)] = 10.0
    # Longer than the 60 s for which many proxies keep connections: they close them first.
    keep_alive_timeout: Annotated[float, Setting(gt=0)] = 75.0
    # A request's trailers and extensions of chunks have the same limit.
    max_header_bytes: Annotated[int, Setting(ge=1024)] = 32_768
    max_body_bytes: Annotated[int, Setting(ge=1024)] = 2_000_000
    # Tokens of replies of /tokenize count too, and a body until its prompt is submitted to the engine.
    max_buffered_body_bytes: Annotated[int, Setting(ge=1024)] = 64 << 20
    api_key: Annotated[tuple[str, ...], Setting(secret=True, restricts=True)] = field(
        default=(), repr=False
    )
    prefix_cache_sharing: Literal["key", "all"] = "key"
    cors_allow_origin: Annotated[tuple[str, ...], Setting(form=_ORIGIN, restricts=True)] = ()
    allowed_hosts: Annotated[tuple[str, ...], Setting(form=_HOST, restricts=True)] = ()
    access_log: bool = True
    otlp_endpoint: Annotated[str | None, Setting("process", form=_ADDRESS)] = None
    strict_fields: bool = False
    restart_wait: Annotated[float, Setting(ge=0)] = 10.0
    drain_delay: Annotated[float, Setting(ge=0)] = 0.0
    drain_timeout: Annotated[float, Setting(ge=0)] = 30.0


@dataclass(frozen=True, kw_only=True)
class HTTPConfig(HTTPSettings):
    """Configuration of the HTTP layer: its settings, fixed limits, and what the service knows of the model.

    Some settings are resolved: `chat_template` is the source of the template, `api_key` has the keys of the file too,
    and `allowed_hosts` is empty for any.

    Attributes:
        key_limits: limits of the API keys that have any.
        adapters: those of `lora_modules`.
        lora_base: what adapters are checked against; None if the service takes none.
        max_loras: see `EngineSettings`, resolved.
        checkpoint: folder or file of the served weights, for their digest; empty if they are random.
        model_id: the name the operator gave the model; the only text from outside that becomes a metric label.
        eos_token_ids: the model's own end tokens.
        end_tokens: the same, with the files that name them.
        vocab_size: number of the model's logits; 0 if it is not known.
        sampling_defaults: sampling parameters of the checkpoint, in dialects where requests that set none take them.
        continues_text: whether the model is made to continue text, although it has a chat template.
        max_best_of: sequences that one request may ask for.
        max_stop_sequences: stop strings of one request.
        max_stop_characters: length of one stop string.
        max_stop_token_ids: stop token ids of one request.
        max_top_n_tokens: alternatives reported at each position.
        max_client_batch_size: prompts in one request; only reported by /info, since TGI's routes take one.
        max_header_count: header fields of a request.
        max_url_bytes: path and query of a request.
        body_timeout_seconds: a body that takes longer to arrive is refused with 408.
        validation_workers: threads that tokenize.
        inline_characters: prompts of up to this length are tokenized on the event loop, longer ones in a
            thread. 1,000 characters take 0.16 ms in a tight loop and 0.6 to 0.9 ms between the tokens of a
            stream; switching to a thread takes 0.05 ms (byte-level BPE, EPYC Zen 4).
        keep_alive_seconds: a stream without events for this long gets a comment, so that proxies do not close it.
        send_timeout_seconds: a client that accepts no bytes of a response for this long is disconnected.
    """

    key_limits: dict[str, KeyLimits] = field(default_factory=dict, repr=False)
    model_id: str
    checkpoint: str = ""
    adapters: tuple[LoadedAdapter, ...] = ()
    lora_base: AdapterBase | None = None
    max_loras: int = 0
    eos_token_ids: tuple[int, ...] = ()
    end_tokens: tuple[EndToken, ...] = ()
    vocab_size: int = 0
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    continues_text: bool = False
    max_best_of: int = 2
    max_stop_sequences: int = 4
    max_stop_characters: int = 1_000
    max_stop_token_ids: int = 64
    max_top_n_tokens: int = 5
    max_client_batch_size: int = 4
    max_header_count: int = 100
    max_url_bytes: int = 1 << 13
    body_timeout_seconds: float = 30.0
    validation_workers: int = 2
    inline_characters: int = 1_000
    keep_alive_seconds: float = 15.0
    send_timeout_seconds: float = 30.0


def served_names(config: HTTPConfig) -> tuple[str, ...]:
    """Return the names of the served model; the first is the one in replies."""
    return config.served_model_name or (config.model_id,)
