"""Computes dummy steps before the first request, so that no request waits for compilation and other first-use work.

Their keys and values are written to block 0, where the first sequence overwrites them.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Final

import torch

from kernels import detect, select
from kernels.gpu.compile_ahead import NotCompiledError, compile_ahead, compile_nothing
from model.device.cpus import usable_cpus
from model.executors.single_launch import launched_rows
from model.sampling.parameters import NOT_FINITE
from server.engine.core.start_checks import StartupError
from server.engine.runner.start import dummy_steps
from server.engine.runner.start.startup_progress import clocked
from server.engine.runner.step.buckets import row_counts

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.step import SchedulerOutput, StepResult
    from server.engine.runner.step.model_runner import ModelRunner
    from server.engine.runner.step.shared_prefix import SharingRule

log = logging.getLogger("tessera.engine")

_CPU_TOKENS: Final = 65
_ARGMAX_ROWS: Final = (1, 2, 4, 8)
"""Numbers of rows for which the argmax is warmed up; for up to four rows, the LM head's kernel computes it."""
_ROTATED_TOKENS: Final = (128, 1023)
"""Beside a token, a short and the longest chunk, these have every launch of the rotation of up to 256 heads."""


def warm_up(runner: ModelRunner, limits: SchedulerConfig, say: Callable[[str], None]) -> None:
    """Compute every kind of step once; on a GPU, compile missing kernels in parallel first.

    Args:
        runner: computes the steps.
        limits: of a step.
        say: reports the progress.
    """
    if runner.device.type != "cuda":
        _compute_first_steps(runner, limits, say)
        return
    try:
        with compile_nothing(), clocked("computing first steps"):
            _compute_first_steps(runner, limits, say)
    except NotCompiledError:
        # Repeating the steps takes little time: with a cold cache, the first kernel is missing already.
        say("compiling kernels")
        with clocked("compiling kernels"):
            _compile(runner, limits, say)
        with clocked("computing first steps"):
            _compute_first_steps(runner, limits, say)
    with clocked("computing the largest step"):
        compute_largest_step(runner, limits)


def compute_largest_step(runner: ModelRunner, limits: SchedulerConfig) -> None:
    """Compute the steps that need the most memory; PyTorch keeps that memory for later steps."""
    arch = detect(runner.device)
    length = min(limits.max_model_len, limits.prefill_budget)
    specs = [select(it, arch).spec for it in runner.attention_problems()]
    if any(spec.copies_keys for spec in specs):
        length = limits.max_model_len
    vocab_size, block_size = runner.model.network.vocab, runner.kv_cache.block_size
    for output in dummy_steps.largest_steps(max(2, length), limits, vocab_size, block_size):
        _compute(runner, output)


def check_scores(runner: ModelRunner) -> None:
    """Check that the model computes numbers, since each request would fail otherwise.

    Not with several ranks, which warm up by themselves: the sums of one rank say nothing about the model.

    Raises:
        StartupError: the scores of the tokens are not finite.
    """
    model = runner.model
    if model.num_ranks > 1:
        return
    sampled = _compute(runner, dummy_steps.short_prompt(runner.kv_cache.block_size)).sampled
    if any(result.error == NOT_FINITE for results in sampled.prefill for result in results):
        quantized = f" with weights in {model.weight_format.name}" if model.is_quantized else ""
        raise StartupError(
            f"the model's scores are not finite numbers in {model.dtype_name}{quantized}, so every request would fail:"
            " its weights are damaged, or values of its layers are beyond what that can hold; set --dtype to bfloat16"
            " or float32 and --quantization to none"
        )


def _compile(runner: ModelRunner, limits: SchedulerConfig, say: Callable[[str], None]) -> None:
    """Compile all kernels in parallel without launching them."""

    def report(compiled: int, found: int, name: str) -> None:
        say(f"compiling kernels, {compiled} of {found} ({name})")

    try:
        with compile_ahead(usable_cpus().logical, report):
            _compute_first_steps(runner, limits, lambda _: None)
    except Exception:
        # A kernel that does not compile raises again when it is launched.
        log.warning(
            "compiling the kernels in advance failed for at least one of them", exc_info=True
        )


