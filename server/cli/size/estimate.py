"""Estimates the memory and the speed of a service on a GPU that may be absent. Imports no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from model.adapters.targets import find_targets
from model.checkpoint.dtypes import gpu_dtype_name, resolve_quantization
from model.device.quantizations import loaded_format
from model.errors import UnsupportedModelError
from model.network.matrix_shapes import slot_bytes
from model.network.sizes import ModelSizes, dtype_bytes
from model.network.spec import Attention
from model.network.state import quantized_kv_dtype
from server.engine.core.memory.kv_demand import (
    CUDA_BYTES,
    GIB,
    MIB,
    Allowance,
    NotEnoughMemoryError,
)
from server.engine.runner.explain.model_work import ModelWork, Rows
from server.engine.runner.start.kv_sizes import (
    GPU_HEADROOM_BYTES,
    default_share,
    kv_cache_demand,
    size_within,
)
from server.engine.runner.step.buckets import recorded_bytes

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from model.checkpoint.config import ModelConfig
    from model.network.spec import Layer, Network
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.messages import EngineConfig

BATCHES: Final = (1, 8, 64, 256)
EXPECTED_SHARE: Final = 0.5
"""Share of the roofline's speed that is typical, about the median of the results of H100 and H200 in
benchmarks/results/. One sequence of a model of 8 billion parameters reaches 0.84, small models less."""
LAYER_SECONDS: Final = 15e-6
"""Typical time of a layer, however small it is, because its parts wait for each other. An H100 needs 10 us a layer
for one sequence of SmolLM2-135M and 16 us for eight (benchmarks/results/h100-shapes-970d95f.json)."""
_ON_DEVICE: Final = "cuda"


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the GPU. Those of activations and of CUDA are estimates; the service measures them when it starts.

    `state_bytes` are those of the slots for states of fixed size, 0 if no layer has one; of the slots,
    `state_snapshots` are for the prefix cache. `adapter_bytes` are those of the slots for adapters.
    """

    total_bytes: int
    cuda_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    kv_why: str
    state_bytes: int
    state_snapshots: int
    adapter_bytes: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """How many sequences of a length fit into the KV cache at the same time."""

    tokens: int
    sequences: int


