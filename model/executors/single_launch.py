"""The executor of decode steps that are a single launch: which ones, and their kernels bound to a model and a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kernels.selection import reasons as reasons_of
from kernels.step.single_launch import (
    ROW_COUNTS,
    LayerWeights,
    StepShape,
    StepWeights,
    bind_step,
    computed_as_rows,
    has_run,
    launch_refusal,
)
from kernels.step.single_launch import unsupported as shape_unsupported
from model.executors import support
from model.executors.columns import Want
from model.executors.executor import ExecutorSpec
from model.executors.step import StepOutput
from model.network import spec

__all__ = [
    "ROW_COUNTS",
    "SINGLE_LAUNCH",
    "SingleLaunch",
    "bind_single_launch",
    "exact_rows",
    "launch_refusal",
    "launched_rows",
    "step_shape",
    "unsupported",
]

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.step.single_launch import StepKernel
    from model.device.kv_cache import KVCache
    from model.executors.columns import Bucket
    from model.executors.executor import Bindings, ModelProblem
    from model.executors.step import StepInput
    from model.network.parameters import DecoderParameters

READS: Final[support.Reads] = {
    spec.Network: {"tied": support.ALL, "embedding_factor": support.ALL},
    spec.Layer: {"post_norms": support.ALL},
    spec.Norm: {"eps": support.ALL, "float32": support.ALL},
    spec.Attention: dict.fromkeys(("window", "rotary", "qk_norm", "bias"), support.ALL),
    spec.Rotary: support.ALL,
    spec.Dense: {"activation": {"gelu_tanh"}},
}
"""What the launch of one sequence computes."""
VARYING: Final = ((spec.Attention, "window"), (spec.Attention, "rotary"))
READS_OF_ROWS: Final[support.Reads] = {
    **READS,
    spec.Network: {"tied": support.ALL},
    spec.Layer: {},
    spec.Norm: {"eps": support.ALL},
    spec.Dense: {},
}
"""What the launch of several sequences computes."""
VARYING_OF_ROWS: Final = ((spec.Attention, "window"),)


class SingleLaunch:
    """The single launch of steps of some sequences, bound to a model and a cache; it always computes the argmax.

    Args:
        model: for which `unsupported` returns no reasons. Its parameters may not be reallocated afterwards.
        kv_cache: on the model's device; likewise.
        rows: sequences of a step, 1 or one of `ROW_COUNTS`.
    """

    def __init__(self, model: DecoderParameters, kv_cache: KVCache, rows: int) -> None:
        self._model = model
        self._launch = bind_single_launch(model, kv_cache, rows)
        self._as_rows = computed_as_rows(step_shape(model.network), rows, model.weight_format)

    def step(
        self, step: StepInput, sampled: Tensor | None, out: StepOutput | None, /
    ) -> StepOutput:
        """See `Executor.step`."""
        arrays, rows, model = step.device, step.bucket.rows, self._model
        device, vocab = model.device, model.network.vocab
        logits = (
            torch.empty((rows, vocab), dtype=model.dtype, device=device)
            if out is None
            else out.logits
        )
        tokens, logprobs = (None, None) if out is None else (out.tokens, out.logprobs)
        if tokens is None or logprobs is None:
            tokens = torch.empty(rows, dtype=torch.int64, device=device)
            logprobs = torch.empty_like(tokens, dtype=torch.float32)
        sampled_rows = arrays.sampled_rows
        if sampled is None:
            sampled = torch.empty_like(tokens)
            sampled_rows = torch.arange(rows, device=device)
        self._launch(
            arrays.token_ids,
            arrays.positions,
            *((arrays.earlier,) if self._as_rows else ()),
            arrays.slot_mapping,
            arrays.block_table,
            model.rope_tables,
            logits,
            tokens,
            logprobs,
            sampled,
            *((sampled_rows,) if self._as_rows else ()),
        )
        return StepOutput(logits, tokens, logprobs)


def bind_single_launch(model: DecoderParameters, kv_cache: KVCache, rows: int = 1) -> StepKernel:
    """Bind the kernel; arguments as for `SingleLaunch`."""
    weights = [
        LayerWeights(
            layer.qkv.weight,
            layer.output.weight,
            layer.gate_up.weight,
            layer.down.weight,
            *layer.pre_norms,
            layer.q_norm,
            layer.k_norm,
            layer.qkv_bias,
            layer.spec.mixer.window,
            layer.output_norm,
            layer.down_norm,
        )
        for layer in model.decoder_layers
    ]
    step = StepWeights(
        step_shape(model.network),
        weights,
        model.embedding.numbers,
        model.head.numbers,
        model.norm,
    )
    return bind_step(step, kv_cache.layers, kv_cache.scales, model.arch, rows)


def step_shape(network: spec.Network) -> StepShape:
    """Return the sizes of a model that the kernel is compiled for."""
    first = network.layers[0]
    mixer, mlp = first.mixer, first.mlp
    return StepShape(
        hidden_size=network.hidden,
        inner_size=mlp.inner,
        num_heads=mixer.num_heads,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        vocab_size=network.vocab,
        eps=network.norm.eps,
        softmax_scale=mixer.scale,
        activation=mlp.activation,
        embedding_factor=network.embedding_factor,
        post_norms=first.post_norms,
        float32_norms=network.norm.float32,
        local_rope=len(network.rotaries) > 1,
    )


def unsupported(problem: ModelProblem, rows: int = 1) -> tuple[str, ...]:
    """List why a decode step cannot be a single launch; empty if it can.

    Args:
        problem: the model and the processor.
        rows: sequences of the step, 1 or one of `ROW_COUNTS`.
    """
    network = problem.network
    missing = support.unsupported(network, READS, VARYING)
    if problem.num_ranks > 1:
        missing = (*missing, "no tensor parallelism")
    if any(it.ordered for it in (problem.weight_format, *problem.other_formats)):
        missing = (*missing, "the inputs of some weights have another order (act-order)")
    missing += problem.refusals
    if problem.other_formats:
        names = dict.fromkeys(it.name for it in (problem.weight_format, *problem.other_formats))
        missing += (f"matrices in several formats: {', '.join(names)}",)
    if not support.is_attention_and_dense(network):
        return missing
    reasons = shape_unsupported(
        step_shape(network),
        getattr(torch, problem.dtype),
        problem.arch,
        rows,
        problem.weight_format,
        unmeasured=problem.unmeasured,
    )
    missing += support.different_norms(network, "eps", "float32")
    mixers = [layer.mixer for layer in network.layers]
    kinds = {(mixer.window is None, mixer.rotary) for mixer in mixers}
    if len(kinds) > len({has_window for has_window, _ in kinds}):
        missing += ("no rotary embeddings that differ among layers without a window, or with one",)
    if rows > 1:
        of_rows = support.unsupported(network, READS_OF_ROWS, VARYING_OF_ROWS)
        missing += tuple(f"{it} for several sequences" for it in of_rows if it not in missing)
    return reasons + missing


def launched_rows(problem: ModelProblem) -> tuple[int, ...]:
    """Return the numbers of sequences, from 2 on, for which a decode step is a single launch."""
    return tuple(rows for rows in ROW_COUNTS if not unsupported(problem, rows))


def exact_rows(problem: ModelProblem) -> int:
    """Return up to how many rows, a power of two, a step computes each with the same bits whatever the others are."""
    shape = step_shape(problem.network) if support.is_attention_and_dense(problem.network) else None
    most = 1
    if shape is not None and computed_as_rows(shape, 1, problem.weight_format):
        for rows in ROW_COUNTS:
            if unsupported(problem, 1) or unsupported(problem, rows):
                break
            most = rows
    return most


def _unsupported(problem: ModelProblem, bucket: Bucket) -> tuple[str, ...]:
    counts = (1, *ROW_COUNTS)
    of_bucket = reasons_of(
        (bucket.deterministic, "deterministic"),
        (
            bucket.rows not in counts or bucket.queries > 1 or not bucket.has_all_logits,
            f"steps of {', '.join(map(str, counts))} sequences with a token each only",
        ),
        (bucket.shared_blocks > 0, "a shared prefix is read once"),
        (bucket.want is not Want.TOKENS, "tokens of a prompt are scored"),
        *((True, f"no {name} of sequences") for name in bucket.extra_columns),
    )
    return of_bucket or unsupported(problem, bucket.rows)


def _bind(bindings: Bindings, state: KVCache, bucket: Bucket) -> SingleLaunch:
    rows = bucket.rows
    return bindings.bound_once(
        ("single launch", rows), state, lambda: SingleLaunch(bindings.model, state, rows)
    )


def _describe(problem: ModelProblem) -> str:
    return "" if has_run(problem.arch) else "no GPU of this architecture has run it"


SINGLE_LAUNCH: Final = ExecutorSpec("single_launch", _unsupported, _bind, _describe)
"""Computes a decode step of one or a few sequences in one launch on a GPU."""