def _compute_first_steps(
    runner: ModelRunner, limits: SchedulerConfig, say: Callable[[str], None]
) -> None:
    """Compute a minimal set of steps that uses every kernel."""
    block_size, on_gpu = runner.kv_cache.block_size, runner.device.type == "cuda"
    lengths = _distinct_lengths(runner, limits.max_model_len)
    for number, length in enumerate(lengths, start=1):
        say(f"warming up, {number} of {len(lengths)}")
        for output in dummy_steps.first_steps(length, limits, block_size):
            _compute(runner, output)
        if on_gpu:
            _compute(runner, dummy_steps.unsampled_token(length, block_size))
            for output in dummy_steps.crowds(length, limits, block_size):
                _plan(runner, output)
        if runner.sharing_rule is not None:
            for output in dummy_steps.sharing(length, limits, block_size):
                _compute(runner, output, lambda *_: True)
    if on_gpu:
        _compute(runner, dummy_steps.longest_chunk(limits, block_size))
        _compute(runner, dummy_steps.short_prompt(block_size))
        if runner.deterministic and min(limits.max_queries, limits.max_num_batched_tokens) > 1:
            _compute(runner, dummy_steps.draft(block_size))
        counts = (*runner.model.row_counts, *_ROTATED_TOKENS)
        few = dummy_steps.few_rows(counts, limits, block_size)
        launched = launched_rows(runner.model.executors.problem(detect(runner.device)))
        most = row_counts(limits.max_num_seqs, limits.exact_rows)[-1]
        most = max(most, limits.exact_rows if limits.max_queries > 1 else 1)
        with_drafts = dataclasses.replace(
            limits,
            max_num_seqs=most,
            max_num_batched_tokens=max(most, limits.max_num_batched_tokens),
            max_prefill_tokens=max(most, limits.prefill_budget),
        )
        in_one_launch = dummy_steps.few_rows(launched, with_drafts, block_size)
        by_layers = dummy_steps.prompts(launched, limits, block_size)
        ways = dummy_steps.sampling_ways(block_size)
        for output in (*few, *in_one_launch, *by_layers, *ways):
            _compute(runner, output)
        for num_rows in _ARGMAX_ROWS:
            _argmax(runner, min(num_rows, limits.max_num_seqs))


def _distinct_lengths(runner: ModelRunner, longest: int) -> list[int]:
    """Return sequence lengths up to `longest`, one for each launch configuration of the attention kernels."""
    arch = detect(runner.device)
    if arch.is_cpu:
        return [min(longest, _CPU_TOKENS)]
    lengths = {longest}
    for problem in runner.attention_problems():
        bounds = (row.max_seqlen_k for row in select(problem, arch).launches)
        lengths.update(min(longest, max(2, bound)) for bound in bounds if bound is not None)
    return sorted(lengths)


@torch.inference_mode()
def _plan(runner: ModelRunner, output: SchedulerOutput) -> None:
    """Plan the attention of a step, which compiles the kernels for its number of sequences."""
    if runner.deterministic:
        output = dummy_steps.deterministic(output)
    runner.model.attention.plan_step(runner.pack(output, None).input, runner.kv_cache)


def _compute(
    runner: ModelRunner, output: SchedulerOutput, sharing_rule: SharingRule | None = None
) -> StepResult:
    if runner.deterministic:
        output = dummy_steps.deterministic(output)
    kept = runner.sharing_rule
    runner.sharing_rule = sharing_rule or kept
    try:
        return runner.execute(output)
    finally:
        runner.sharing_rule = kept
        for scheduled in (*output.decode, *output.prefill):
            runner.forget(scheduled.sequence.request_id)


@torch.inference_mode()
def _argmax(runner: ModelRunner, num_rows: int) -> None:
    """Compute the logits and the argmax of rows of zeros, as a recording of `num_rows` rows does."""
    model, network = runner.model, runner.model.network
    hidden = torch.zeros(num_rows, network.hidden, dtype=model.dtype, device=model.device)
    logits = hidden.new_empty(num_rows, network.vocab)
    tokens = hidden.new_empty(num_rows, dtype=torch.int64)
    logprobs = torch.empty_like(tokens, dtype=torch.float32)
    head = model.executors.layers.kernels(deterministic=runner.deterministic).head
    head.argmax(hidden, logits, tokens, logprobs)
