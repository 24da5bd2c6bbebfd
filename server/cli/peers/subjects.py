"""What peers have and Tessera does not."""

from __future__ import annotations

from typing import Final, NamedTuple


class Subject(NamedTuple):
    """Something that Tessera does not have.

    Attributes:
        text: completes "Tessera has no ".
        advice: what to do instead; empty if there is nothing.
        matters: whether a service without it gives other answers, or is open to others, than the operator asked for.
            Then a variable that asks for it is refused as the flag is; other variables are only reported.
    """

    text: str
    advice: str = ""
    matters: bool = False


LORA: Final = Subject(
    "setting of adapters beside --lora-modules, --lora-folder, --max-loras, --max-lora-rank and --max-cpu-loras"
)
GGUF_ADAPTERS: Final = Subject(
    "adapters in GGUF files", "--lora-modules takes adapters of PEFT", matters=True
)
SPECULATION: Final = Subject("draft model, nor settings of drafts beside --max-draft-tokens")
MEDIA: Final = Subject("images, audio or video", matters=True)
POOLING: Final = Subject("embeddings, reranking or classification", matters=True)
TLS: Final = Subject("TLS", "put a proxy in front of it (docs/operations.md)", matters=True)
PATH_PREFIX: Final = Subject(
    "prefix of its routes", "let the proxy in front remove it", matters=True
)
CORS: Final = Subject("CORS setting except --cors-allow-origin", matters=True)
LISTENING: Final = Subject("other listener than HTTP on one TCP port", "--host and --port")
TUNNEL: Final = Subject("tunnel", matters=True)
PIPELINE: Final = Subject(
    "pipeline, context or expert parallelism", "--tensor-parallel or --data-parallel"
)
NODES: Final = Subject(
    "service over several machines of its own", "docs/operations.md describes replicas"
)
KV_TRANSFER: Final = Subject("transfer of the KV cache between services")
OFFLOAD: Final = Subject("offloading of weights or KV cache to another memory")
OTHER_LAYERS: Final = Subject("setting of layers without attention (Mamba, linear attention)")
ROPE: Final = Subject(
    "override of the rotary embedding", "change config.json of the checkpoint", matters=True
)
MODEL_OVERRIDE: Final = Subject(
    "override of the model's configuration", "change config.json of the checkpoint", matters=True
)
TOKENIZER: Final = Subject(
    "other tokenizer than the checkpoint's",
    "put its files into the folder of the model",
    matters=True,
)
SAMPLING: Final = Subject(
    "flag for sampling",
    "use fields of requests, or generation_config.json of the checkpoint",
    matters=True,
)
CONSTRAINT: Final = Subject(
    "constraint of all answers", "use the field response_format of requests", matters=True
)
STRUCTURED: Final = Subject("choice of the library for structured output, nor settings of it")
REASONING: Final = Subject("separation of reasoning from the answer", matters=True)
TEMPLATE_DEFAULTS: Final = Subject(
    "default argument of the chat template", "use a template with it: --chat-template", matters=True
)
TEMPLATES: Final = Subject("such choice of the prompt's format", "--chat-template", matters=True)
SERVER_TOOLS: Final = Subject("tools that the server runs itself", matters=True)
TOOLS: Final = Subject("plugin for calls of tools", "--tool-call-format", matters=True)
WATERMARK: Final = Subject("watermark", matters=True)
USER_CODE: Final = Subject("code of the user in its processes", matters=True)
ROUTES: Final = Subject("such route or field of replies", "docs/http.md lists those it has")
ROUTER: Final = Subject("service with several models", "start one service for each")
WEIGHT_UPDATES: Final = Subject("exchange of weights while it runs", "start the service again")
SLEEP: Final = Subject("sleep mode", "end the service")
GGUF: Final = Subject(
    "such source of a model",
    "name a repository, `repository:quantization` or `repository:file` of one with GGUF files, or a path",
    matters=True,
)
LOADING: Final = Subject("such setting of loading weights")
QUANTIZATION: Final = Subject(
    "such setting of quantization",
    "--quantization, or a checkpoint that is quantized already",
    matters=True,
)
KV_FORMATS: Final = Subject(
    "such setting of the KV cache's format", "--kv-cache-dtype", matters=True
)
CACHE_TUNING: Final = Subject("such setting of the prefix cache", "--enable-prefix-caching")
SCHEDULING: Final = Subject(
    "such setting of the scheduler",
    "--max-num-seqs, --max-num-batched-tokens and --max-prefill-tokens",
)
LIMITS: Final = Subject("such limit of requests", "docs/settings.md lists its limits")
COMPILATION: Final = Subject(
    "setting of compilation or of the sizes of CUDA graphs", "--cuda-graphs switches them off"
)
KERNELS: Final = Subject("choice of kernels", "`tessera plan` shows which run, and why")
PLACEMENT: Final = Subject("placement of threads, layers or memory", "--cpu-threads")
PROCESSES: Final = Subject("such setting of its processes")
LOGGING: Final = Subject("such setting of its log", "--log-level, --log-format and --access-log")
METRICS: Final = Subject("such setting of its metrics", "GET /metrics has them all")
DEBUGGING: Final = Subject("such means of debugging")
PAGE: Final = Subject("setting of its page")
COMMAND_LINE: Final = Subject(
    "such input on its command line", "`tessera complete` or `tessera chat`"
)
MODEL_SHORTCUTS: Final = Subject(
    "shortcut for this model", "name it: `tessera serve MODEL`", matters=True
)
TRAINING: Final = Subject("such setting for training by its answers", matters=True)
DIFFUSION: Final = Subject("diffusion of texts", matters=True)
OTHER: Final = Subject("such setting")
