"""The limits of a step, with defaults for those that the operator does not set. Imports no PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from server.engine.core.limits import SchedulerConfig
from server.engine.core.start_checks import StartupError

if TYPE_CHECKING:
    from kernels.arch import GPUArch
    from model.checkpoint.config import ModelConfig
    from server.engine.core.messages import EngineConfig

_CPU_BUDGET: Final = 512
_GPU_BUDGET: Final = 1024
"""Default limits of tokens in a step. The other streams wait for a step with a long prompt, and a CPU computes it more
slowly than a GPU."""
_PREFILL_SECONDS: Final = 0.015
_MOST_PREFILL_TOKENS: Final = 8192
"""Without other streams, a step has the prompt tokens that a GPU computes in this time at its peak, up to this number:
1024 tokens of a small model are too little work for all SMs. It really takes about twice as long; so long a prompt
that arrives next may wait."""
_CPU_SEQUENCES: Final = 64
_GPU_SEQUENCES: Final = 256


def step_limits(
    config: EngineConfig,
    model: ModelConfig,
    arch: GPUArch,
    chunk: int,
    *,
    takes_drafts: bool = True,
) -> SchedulerConfig:
    """Return the operator's limits, with defaults for those that are not set.

    Args:
        config: of the engine.
        model: configuration of the checkpoint.
        arch: the processor.
        chunk: of its kernels for layers with a state of fixed size (`StateKernels.chunk`): steps divide prompts at
            multiples of so many tokens.
        takes_drafts: whether decode rows may have drafts (`StateKernels.several_queries`).

    Raises:
        StartupError: the operator's limits are too low for prompts of layers with a state of fixed size.
    """
    sequences, budget = config.max_num_seqs, config.max_num_batched_tokens
    prefill = config.max_prefill_tokens
    most = budget or prefill
    if sequences is None:
        default = _CPU_SEQUENCES if arch.is_cpu else _GPU_SEQUENCES
        sequences = default if most is None else max(1, min(default, most - chunk + 1))
    if budget is None:
        # Half is left for prompts when all sequences decode.
        budget = max(_CPU_BUDGET if arch.is_cpu else _GPU_BUDGET, 2 * sequences, sequences + chunk)
        if prefill is None and not arch.is_cpu:
            prefill = max(budget, _prefill_tokens(model.network.num_parameters, config, arch))
        budget = min(budget, prefill or budget)
    if chunk > 1 and budget < (least := sequences - 1 + chunk):
        raise StartupError(
            f"--max-num-batched-tokens is {budget}; at least {least} is needed with --max-num-seqs {sequences}, "
            f"because steps divide prompts of this model at multiples of {chunk} tokens"
        )
    return SchedulerConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        max_model_len=config.max_model_len or model.max_context,
        max_prefill_tokens=prefill,
        max_queries=1 + (config.max_draft_tokens if takes_drafts else 0),
    )


def _prefill_tokens(num_parameters: int, config: EngineConfig, arch: GPUArch) -> int:
    """Return the largest power of two of tokens that a GPU computes in `_PREFILL_SECONDS` at its peak; 1 if unknown."""
    operations_of_token = 2 * num_parameters / config.tensor_parallel
    tokens = int(_PREFILL_SECONDS * arch.half_tflops * 1e12 / operations_of_token)
    return min(_MOST_PREFILL_TOKENS, 1 << (max(1, tokens).bit_length() - 1))
