"""The settings of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from model.device.quantizations import QuantizationSetting
from model.families.unlisted import ModelBackend
from server.engine.core.request import MAX_DRAFT_TOKENS
from server.log import LogFormat
from server.setting import Setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class EngineSettings:
    """The part of the service's settings that its engines read. Help texts and documents show the descriptions.

    Attributes:
        device: auto uses a GPU if there is one, the first that CUDA_VISIBLE_DEVICES allows.
        dtype: dtype of the weights, and of the KV cache unless --kv-cache-dtype sets it; auto uses the checkpoint's
            dtype on a GPU and the faster one on a CPU.
        quantization: of the weights when they are loaded. On a CPU int8: all matrices in 8 bits, int4: those of the
            layers in 4; auto is int8 there, unless --dtype is set. On a GPU fp8: the layers' weights in float8_e4m3fn
            with a scale per output, half the memory, and faster steps from sm_89 on, not below sm_80; auto is none
            there. auto and none keep the format of a checkpoint that is quantized already.
        load_format: auto and safetensors read safetensors files. pickle also reads pytorch_model.bin, where there are
            none, with PyTorch's loader of tensors alone: it refuses all other content, but a mistake in it could run
            code of the file with the rights of the service, so use it for files whose author you trust. dummy generates
            random weights from config.json, to measure speed without a checkpoint.
        model_backend: what computes the model. tessera: our executors, for the families of docs/models.md.
            transformers: modules of the library transformers (an extra), with our attention, KV cache, scheduler and
            sampling, for every decoder of the library that allows another attention; slower, and without
            --tensor-parallel, --quantization, --deterministic and recorded steps. auto: transformers for the
            architectures that are no family of ours.
        compiled_kernels: folder of kernels that `tessera warmup --arch` compiled; only read, those that it lacks are
            compiled into Triton's own cache.
        max_model_len: limit of prompt and output tokens of a sequence; default: the model's own limit.
        max_num_seqs: limit of sequences that run at the same time; default: 64 on a CPU, 256 on a GPU.
        max_num_batched_tokens: limit of tokens computed in one step; longer prompts are computed in chunks; default:
            512 on a CPU, 1024 on a GPU, and at least twice --max-num-seqs.
        max_prefill_tokens: the same limit for steps in which no sequence decodes, at least --max-num-batched-tokens;
            default: --max-num-batched-tokens if that is given and on a CPU, otherwise what the GPU computes in 15 ms at
            its peak, up to 8192.
        block_size: tokens in a block of the KV cache.
        kv_cache_dtype: auto stores keys and values in --dtype, in float16 where the C library computes whole steps; fp8
            in float8_e4m3fn with a scale per vector, which takes about half the memory and is efficient on GPUs from
            sm_89 on.
        kv_cache_tokens: capacity of the KV cache in tokens; default: as much as --max-num-seqs requests can fill, and
            at most 80 % of a GPU's free memory or 25 % of a CPU's.
        kv_cache_gib: capacity of the KV cache in GiB, instead of --kv-cache-tokens.
        gpu_memory_utilization: share of a GPU's total memory that an engine uses in all, each rank on its own GPU:
            weights, activations and recorded steps, and the KV cache with what they leave, instead of
            --kv-cache-tokens and --kv-cache-gib; what other programs use does not count, but the cache is not larger
            than the memory that is free; without effect on a CPU.
        cuda_graphs: on a GPU, record steps and replay each with one launch instead of hundreds.
        overlap: on a GPU, schedule and launch a step while the previous one is computed.
        enable_prefix_caching: keep computed blocks for later prompts with the same prefix.
        state_snapshots: states of recurrent layers that the prefix cache keeps beside those of the running sequences,
            at which later prompts begin; default: up to four for each of --max-num-seqs, in at most a quarter of the
            memory of the KV cache; without effect for models without such layers.
        deterministic: give the tokens and log-probabilities of all requests, not only of those with the field
            `deterministic`, the same bits whatever else the service computes; free on a CPU with weights in 8 or 4
            bits, where nearly all models have it without this; slower on a GPU.
        max_draft_tokens: tokens that are proposed at once to follow those of a sequence, where an earlier text goes on
            so, and computed in one step; replies stay the same bytes. The number used follows from what they save;
            0 proposes none. For deterministic requests, which are all requests of nearly all models on a CPU with
            weights in 8 or 4 bits, and on Hopper in steps of few tokens for all.
        max_loras: adapters of one step, each in a slot on the device; requests for others wait for a slot; 0 takes
            none; default: 8 with --lora-modules or --lora-folder, otherwise 0.
        max_lora_rank: largest rank of an adapter, for which the slots have memory.
        max_cpu_loras: most adapters in the memory of the host, those in slots and those that are being read included;
            default: four times --max-loras.
        tensor_parallel: number of GPUs that share the model, each with a part of every layer; a divisor of the model's
            key-value heads, and of the heads or channels of recurrent layers.
        unmeasured_kernels: allow kernels where they were not measured: `blackwell_prefill` on sm_100 and sm_103 and
            decoding one sequence in one launch on sm_100 to sm_121, which no GPU has run; on sm_90
            `hopper_keys_on_m_decode` for other head dims than 64 or more than 8 query heads for each key-value head;
            compare answers and speed before you rely on them.
        cpu_threads: threads of a forward pass on the CPU; default: one per usable physical core, at most the usable
            logical processors less one.
        log_format: lines for people, or a JSON object per line.
        log_level: lowest level of messages to log.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Setting("model")] = "auto"
    quantization: Annotated[QuantizationSetting, Setting("model")] = "auto"
    load_format: Annotated[Literal["auto", "safetensors", "pickle", "dummy"], Setting("model")] = (
        "auto"
    )
    model_backend: Annotated[ModelBackend, Setting("model")] = "tessera"
    compiled_kernels: str | None = None
    max_model_len: Annotated[int | None, Setting("model", ge=2)] = None
    max_num_seqs: Annotated[int | None, Setting(ge=1, le=4096)] = None
    max_num_batched_tokens: Annotated[int | None, Setting(ge=1, le=1 << 20)] = None
    max_prefill_tokens: Annotated[int | None, Setting(ge=1, le=1 << 20)] = None
    block_size: Annotated[int, Setting("memory", ge=1, le=256)] = 16
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], Setting("memory")] = "auto"
    kv_cache_tokens: Annotated[int | None, Setting("memory", ge=1)] = None
    kv_cache_gib: Annotated[float | None, Setting("memory", gt=0, le=1 << 20)] = None
    gpu_memory_utilization: Annotated[float | None, Setting("memory", gt=0, le=1)] = None
    cuda_graphs: bool = True
    overlap: bool = True
    enable_prefix_caching: Annotated[bool, Setting("memory")] = True
    state_snapshots: Annotated[int | None, Setting("memory", ge=0, le=1 << 20)] = None
    deterministic: bool = False
    max_draft_tokens: Annotated[int, Setting(ge=0, le=MAX_DRAFT_TOKENS)] = 7
    max_loras: Annotated[int | None, Setting("model", ge=0, le=256)] = None
    max_lora_rank: Annotated[int, Setting("model", ge=1, le=256)] = 16
    max_cpu_loras: Annotated[int | None, Setting("memory", ge=1, le=65536)] = None
    tensor_parallel: Annotated[int, Setting(ge=1, le=64)] = 1
    unmeasured_kernels: bool = False
    cpu_threads: Annotated[int | None, Setting(ge=1, le=1024)] = None
    log_format: Annotated[LogFormat, Setting("process")] = "text"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Setting("process")] = "info"
