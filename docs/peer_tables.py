"""The tables of docs/coming-from.md: settings, routes and metrics of Tessera beside those of other servers.

Flags of others come from `server.cli.peers`. Their routes are data, from their documents of November 2026: vLLM 0.32,
TGI 3.3.6, llama.cpp (tools/server/README.md) and Ollama (docs/api.md). What Tessera has comes from the code: a route
that both have is marked, the service must answer any other with a route of the same row, and every metric that is
exported under vLLM's or TGI's name must be in the table.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from docs.parameter_table import application
from server.cli.peers.answers import Peer
from server.cli.peers.llama_cpp import LLAMA_CPP
from server.cli.peers.ollama import OLLAMA
from server.cli.peers.tgi import TGI
from server.cli.peers.vllm import VLLM
from server.cli.settings import flag, listed_settings
from server.http.metrics import own, tgi, vllm
from server.http.unknown_routes.answer import UnknownRoutes


class Setting(NamedTuple):
    """Settings for one purpose, and what comes near in other servers beside the flags that are understood as these."""

    purpose: str
    names: tuple[str, ...]
    vllm: str = ""
    tgi: str = ""
    llama_cpp: str = ""
    ollama: str = ""


class Routes(NamedTuple):
    """Routes for one purpose, separated by spaces; empty where there is none. With `!` they have another body here."""

    purpose: str
    tessera: str
    vllm: str = ""
    tgi: str = ""
    llama_cpp: str = ""
    ollama: str = ""


class Metric(NamedTuple):
    """Metrics with the same number; names separated by spaces, without the suffixes of their kinds."""

    purpose: str
    tessera: str = ""
    vllm: str = ""
    tgi: str = ""


SETTINGS: Final = (
    Setting("the model", ("model",), ollama="`ollama run NAME`"),
    Setting("address", ("host", "port"), ollama="`OLLAMA_HOST`"),
    Setting(
        "longest sequence, prompt and output",
        ("max_model_len",),
        ollama="`OLLAMA_CONTEXT_LENGTH`, `num_ctx`",
    ),
    Setting("sequences in a step", ("max_num_seqs",), ollama="`OLLAMA_NUM_PARALLEL`"),
    Setting("sequences before 429", ("max_concurrent_requests",), ollama="`OLLAMA_MAX_QUEUE`"),
    Setting("memory of the KV cache", ("kv_cache_gib", "kv_cache_tokens")),
    Setting("share of a GPU's memory for all", ("gpu_memory_utilization",)),
    Setting(
        "its dtype",
        ("kv_cache_dtype",),
        llama_cpp="`--cache-type-k`, `--cache-type-v`",
        ollama="`OLLAMA_KV_CACHE_TYPE`",
    ),
    Setting(
        "weights of fewer bits",
        ("quantization",),
        llama_cpp="the model's file",
        ollama="the model's tag",
    ),
    Setting(
        "GPUs for one model", ("tensor_parallel",), llama_cpp="`--split-mode`, `--tensor-split`"
    ),
    Setting("a copy of the model on each GPU", ("data_parallel",), tgi="several services"),
    Setting("CPU or GPU", ("device",), ollama="`num_gpu`"),
    Setting("keys", ("api_key", "api_key_file")),
    Setting("pages of other origins", ("cors_allow_origin",), ollama="`OLLAMA_ORIGINS`"),
    Setting(
        "calls of tools, which need no switch",
        ("tool_call_format",),
        vllm="`--enable-auto-tool-choice`",
        llama_cpp="`--jinja`",
    ),
)
ROUTES: Final = (
    Routes(
        "continue a prompt",
        "POST:/generate POST:/generate_stream POST:/v1/completions",
        "POST:/v1/completions",
        "POST:/ POST:/generate POST:/generate_stream POST:/v1/completions",
        "POST:/completion POST:/v1/completions",
        "POST:/api/generate POST:/v1/completions",
    ),
    Routes(
        "continue a conversation",
        "POST:/v1/chat/completions POST:/v1/responses POST:/v1/messages",
        "POST:/v1/chat/completions POST:/v1/responses POST:/v1/messages",
        "POST:/v1/chat/completions",
        "POST:/v1/chat/completions POST:/v1/responses POST:/v1/messages",
        "POST:/api/chat POST:/v1/chat/completions POST:/v1/responses POST:/v1/messages",
    ),
    Routes(
        "fill in the middle",
        "POST:/v1/completions",
        "",
        "",
        "POST:/infill",
        "POST:/api/generate POST:/v1/completions",
    ),
    Routes(
        "count the tokens of a conversation",
        "POST:/v1/messages/count_tokens",
        "POST:/v1/messages/count_tokens",
        "",
        "POST:/v1/messages/count_tokens",
    ),
    Routes("end a request", "POST:/abort"),
    Routes(
        "tokens of a text",
        "POST:/tokenize POST:/detokenize",
        "POST:/tokenize POST:/detokenize",
        "POST:/tokenize",
        "POST:/tokenize! POST:/detokenize!",
    ),
    Routes(
        "the prompt of a conversation",
        "POST:/chat_tokenize POST:/tokenize",
        "POST:/tokenize",
        "POST:/chat_tokenize",
        "POST:/apply-template",
    ),
    Routes(
        "names of models",
        "GET:/v1/models",
        "GET:/v1/models",
        "GET:/v1/models",
        "GET:/v1/models GET:/models",
        "GET:/api/tags GET:/v1/models",
    ),
    Routes(
        "the model and its limits",
        "GET:/info",
        "GET:/v1/models",
        "GET:/info",
        "GET:/props",
        "POST:/api/show",
    ),
    Routes("the kernels that run", "GET:/plan"),
    Routes(
        "health",
        "GET:/health GET:/health/ready GET:/health/live GET:/ping",
        "GET:/health GET:/ping",
        "GET:/health GET:/ping",
        "GET:/health GET:/v1/health",
        "GET:/",
    ),
    Routes(
        "load and version",
        "GET:/load GET:/version",
        "GET:/load GET:/version",
        "GET:/info",
        "GET:/slots",
        "GET:/api/ps GET:/api/version",
    ),
    Routes("Prometheus", "GET:/metrics", "GET:/metrics", "GET:/metrics", "GET:/metrics"),
    Routes("a page to try it", "GET:/", "", "", "GET:/"),
    Routes(
        "documents of the API",
        "GET:/docs GET:/openapi.json",
        "GET:/docs GET:/openapi.json",
        "GET:/docs",
    ),
    Routes(
        "Amazon SageMaker",
        "POST:/invocations GET:/ping",
        "POST:/invocations GET:/ping",
        "POST:/invocations GET:/ping",
    ),
    Routes(
        "embeddings, scores, ranking: not here",
        "",
        "POST:/v1/embeddings POST:/v1/score POST:/v1/rerank",
        "",
        "POST:/v1/embeddings POST:/v1/rerank",
        "POST:/api/embed POST:/v1/embeddings",
    ),
    Routes(
        "adapters",
        "POST:/v1/load_lora_adapter POST:/v1/unload_lora_adapter",
        "POST:/v1/load_lora_adapter POST:/v1/unload_lora_adapter",
        "",
        "GET:/lora-adapters",
    ),
    Routes(
        "models that are loaded on request: not here",
        "",
        "",
        "",
        "POST:/models/load",
        "POST:/api/pull",
    ),
)
METRICS: Final = (
    Metric(
        "sequences in the batch",
        "tessera_requests_running",
        "vllm:num_requests_running",
        "tgi_batch_current_size",
    ),
    Metric(
        "sequences in the queue",
        "tessera_requests_waiting",
        "vllm:num_requests_waiting",
        "tgi_queue_size",
    ),
    Metric(
        "tokens of the batch at its limits",
        "tessera_reserved_tokens",
        "",
        "tgi_batch_current_max_tokens",
    ),
    Metric(
        "share of the KV cache in use",
        "tessera_kv_cache_usage_ratio",
        "vllm:kv_cache_usage_perc vllm:gpu_cache_usage_perc",
    ),
    Metric(
        "size of the KV cache",
        "tessera_cache_config tessera_kv_blocks",
        "vllm:cache_config_info",
        "tgi_batch_max_total_tokens",
    ),
    Metric(
        "prompt tokens looked up in the prefix cache",
        "tessera_prefix_cache_query_tokens",
        "vllm:prefix_cache_queries vllm:gpu_prefix_cache_queries",
    ),
    Metric(
        "prompt tokens found there",
        "tessera_prefix_cache_hit_tokens",
        "vllm:prefix_cache_hits vllm:gpu_prefix_cache_hits vllm:prompt_tokens_cached vllm:prompt_tokens_by_source",
    ),
    Metric(
        "adapters in use and waited for, and their loads",
        "tessera_adapter_loads tessera_adapter_reads tessera_adapter_evictions",
        "vllm:lora_requests_info",
    ),
    Metric("preemptions", "tessera_preemptions", "vllm:num_preemptions"),
    Metric("prompt tokens", "tessera_prompt_tokens", "vllm:prompt_tokens"),
    Metric("generated tokens", "tessera_generation_tokens", "vllm:generation_tokens"),
    Metric(
        "drafts",
        "tessera_drafts tessera_draft_tokens tessera_draft_accepted_tokens",
        "vllm:spec_decode_num_drafts vllm:spec_decode_num_draft_tokens "
        "vllm:spec_decode_num_accepted_tokens vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    Metric(
        "requests, by how they ended",
        "tessera_requests",
        "vllm:request_success",
        "tgi_request_count tgi_request_success tgi_request_failure",
    ),
    Metric(
        "time to the first token",
        "tessera_time_to_first_token_seconds",
        "vllm:time_to_first_token_seconds",
    ),
    Metric(
        "time between tokens",
        "tessera_inter_token_latency_seconds",
        "vllm:inter_token_latency_seconds vllm:time_per_output_token_seconds",
    ),
    Metric(
        "time per token of a request",
        "tessera_request_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "tgi_request_mean_time_per_token_duration",
    ),
    Metric(
        "whole request",
        "tessera_request_duration_seconds",
        "vllm:e2e_request_latency_seconds",
        "tgi_request_duration",
    ),
    Metric(
        "until it is in the queue",
        "tessera_request_validation_seconds",
        "",
        "tgi_request_validation_duration",
    ),
    Metric(
        "in the queue",
        "tessera_request_queue_seconds",
        "vllm:request_queue_time_seconds",
        "tgi_request_queue_duration",
    ),
    Metric("prefill", "tessera_request_prefill_seconds", "vllm:request_prefill_time_seconds"),
    Metric("decode", "tessera_request_decode_seconds", "vllm:request_decode_time_seconds"),
    Metric(
        "both",
        "tessera_request_inference_seconds",
        "vllm:request_inference_time_seconds",
        "tgi_request_inference_duration",
    ),
    Metric(
        "length of prompts",
        "tessera_request_prompt_tokens",
        "vllm:request_prompt_tokens",
        "tgi_request_input_length",
    ),
    Metric(
        "length of outputs",
        "tessera_request_generated_tokens",
        "vllm:request_generation_tokens vllm:request_max_num_generation_tokens",
        "tgi_request_generated_tokens",
    ),
    Metric(
        "limit of outputs",
        "tessera_request_max_new_tokens",
        "vllm:request_params_max_tokens",
        "tgi_request_max_new_tokens",
    ),
    Metric(
        "steps of the engine",
        "tessera_step_duration_seconds tessera_engine_steps",
        "",
        "tgi_batch_inference_duration tgi_batch_forward_duration tgi_batch_inference_count",
    ),
    Metric(
        "parts that Tessera's steps do not have: always 0",
        "",
        "",
        "tgi_batch_decode_duration tgi_batch_filter_duration tgi_batch_concat_duration tgi_batch_concat "
        "tgi_request_skipped_tokens",
    ),
)


def settings_table() -> str:
    """Return the table of settings.

    Raises:
        ValueError: there is no such setting, or another server has no such flag or variable.
    """
    known = listed_settings()
    lines = ["| for | Tessera | vLLM | TGI | llama.cpp | Ollama |", "|---|---|---|---|---|---|"]
    for row in SETTINGS:
        if missing := set(row.names) - set(known):
            raise ValueError(f"no setting {', '.join(sorted(missing))}")
        names = ", ".join(f"`{flag(name)}`" for name in row.names)
        beside = (VLLM, row.vllm), (TGI, row.tgi), (LLAMA_CPP, row.llama_cpp), (OLLAMA, row.ollama)
        cells = (_flags_of(peer, row.names, near) for peer, near in beside)
        lines.append(_row(row.purpose, names, *cells))
    return "\n".join(lines)


def _flags_of(peer: Peer, settings: tuple[str, ...], near: str) -> str:
    """Return the first flag of each row of a peer that is understood as one of the settings, and what comes near.

    Raises:
        ValueError: the peer has no flag or variable that `near` names.
    """
    known = {name for row in peer.rows for name in (row.flags + " " + row.variables).split()}
    if missing := set(re.findall(r"`(--[^`]+|[A-Z_]{3,})`", near)) - known:
        raise ValueError(f"{peer.name} has no {', '.join(sorted(missing))}")
    flags = [
        f"`{row.flags.split()[0]}`"
        for name in settings
        for row in peer.rows
        if row.setting == name and row.flags
    ]
    return "; ".join(filter(None, (", ".join(flags), near)))


def routes_table() -> str:
    """Return the table of routes, with a mark at those of other servers that Tessera has too.

    Raises:
        ValueError: Tessera has no such route, or answers a route of another server with none of the same purpose.
    """
    routes = application().routes
    served = {
        (method, getattr(route, "path", ""))
        for route in routes
        for method in getattr(route, "methods", None) or ()
    }
    paths = {path for _, path in served}
    unknown = UnknownRoutes(routes)

    def mark(route: str, tessera: str) -> str:
        method, path = route.rstrip("!").split(":", 1)
        known = (method, path) in served
        if path not in paths:
            answer = unknown.message(path)
            named = [f" {it.split(':', 1)[1]}" for it in tessera.split()] or ["out of scope"]
            if "the nearest first" in answer or not any(it in answer for it in named):
                raise ValueError(f"{route} is answered with: {answer}")
        return f"`{method} {path}`" + (" (other body)" if route.endswith("!") else " ✓" * known)

    def cell(routes: str) -> str:
        return ", ".join(f"`{route.replace(':', ' ', 1)}`" for route in routes.split())

    lines = ["| for | Tessera | vLLM | TGI | llama.cpp | Ollama |", "|---|---|---|---|---|---|"]
    for row in ROUTES:
        if missing := [it for it in row.tessera.split() if tuple(it.split(":", 1)) not in served]:
            raise ValueError(f"no route {', '.join(missing)}")
        columns = (row.vllm, row.tgi, row.llama_cpp, row.ollama)
        peers = (", ".join(mark(it, row.tessera) for it in column.split()) for column in columns)
        lines.append(_row(row.purpose, cell(row.tessera), *peers))
    return "\n".join(lines)


def metrics_table() -> str:
    """Return the table of metrics with the same number.

    Raises:
        ValueError: a metric does not exist, or one under a name of another server is not in the table.
    """
    for column, rows in (("vllm", vllm.ROWS), ("tgi", tgi.ROWS)):
        listed = [name for row in METRICS for name in getattr(row, column).split()]
        if sorted(listed) != sorted(row.name for row in rows):
            differing = sorted({*listed} ^ {row.name for row in rows})
            raise ValueError(f"metrics of {column}: {', '.join(differing) or 'listed twice'}")
    ours = {row.name for row in own.ROWS}
    if missing := {name for row in METRICS for name in row.tessera.split()} - ours:
        raise ValueError(f"no metric {', '.join(sorted(missing))}")
    lines = ["| number | Tessera | as vLLM | as TGI |", "|---|---|---|---|"]
    for metric in METRICS:
        names = (metric.tessera, metric.vllm, metric.tgi)
        cells = (", ".join(f"`{name}`" for name in cell.split()) for cell in names)
        lines.append(_row(metric.purpose, *cells))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
