"""Estimates the memory and the speed of a service on a GPU that may be absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from model.checkpoint.dtypes import resolve_kv_dtype
from model.device.kv_cache import bytes_per_token
from server.engine.core.memory.kv_demand import GIB, MIB, KVCacheDemand, NotEnoughMemoryError
from server.engine.runner.explain.model_work import ModelWork, Rows
from server.engine.runner.start.kv_memory import SHARE, size_within
from server.engine.runner.start.runner_start import GPU_HEADROOM_BYTES
from server.engine.runner.start.startup import step_limits
from server.engine.runner.step.recordings import recorded_bytes

if TYPE_CHECKING:
    from kernels import GPUArch
    from model.decoder import DecoderLM
    from model.network.spec import Layer, Network
    from server.cli.plan.planned_model import PlannedModel
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.messages import EngineConfig

BATCHES: Final = (1, 8, 64, 256)
EXPECTED_SHARE: Final = 0.5
"""Share of the roofline's speed that is typical, about the median of the results of H100 and H200 in
benchmarks/results/. One sequence of a model of 8 billion parameters reaches 0.84, small models less."""
LAYER_SECONDS: Final = 15e-6
"""Typical time of a layer, however small it is, because its parts wait for each other. An H100 needs 11 us a layer
for one sequence of SmolLM2-135M and 20 us for eight (benchmarks/results/h100-shapes-9ba5ba4.json)."""
_CONTEXT_BYTES: Final = 512 * MIB
"""Memory that CUDA and PyTorch take in a process, about."""
_ON_DEVICE: Final = "cuda"


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the GPU. Those of activations and of CUDA are estimates; the service measures them when it starts."""

    total_bytes: int
    cuda_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    kv_why: str


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


def estimate(
    planned: PlannedModel, config: EngineConfig, arch: GPUArch, input_len: int, output_len: int
) -> Estimate:
    """Estimate a service whose requests have one length; of several GPUs that share the model, each one.

    Raises:
        NotEnoughMemoryError: weights and activations leave no room for a block of the KV cache, or the size that the
            operator set does not fit.
    """
    model = planned.model
    limits = step_limits(config, model.config, arch)
    memory = _memory(model, config, arch, limits)
    lengths = dict.fromkeys((input_len + output_len, limits.max_model_len))
    capacity = [_capacity(memory.kv_tokens, length, config.block_size) for length in lengths]
    work = ModelWork(model, config.block_size, arch, planned.kv_dtype)
    at_once = min(capacity[0].sequences, limits.max_num_seqs)
    context = input_len + (output_len + 1) // 2
    dtype = str(model.embed_tokens.dtype).removeprefix("torch.")
    return Estimate(
        gpu=arch.key,
        gpu_name=arch.name,
        dtype=dtype,
        weight_dtype=model.weight_format.name,
        kv_dtype=planned.kv_dtype or dtype,
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
    model: DecoderLM, config: EngineConfig, arch: GPUArch, limits: SchedulerConfig
) -> Memory:
    layers, dtype = model.network.layers, model.embed_tokens.dtype
    weight_bytes = model.weight_bytes
    activation_bytes = _activations(model.config.network, dtype.itemsize, limits)
    if config.cuda_graphs:
        row_bytes = model.network.vocab * dtype.itemsize
        activation_bytes += recorded_bytes(limits, config.block_size, row_bytes)
    per_token = bytes_per_token(
        len(layers),
        layers[0].mixer.num_kv_heads,
        layers[0].mixer.head_dim,
        resolve_kv_dtype(config.kv_cache_dtype, dtype),
    )
    blocks_per_sequence = -(-limits.max_model_len // config.block_size)
    demand = KVCacheDemand(
        requested_tokens=config.kv_cache_tokens,
        requested_gib=config.kv_cache_gib,
        useful_tokens=limits.max_num_seqs * blocks_per_sequence * config.block_size,
        block_size=config.block_size,
        bytes_per_token=per_token,
        kept_bytes=activation_bytes + GPU_HEADROOM_BYTES,
    )
    total = arch.memory_mib * MIB
    free = total - _CONTEXT_BYTES - weight_bytes
    if free < demand.kept_bytes + demand.block_bytes:
        raise NotEnoughMemoryError(
            f"the model does not fit: {arch.name} has {total / GIB:.1f} GiB, "
            f"weights take {weight_bytes / GIB:.2f} GiB, "
            f"activations and CUDA about {(_CONTEXT_BYTES + demand.kept_bytes) / GIB:.2f} GiB"
        )
    size = size_within(demand, free, SHARE[_ON_DEVICE], arch.name)
    return Memory(
        total_bytes=total,
        cuda_bytes=_CONTEXT_BYTES + GPU_HEADROOM_BYTES,
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_bytes_per_token=per_token,
        kv_tokens=size.num_blocks * config.block_size,
        kv_why=size.why,
    )


def _activations(network: Network, element: int, limits: SchedulerConfig) -> int:
    """Estimate the tensors of the largest step that exist at the same time.

    Of a token: the residual stream and its addend, the normed input, queries, keys and values, the attention's output,
    and the MLP's two products and their gate. Of a row of logits: the logits, and two float32 copies for sampling.
    """

    def of_token(layer: Layer) -> int:
        heads = 2 * layer.mixer.num_heads + 2 * layer.mixer.num_kv_heads
        return 3 * network.hidden + heads * layer.mixer.head_dim + 3 * layer.mlp.inner

    values = max(of_token(layer) for layer in dict.fromkeys(network.layers))
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
