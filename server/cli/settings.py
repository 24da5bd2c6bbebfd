"""The settings of the service, with flag, environment variable, default and description.

No other module reads the environment.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

ENV_PREFIX = "TESSERA_"


class Settings(BaseSettings):
    """Serve a model over HTTP.

    Every flag can also be given as an environment variable: --max-model-len is TESSERA_MAX_MODEL_LEN. A flag overrides
    the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        cli_prog_name="tessera serve",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        env_ignore_empty=True,
    )

    model: str = Field(
        "bundled",
        description="checkpoint folder, Hugging Face model id (org/name), or 'bundled' for the included code model",
    )
    revision: str | None = Field(
        None, description="branch, tag or commit of a Hugging Face model id"
    )
    served_model_name: str | None = Field(
        None,
        description="name of the model in the OpenAI API; several with commas between them, of which replies have the "
        "first; default: --model",
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all interfaces")
    port: int = Field(
        8000, ge=0, le=65535, description="TCP port to listen on; 0 chooses a free one"
    )
    frontends: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that share the port and the work of HTTP, tokenizing and streaming; one process streams "
        "about 50,000 tokens per second",
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
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description="fp8 rounds the layers' weights to float8_e4m3fn with a scale per output when they are loaded: "
        "half the memory, and faster steps on GPUs from sm_89 on; needs a GPU from sm_80 on",
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto",
        description="dummy generates random weights from config.json, to measure speed without a checkpoint",
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
        "CPU, 1024 on a GPU",
    )
    block_size: int = Field(16, ge=1, le=256, description="tokens in a block of the KV cache")
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="auto stores keys and values in --dtype; fp8 in float8_e4m3fn with a scale per vector, which takes "
        "about half the memory and is efficient on GPUs from sm_89 on",
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
    cpu_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of a forward pass on the CPU; default: one per physical core, at most the available cores "
        "less one",
    )
    max_concurrent_requests: int | None = Field(
        None,
        ge=1,
        description="limit of requests in progress; more are refused with 429; default: twice --max-num-seqs",
    )
    max_body_bytes: int = Field(2_000_000, ge=1024, description="largest request body, in bytes")
    strict_fields: bool = Field(
        False,
        description="refuse unknown fields of the OpenAI API instead of reporting that they have no effect",
    )
    engine_hang_seconds: float = Field(
        300.0,
        gt=0,
        description="seconds after which an engine that starts or has requests, and sends nothing, is restarted; must "
        "be longer than the longest step",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of messages to log"
    )

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The names in --served-model-name; empty if it is not given."""
        names = (name.strip() for name in (self.served_model_name or "").split(","))
        return tuple(name for name in names if name)

    @model_validator(mode="after")
    def _budget_serves_every_sequence(self) -> Self:
        budget, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if budget is not None and sequences is not None and budget < sequences:
            raise PydanticCustomError(
                "budget",
                "--max-num-batched-tokens {tokens} is less than --max-num-seqs {sequences}: "
                "every running sequence needs a token of each step",
                {"tokens": budget, "sequences": sequences},
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


def environment_variable(field: str) -> str:
    """Return the name of a setting's environment variable."""
    return ENV_PREFIX + field.upper()


def flag(field: str) -> str:
    """Return a setting's command-line flag."""
    return "--" + field.replace("_", "-")
