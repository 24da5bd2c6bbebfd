"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from server.log import LogFormat
from server.setting import Setting


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The part of the service's settings that its engines read."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Setting("auto uses a GPU if there is one, the first that CUDA_VISIBLE_DEVICES allows"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Setting(
            "dtype of the weights, and of the KV cache unless --kv-cache-dtype sets it; auto uses the checkpoint's "
            "dtype on a GPU and the faster one on a CPU",
            "model",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "fp8", "int8", "int4"],
        Setting(
            "of the weights when they are loaded. On a CPU int8 and int4: all matrices in 8 or 4 bits; auto is int8 "
            "there, unless --dtype is set or the model is not supported. On a GPU fp8: the layers' weights in "
            "float8_e4m3fn with a scale per output, half the memory, and faster steps from sm_89 on, not below sm_80; "
            "auto is none there",
            "model",
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"],
        Setting(
            "dummy generates random weights from config.json, to measure speed without a checkpoint",
            "model",
        ),
    ] = "auto"
    compiled_kernels: Annotated[
        str | None,
        Setting(
            "folder of kernels that `tessera warmup --arch` compiled; only read, those that it lacks are compiled into "
            "Triton's own cache"
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Setting(
            "limit of prompt and output tokens of a sequence; default: the model's own limit",
            "model",
            ge=2,
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Setting(
            "limit of sequences that run at the same time; default: 64 on a CPU, 256 on a GPU",
            ge=1,
            le=4096,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        Setting(
            "limit of tokens computed in one step; longer prompts are computed in chunks; default: 512 on a CPU, 1024 "
            "on a GPU, and at least twice --max-num-seqs",
            ge=1,
            le=1 << 20,
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int | None,
        Setting(
            "the same limit for steps in which no sequence decodes, at least --max-num-batched-tokens; default: "
            "--max-num-batched-tokens if that is given and on a CPU, otherwise what the GPU computes in 15 ms at its "
            "peak, up to 8192",
            ge=1,
            le=1 << 20,
        ),
    ] = None
    block_size: Annotated[
        int, Setting("tokens in a block of the KV cache", "memory", ge=1, le=256)
    ] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Setting(
            "auto stores keys and values in --dtype, with int8 and int4 weights in float16; fp8 in float8_e4m3fn with "
            "a scale per vector, which takes about half the memory and is efficient on GPUs from sm_89 on",
            "memory",
        ),
    ] = "auto"
    kv_cache_tokens: Annotated[
        int | None,
        Setting(
            "capacity of the KV cache in tokens; default: as much as --max-num-seqs requests can fill, and at most "
            "80 % of a GPU's free memory or 25 % of a CPU's",
            "memory",
            ge=1,
        ),
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        Setting(
            "capacity of the KV cache in GiB, instead of --kv-cache-tokens",
            "memory",
            gt=0,
            le=1 << 20,
        ),
    ] = None
    cuda_graphs: Annotated[
        bool,
        Setting("on a GPU, record steps and replay each with one launch instead of hundreds"),
    ] = True
    overlap: Annotated[
        bool,
        Setting("on a GPU, schedule and launch a step while the previous one is computed"),
    ] = True
    enable_prefix_caching: Annotated[
        bool, Setting("keep computed blocks for later prompts with the same prefix", "memory")
    ] = True
    deterministic: Annotated[
        bool,
        Setting(
            "give the tokens and log-probabilities of all requests, not only of those with the field `deterministic`, "
            "the same bits whatever else the service computes; free on a CPU with int8 or int4 weights, slower on a GPU"
        ),
    ] = False
    tensor_parallel: Annotated[
        int,
        Setting(
            "number of GPUs that share the model, each with a part of every layer; a divisor of the model's key-value "
            "heads",
            ge=1,
            le=64,
        ),
    ] = 1
    unmeasured_kernels: Annotated[
        bool,
        Setting(
            "allow kernels where they were not measured: `blackwell_prefill` on sm_100 and sm_103 and decoding one "
            "sequence in one launch on sm_100 to sm_121, which no GPU has run; on sm_90 `hopper_keys_on_m_decode` for "
            "other head dims than 64 or more than 8 query heads for each key-value head; compare answers and speed "
            "before you rely on them"
        ),
    ] = False
    cpu_threads: Annotated[
        int | None,
        Setting(
            "threads of a forward pass on the CPU; default: one per usable physical core, at most the usable logical "
            "processors less one",
            ge=1,
            le=1024,
        ),
    ] = None
    log_format: Annotated[
        LogFormat, Setting("lines for people, or a JSON object per line", "process")
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting("lowest level of messages to log", "process"),
    ] = "info"
