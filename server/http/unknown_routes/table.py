"""Routes of other servers that this one does not have: which route does the same, or that none does. Data only."""

from __future__ import annotations

from typing import Final

SAME: Final[dict[str, tuple[str, str]]] = {
    # Ollama
    "/api/chat": ("Ollama", "/v1/chat/completions"),
    "/api/generate": ("Ollama", "/v1/completions"),
    "/api/ps": ("Ollama", "/load"),
    "/api/show": ("Ollama", "/info"),
    "/api/tags": ("Ollama", "/v1/models"),
    "/api/version": ("Ollama", "/version"),
    # llama.cpp
    "/apply-template": ("llama.cpp", "/chat_tokenize"),
    "/completion": ("llama.cpp", "/v1/completions"),
    "/infill": ("llama.cpp", "/v1/completions"),
    "/props": ("llama.cpp", "/info"),
    "/slots": ("llama.cpp", "/load"),
    # SGLang
    "/abort_request": ("SGLang", "/abort"),
    "/get_load": ("SGLang", "/load"),
    "/get_model_info": ("SGLang", "/info"),
    "/get_server_info": ("SGLang", "/info"),
    "/health_generate": ("SGLang", "/health"),
    "/model_info": ("SGLang", "/info"),
    "/v1/loads": ("SGLang", "/load"),
    # vLLM
    "/is_sleeping": ("vLLM", "/health"),
    "/server_info": ("vLLM", "/info"),
    "/tokenizer_info": ("vLLM", "/info"),
    # OpenAI and Anthropic, former names
    "/v1/complete": ("Anthropic's former API", "/v1/messages"),
    "/v1/edits": ("OpenAI's former API", "/v1/chat/completions"),
    # Others
    "/api/v1/model": ("KoboldCpp", "/info"),
    "/chat": ("other servers", "/v1/chat/completions"),
    "/predictions": ("other servers", "/generate"),
    "/redoc": ("FastAPI", "/docs"),
    "/status": ("other servers", "/health"),
    "/swagger": ("other servers", "/docs"),
    "/swagger-ui": ("other servers", "/docs"),
    "/v1": ("other servers", "/v1/models"),
    "/v1/chat": ("other servers", "/v1/chat/completions"),
    "/v1/model": ("other servers", "/v1/models"),
}
"""By path: whose route it is, and the route of this service for the same purpose. The bodies differ."""

VERSIONS: Final = frozenset({"api", "inference", "oai", "openai", "v1", "v1beta", "v2"})
"""Parts at the beginning of a path that say nothing about its purpose."""

_EMBEDDINGS = "this service generates text and computes no embeddings"
_RANKS = "this service generates text and computes no ranks, scores or classes of texts"
_MEDIA = "this service reads and generates text, no sound, images or video"
_STORED = "nothing is stored between requests: send the whole conversation each time"
_FILES = "this service stores no files and runs no batches; requests sent at the same time are computed together"
_TRAINING = "this service does not train models"
_ADAPTERS = "`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter` change the adapters"
_MODELS = (
    "this service has one model, chosen at its start: `tessera pull`, `list` and `rm` manage models"
)
_ONE_STATE = "the service starts and ends with its model"
_WEIGHTS = "the weights do not change while the service runs"
_PROFILE = "`tessera bench engine --profile` shows where time is spent"

SUBJECTS: Final[dict[str, str]] = {
    "embed": _EMBEDDINGS,
    "embed_all": _EMBEDDINGS,
    "embed_sparse": _EMBEDDINGS,
    "embedding": _EMBEDDINGS,
    "embeddings": _EMBEDDINGS,
    "encode": _EMBEDDINGS,
    "pooling": _EMBEDDINGS,
    "similarity": _EMBEDDINGS,
    "vectorize": _EMBEDDINGS,
    "classify": _RANKS,
    "decode_logits": _RANKS,
    "predict": _RANKS,
    "rank": _RANKS,
    "rerank": _RANKS,
    "reranking": _RANKS,
    "reward": _RANKS,
    "score": _RANKS,
    "moderations": "this service does not judge texts",
    "audio": _MEDIA,
    "images": _MEDIA,
    "realtime": _MEDIA,
    "speech": _MEDIA,
    "transcriptions": _MEDIA,
    "translations": _MEDIA,
    "videos": _MEDIA,
    "assistants": _STORED,
    "chatkit": _STORED,
    "containers": _STORED,
    "conversations": _STORED,
    "evals": _STORED,
    "graders": _STORED,
    "threads": _STORED,
    "vector_stores": _STORED,
    "batches": _FILES,
    "files": _FILES,
    "uploads": _FILES,
    "fine-tunes": _TRAINING,
    "fine_tuning": _TRAINING,
    "load_lora_adapter": _ADAPTERS,
    "lora-adapters": _ADAPTERS,
    "unload_lora_adapter": _ADAPTERS,
    "blobs": _MODELS,
    "copy": _MODELS,
    "create": _MODELS,
    "delete": _MODELS,
    "pull": _MODELS,
    "push": _MODELS,
    "sleep": _ONE_STATE,
    "wake_up": _ONE_STATE,
    "flush_cache": "cached prefixes leave the cache when their memory is needed",
    "reset_prefix_cache": "cached prefixes leave the cache when their memory is needed",
    "collective_rpc": _WEIGHTS,
    "release_memory_occupation": _WEIGHTS,
    "resume_memory_occupation": _WEIGHTS,
    "update_weights_from_disk": _WEIGHTS,
    "update_weights_from_distributed": _WEIGHTS,
    "update_weights_from_tensor": _WEIGHTS,
    "start_profile": _PROFILE,
    "stop_profile": _PROFILE,
    "organization": "this service has no accounts",
}
"""Why there is no route, by the first part of the path that is none of `VERSIONS`."""

DEEPER: Final[dict[str, str]] = {
    "/models/load": _MODELS,
    "/models/unload": _MODELS,
    "/v1/messages/batches": _FILES,
}
"""The same by the beginning of a path, where its parts lead to a route of this service for another purpose."""