class Decode(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of a batch, in tokens per second of all its sequences. None if the GPU's peaks are not known."""

    batch: int
    fits: bool
    limit_tokens_per_second: float | None
    expected_tokens_per_second: float | None
    bound: str | None


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """The time to the first token of a prompt on an idle GPU, in seconds. None if the GPU's peaks are not known."""

    prompt_tokens: int
    limit_seconds: float | None
    expected_seconds: float | None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The size of a service; the reply of `tessera size --json`."""

    gpu: str
    gpu_name: str
    dtype: str
    weight_dtype: str
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    input_len: int
    output_len: int
    memory: Memory
    capacity: list[Capacity]
    decode: list[Decode]
    first_token: FirstToken


def resolve_sizes(config: EngineConfig, model: ModelConfig, arch: GPUArch) -> ModelSizes:
    """Return the sizes of the model, as a GPU would run it.

    Raises:
        ModelError: the model is not supported, or the GPU does not support the quantization.
    """
    num_ranks, stored = config.tensor_parallel, model.weight_format
    if config.max_loras:
        find_targets(model)
    if reasons := model.parallel_unsupported(num_ranks):
        raise UnsupportedModelError(f"--tensor-parallel {num_ranks}: {'; '.join(reasons)}")
    quantization = resolve_quantization(config.quantization, arch, config.dtype, tuple, stored)
    usual = gpu_dtype_name(model, has_bfloat16=arch.has_bfloat16)
    dtype = usual if config.dtype == "auto" else config.dtype
    return ModelSizes(model.network, dtype, loaded_format(quantization, stored), num_ranks)


def estimate(
    model: ModelSizes,
    limits: SchedulerConfig,
    config: EngineConfig,
    arch: GPUArch,
    input_len: int,
    output_len: int,
) -> Estimate:
    """Estimate a service whose requests have one length; of several GPUs that share the model, each one.

    Raises:
        NotEnoughMemoryError: weights and activations leave no room for a block of the KV cache, or the size that the
            operator set does not fit.
    """
    memory = _memory(model, config, arch, limits)
    lengths = dict.fromkeys((input_len + output_len, limits.max_model_len))
    capacity = [_capacity(memory.kv_tokens, length, config.block_size) for length in lengths]
    dtype, kv_dtype = model.dtype_name, quantized_kv_dtype(config.kv_cache_dtype)
    work = ModelWork(model, config.block_size, arch, kv_dtype)
    at_once = min(capacity[0].sequences, limits.max_num_seqs)
    context = input_len + (output_len + 1) // 2
    return Estimate(
        gpu=arch.key,
        gpu_name=arch.name,
        dtype=dtype,
        weight_dtype=model.weight_format.name,
        kv_dtype=kv_dtype or dtype,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        input_len=input_len,
        output_len=output_len,
        memory=memory,
        capacity=capacity,
        decode=[_decode(work, batch, context, fits=batch <= at_once) for batch in BATCHES],
        first_token=_first_token(work, input_len, limits.prefill_budget),
    )


def _memory(
    model: ModelSizes, config: EngineConfig, arch: GPUArch, limits: SchedulerConfig
) -> Memory:
    element, weight_bytes = dtype_bytes(model.dtype_name), model.weight_bytes
    activation_bytes = _activations(model.whole_network, element, limits)
    if config.cuda_graphs:
        row_bytes = model.network.vocab * element
        activation_bytes += recorded_bytes(limits, config.block_size, row_bytes)
    state = model.network.state(quantized_kv_dtype(config.kv_cache_dtype) or model.dtype_name)
    total, share = arch.memory_mib * MIB, config.gpu_memory_utilization
    adapter_bytes = (config.max_loras or 0) * slot_bytes(
        model.network, config.max_lora_rank, element
    )
    loaded_bytes = weight_bytes + adapter_bytes
    demand = kv_cache_demand(
        config,
        limits,
        state,
        activation_bytes + GPU_HEADROOM_BYTES,
        None if share is None else Allowance(share, total, loaded_bytes),
    )
    free = total - CUDA_BYTES - loaded_bytes
    if free < demand.kept_bytes + demand.slots_bytes + demand.block_bytes:
        raise NotEnoughMemoryError(
            f"the model does not fit: {arch.name} has {total / GIB:.1f} GiB, "
            f"weights take {weight_bytes / GIB:.2f} GiB, "
            f"activations and CUDA about {(CUDA_BYTES + demand.kept_bytes) / GIB:.2f} GiB"
            f"{slots_text(demand.slots_bytes, demand.requested_snapshots or 0, adapter_bytes)}"
        )
    size = size_within(demand, free, default_share(demand, _ON_DEVICE), arch.name)
    return Memory(
        total_bytes=total,
        cuda_bytes=CUDA_BYTES + GPU_HEADROOM_BYTES,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_bytes_per_token=state.token_bytes,
        kv_tokens=size.num_blocks * config.block_size,
        kv_why=size.why,
        state_bytes=(demand.num_running_slots + size.num_snapshots) * demand.slot_bytes,
        state_snapshots=size.num_snapshots,
        adapter_bytes=adapter_bytes,
    )


def slots_text(state_bytes: int, num_snapshots: int, adapter_bytes: int) -> str:
    """Return a part of a list of what takes memory; empty without states of fixed size and adapters."""
    parts = {
        f"states of sequences, of drafts and {num_snapshots} snapshots": state_bytes,
        "slots for adapters": adapter_bytes,
    }
    return "".join(f", {name} {it / GIB:.2f} GiB" for name, it in parts.items() if it)


def _activations(network: Network, element: int, limits: SchedulerConfig) -> int:
    """Estimate the tensors of the largest step that exist at the same time.

    Of a token: the residual stream and its addend, the normed input, queries, keys and values, the attention's output,
    and the MLP's two products and their gate; other residual streams and per-layer inputs. Of a row of logits: the
    logits, and two float32 copies for sampling.
    """
    streams, table = network.streams, network.per_layer
    shared = 0 if streams is None else 2 * streams.count * network.hidden
    shared += 0 if table is None else 3 * len(network.layers) * table.size

    def of_token(layer: Layer) -> int:
        values = 3 * network.hidden + 3 * layer.mlp.inner
        if isinstance(layer.mixer, Attention):
            heads = 2 * layer.mixer.num_heads + 2 * layer.mixer.num_kv_heads
            values += heads * layer.mixer.head_dim
        return values

    values = shared + max(of_token(layer) for layer in dict.fromkeys(network.layers))
    rows = limits.max_num_seqs * network.vocab * (element + 2 * 4)
    return limits.prefill_budget * values * element + rows


def _capacity(kv_tokens: int, length: int, block_size: int) -> Capacity:
    blocks = -(-length // block_size)
    return Capacity(tokens=length, sequences=kv_tokens // (blocks * block_size))


def _decode(work: ModelWork, batch: int, context: int, *, fits: bool) -> Decode:
    limit = work.limit(work.step([Rows(batch, 1, context)]))
    speed = None if limit is None else batch / limit.seconds
    return Decode(
        batch=batch,
        fits=fits,
        limit_tokens_per_second=speed,
        expected_tokens_per_second=None
        if limit is None
        else batch / _expected(work, limit.seconds),
        bound=None if limit is None else limit.bound,
    )


def _first_token(work: ModelWork, input_len: int, budget: int) -> FirstToken:
    """Add up the steps that compute a prompt in chunks of at most `budget` tokens."""
    ends = [*range(budget, input_len, budget), input_len]
    begins = [0, *ends[:-1]]
    steps = [
        work.limit(work.step([Rows(1, end - begin, end)]))
        for begin, end in zip(begins, ends, strict=True)
    ]
    seconds = None if None in steps else sum(step.seconds for step in steps if step is not None)
    return FirstToken(
        prompt_tokens=input_len,
        limit_seconds=seconds,
        expected_seconds=None if seconds is None else _expected(work, seconds, len(ends)),
    )


def _expected(work: ModelWork, limit_seconds: float, num_steps: int = 1) -> float:
    """Return the typical duration of steps from the one that the GPU's peaks allow."""
    least = num_steps * work.num_layers * LAYER_SECONDS
    return max(limit_seconds / EXPECTED_SHARE, least)
