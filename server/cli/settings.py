"""The settings of the service, with flag, environment variable, default and description.

No other module reads the environment.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from model.device.quantizations import QuantizationSetting

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_PREFIX = "TESSERA_"
MAX_ENGINES = 64
# For a Service named `tessera` or `tessera-...`, Kubernetes sets these in every pod of the namespace.
_KUBERNETES = re.compile(
    r"(_\w+)?(_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)"
)
_is_number = re.compile(r"[0-9]{1,9}").fullmatch
_is_key = re.compile(r"[!-+\--~]+").fullmatch  # visible ASCII without the comma
_is_http_address = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?").fullmatch
_is_origin = re.compile(r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9.\[\]:-]+").fullmatch
_is_host = re.compile(r"\*|(\*\.)?[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]").fullmatch


class Settings(BaseModel):
    """The settings of the service.

    Every flag can also be given as an environment variable: --max-model-len is TESSERA_MAX_MODEL_LEN. A flag overrides
    the environment. `server.cli.command_settings` reads both.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(
        "bundled",
        description="checkpoint folder, Hugging Face model id such as Qwen/Qwen3-0.6B, or 'bundled' for the included "
        "code model; may also be given without --model",
    )
    revision: str | None = Field(
        None, description="branch, tag or commit of a Hugging Face model id"
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="auto takes the sampling parameters that a request to the OpenAI API does not set from the "
        "checkpoint's generation_config.json, none from the service's own defaults",
    )
    chat_template: str | None = Field(
        None,
        description="file with a chat template in Jinja, or the template itself; default: the checkpoint's",
    )
    tool_call_format: Literal[
        "auto", "hermes", "qwen3-coder", "llama3", "mistral", "mistral-args"
    ] = Field(
        "auto",
        description="format in which the model writes calls of tools; auto finds it by the chat template, or takes "
        "hermes",
    )
    served_model_name: tuple[str, ...] = Field(
        (),
        description="name of the model in the OpenAI API; several by repeating the flag or separated by commas, "
        "of which replies have the first; default: --model",
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all interfaces")
    port: int = Field(
        8000, ge=0, le=65535, description="TCP port to listen on; 0 chooses a free one"
    )
    frontends: int | None = Field(
        None,
        ge=1,
        le=64,
        description="processes that share the port and the work of HTTP, tokenizing and streaming; one process streams "
        "about 50,000 tokens per second; default: with a GPU one per 4 usable logical processors, at most 4, plus 2 "
        "for each further engine; else 1",
    )
    data_parallel: int | None = Field(
        1,
        ge=1,
        le=MAX_ENGINES,
        description="engine processes, each with the whole model, that share the requests: each has a GPU of its own, "
        "or on a CPU a share of the cores; auto is the number of GPUs that CUDA_VISIBLE_DEVICES allows, or 1. Limits "
        "of memory and steps, such as --max-num-seqs, are those of each engine",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto uses a GPU if there is one, the first that CUDA_VISIBLE_DEVICES allows",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of the weights, and of the KV cache unless --kv-cache-dtype sets it; auto uses the "
        "checkpoint's dtype on a GPU and the faster one on a CPU",
    )
    quantization: QuantizationSetting = Field(
        "auto",
        description="of the weights when they are loaded. On a CPU int8 and int4: all matrices in 8 or 4 bits; auto is "
        "int8 there, unless --dtype is set or the model is not supported. On a GPU fp8: the layers' weights in "
        "float8_e4m3fn with a scale per output, half the memory, and faster steps from sm_89 on, not below sm_80; "
        "auto is none there",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="dummy generates random weights from config.json, to measure speed without a checkpoint",
    )
    compiled_kernels: str | None = Field(
        None,
        description="folder of kernels that `tessera warmup --arch` compiled; only read, those that it lacks are "
        "compiled into Triton's own cache",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="limit of prompt and output tokens of a sequence; default: the model's own limit",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="limit of sequences that run at the same time; default: 64 on a CPU, 256 on a GPU",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="limit of tokens computed in one step; longer prompts are computed in chunks; default: 512 on a "
        "CPU, 1024 on a GPU, and at least twice --max-num-seqs",
    )
    max_prefill_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="the same limit for steps in which no sequence decodes, at least --max-num-batched-tokens; "
        "default: --max-num-batched-tokens if that is given and on a CPU, otherwise what the GPU computes in 15 ms at "
        "its peak, up to 8192",
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in a block of the KV cache")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="auto stores keys and values in --dtype, with int8 and int4 weights in float16; fp8 in "
        "float8_e4m3fn with a scale per vector, which takes about half the memory and is "
        "efficient on GPUs from sm_89 on",
    )
    kv_cache_tokens: int | None = Field(
        None,
        ge=1,
        description="capacity of the KV cache in tokens; default: as much as --max-num-seqs requests can fill, and at "
        "most 80 % of a GPU's free memory or 25 % of a CPU's",
    )
    kv_cache_gib: float | None = Field(
        None,
        gt=0,
        le=1 << 20,
        allow_inf_nan=False,
        description="capacity of the KV cache in GiB, instead of --kv-cache-tokens",
    )
    cuda_graphs: bool = Field(
        True,
        description="on a GPU, record steps and replay each with one launch instead of hundreds",
    )
    overlap: bool = Field(
        True,
        description="on a GPU, schedule and launch a step while the previous one is computed",
    )
    enable_prefix_caching: bool = Field(
        True, description="keep computed blocks for later prompts with the same prefix"
    )
    deterministic: bool = Field(
        False,
        description="give the tokens and log-probabilities of all requests, not only of those with the field "
        "`deterministic`, the same bits whatever else the service computes; free on a CPU with int8 or int4 weights, "
        "slower on a GPU",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="number of GPUs that share the model, each with a part of every layer; a divisor of the model's "
        "key-value heads",
    )
    unmeasured_kernels: bool = Field(
        False,
        description="allow kernels where they were not measured: `blackwell_prefill` on sm_100 and sm_103 and decoding "
        "one sequence in one launch on sm_100 to sm_121, which no GPU has run; on sm_90 `hopper_keys_on_m_decode` for "
        "other head dims than 64 or more than 8 query heads for each key-value head; compare answers and speed before "
        "you rely on them",
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of a forward pass on the CPU; default: one per usable physical core, at most the usable "
        "logical processors less one",
    )
    max_concurrent_requests: int | None = Field(
        None,
        ge=1,
        description="limit of requests in progress; more are refused with 429; default: twice --max-num-seqs on a CPU, "
        "16 times on a GPU",
    )
    max_queue_seconds: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="a request that would wait longer in the queue, by the measured rates, is refused with 429",
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="limit of the prompt tokens in the queue; more are refused with 429; default: no limit",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="limit of open connections of one front end; at the limit a new connection takes the place of the "
        "one that has waited longest for its next request; default: 8192, or 128 fewer than the limit of open files",
    )
    header_timeout: float = Field(
        10.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds in which a new connection must send its first request, and in which a request's header "
        "fields must arrive",
    )
    keep_alive_timeout: float = Field(
        75.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds after which a connection without requests is closed; should be longer than a proxy in "
        "front keeps its connections",
    )
    max_header_bytes: int = Field(
        32_768, ge=1024, description="limit of the header fields of a request, in bytes"
    )
    max_body_bytes: int = Field(2_000_000, ge=1024, description="largest request body, in bytes")
    max_buffered_body_bytes: int = Field(
        64 << 20,
        ge=1024,
        description="bytes of all request bodies that a front end reads or tokenizes at a time; more are refused with "
        "429; the first 64 KiB of each body do not count",
    )
    api_key: tuple[str, ...] = Field(
        (),
        repr=False,
        description="key that requests must have, as Authorization: Bearer KEY or X-API-Key: KEY; several by repeating "
        "the flag or separated by commas; without a key the service is open to all; other users of the machine can see "
        "flags, so prefer the variable or --api-key-file",
    )
    api_key_file: Path | None = Field(
        None,
        description="file of further keys, one on each line; empty lines and lines that begin with # are ignored",
    )
    prefix_cache_sharing: Literal["key", "all"] = Field(
        "key",
        description="key: a request shares cached prefixes only with requests of the same API key, so that no key can "
        "find out by its speed what another has sent; all: with all requests",
    )
    cors_allow_origin: tuple[str, ...] = Field(
        (),
        description="origin, such as https://example.com, whose pages may use the service from a browser; several as "
        "with --api-key; * for all; without one no CORS headers are sent",
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="host names that requests may have in Host, without a port; several as with --api-key; "
        "*.example.com for all subdomains, * for any; default: any, but only those of this machine if the service "
        "listens on a loopback address and has no API key",
    )
    access_log: bool = Field(
        True,
        description="log a line for each request; those of probes (/health, /ping, /metrics) at level debug",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="lines for people, or a JSON object per line"
    )
    otlp_endpoint: str | None = Field(
        None,
        description="address of an OpenTelemetry collector, such as http://localhost:4318, which receives a trace of "
        "each generation request over OTLP/HTTP; needs the extra otel",
    )
    strict_fields: bool = Field(
        False,
        description="refuse unknown fields of the OpenAI API instead of reporting that they have no effect",
    )
    engine_hang_seconds: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds after which a silent engine, or one whose step does not end, is restarted; steps that are "
        "usually slow, loading and compiling have more time (docs/operations.md); also the limit of a front end that "
        "handles nothing",
    )
    restart_wait: float = Field(
        10.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds for which requests wait for an engine that is being started again; then, or at once with "
        "0, they get 503",
    )
    drain_delay: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds for which requests are still served after SIGTERM or SIGINT, while health checks already "
        "fail: set it to the time that a load balancer needs to notice",
    )
    drain_timeout: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds after that for which requests in progress may run, while new ones get 503; those that are "
        "left get an error. A second signal ends both times",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of messages to log"
    )
    ignore_unknown_env: bool = Field(
        False,
        description="start although an environment variable that begins with TESSERA_ is not one of a setting",
    )

    @field_validator("data_parallel", mode="before")
    @classmethod
    def _engines_are_counted_or_automatic(cls, value: object) -> object:
        if value == "auto":
            return None
        if not _is_number(str(value)) or not 1 <= int(str(value)) <= MAX_ENGINES:
            raise PydanticCustomError(
                "data_parallel",
                "it must be a whole number from 1 to {most}, or auto",
                {"most": MAX_ENGINES},
            )
        return value

    @field_validator("api_key")
    @classmethod
    def _keys_fit_in_a_header(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return check_keys(keys)

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint_is_an_address(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and not _is_http_address(endpoint):
            raise PydanticCustomError(
                "endpoint",
                "{endpoint} is not the address of a collector: it must begin with http:// or https://, such as "
                "http://localhost:4318",
                {"endpoint": repr(endpoint)},
            )
        return endpoint

    @field_validator("cors_allow_origin")
    @classmethod
    def _origins_have_no_path(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _is_origin(origin):
                raise PydanticCustomError(
                    "origin",
                    "{origin} is not an origin: it must be * or a scheme, a host and possibly a port, such as "
                    "https://example.com:8443, without a path",
                    {"origin": repr(origin)},
                )
        return origins

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_have_no_port(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _is_host(host):
                raise PydanticCustomError(
                    "host",
                    "{host} is not a host: it must be a name, *. and a name, an IPv4 address, an IPv6 address in "
                    "brackets, or *, without a scheme and a port",
                    {"host": repr(host)},
                )
        return hosts

    @model_validator(mode="after")
    def _budget_serves_every_sequence(self) -> Self:
        budget, prefill, sequences = (
            self.max_num_batched_tokens,
            self.max_prefill_tokens,
            self.max_num_seqs,
        )
        for name, tokens in (("max-num-batched-tokens", budget), ("max-prefill-tokens", prefill)):
            if tokens is not None and sequences is not None and tokens < sequences:
                raise PydanticCustomError(
                    "budget",
                    "--{name} {tokens} is less than --max-num-seqs {sequences}: "
                    "every running sequence needs a token of each step",
                    {"name": name, "tokens": tokens, "sequences": sequences},
                )
        if budget is not None and prefill is not None and prefill < budget:
            raise PydanticCustomError(
                "prefill_budget",
                "--max-prefill-tokens {prefill} is less than --max-num-batched-tokens {tokens}: "
                "a step without decoding sequences would have fewer tokens than one with them",
                {"prefill": prefill, "tokens": budget},
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_shared_in_one_way(self) -> Self:
        if self.data_parallel != 1 and self.tensor_parallel > 1:
            engines = "auto" if self.data_parallel is None else self.data_parallel
            raise PydanticCustomError(
                "parallel",
                "--data-parallel {engines} and --tensor-parallel {ranks} cannot be combined: "
                "start a service for each group of GPUs",
                {"engines": engines, "ranks": self.tensor_parallel},
            )
        return self

    @model_validator(mode="after")
    def _kv_cache_has_one_size(self) -> Self:
        if self.kv_cache_tokens is not None and self.kv_cache_gib is not None:
            raise PydanticCustomError(
                "kv_cache",
                "--kv-cache-tokens {tokens} and --kv-cache-gib {gib} both give the size of the KV cache: "
                "leave one out",
                {"tokens": self.kv_cache_tokens, "gib": self.kv_cache_gib},
            )
        return self


def read_environment(
    variables: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Read the environment variables that begin with TESSERA_; empty ones count as absent.

    Args:
        variables: to read from; None takes the environment of this process.

    Returns:
        The text of each setting that has a variable, and the names of variables that belong to no setting. Those that
        Kubernetes sets for a Service are not among them.
    """
    variables = os.environ if variables is None else variables
    values, unknown = {}, []
    for name, value in variables.items():
        if not name.upper().startswith(ENV_PREFIX) or not value:
            continue
        field = name[len(ENV_PREFIX) :].lower()
        if field in Settings.model_fields:
            values[field] = value
        elif not _is_of_kubernetes(name, value):
            unknown.append(name)
    return values, sorted(unknown)


def _is_of_kubernetes(name: str, value: str) -> bool:
    if name.endswith("_PORT") and value.startswith(("tcp://", "udp://")):
        return True
    return _KUBERNETES.fullmatch(name, len(ENV_PREFIX) - 1) is not None


def client_api_key() -> str | None:
    """Return the API key for requests to a service: the first in the variable that gives the service its keys."""
    return os.environ.get(ENV_PREFIX + "API_KEY", "").partition(",")[0].strip() or None


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return API keys unchanged.

    Raises:
        PydanticCustomError: a key could not be sent in a header. The message does not show it.
    """
    for number, key in enumerate(keys, 1):
        if not _is_key(key):
            raise PydanticCustomError(
                "api_key",
                "key {number} is empty or has characters other than visible ASCII without commas",
                {"number": number},
            )
    return keys


def environment_variable(field: str) -> str:
    """Return the name of a setting's environment variable."""
    return ENV_PREFIX + field.upper()


def flag(field: str) -> str:
    """Return a setting's command-line flag."""
    return "--" + field.replace("_", "-")
