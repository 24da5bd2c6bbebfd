"""What cannot be computed layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.norms.cpu_library import is_exact
from kernels.selection import reasons
from model.executors import support
from model.executors.columns import ADAPTER
from model.executors.layers.tables import MIXERS, MLPS, READS
from model.network import spec
from model.network.spec import Attention
from model.network.sublayers import Laurel, PerLayerInput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.arch import GPUArch
    from kernels.recurrent.registry import RecurrentSpec
    from kernels.selection import Choice
    from model.executors.columns import Bucket
    from model.executors.executor import ModelProblem


def unsupported(problem: ModelProblem, bucket: Bucket) -> tuple[str, ...]:
    """List why the steps of a bucket cannot be computed layer by layer; empty if they can."""
    network = problem.network
    tables = {part: row.reads for table in (MIXERS, MLPS) for part, row in table.items()}
    in_full = (
        bucket.deterministic and problem.arch.is_cpu and not problem.weight_format.is_quantized
    )
    return (
        *(("weights are in the layout of the C library",) if problem.is_in_library else ()),
        *(("no deterministic products of full numbers on a CPU",) if in_full else ()),
        *support.unread(network, {**READS, **tables}),
        *_layer_norms(network),
        *_late_norms(problem),
        *_value_norms(network),
        *_several_streams(network),
        *(f"no {name} of sequences" for name in bucket.extra_columns if name != ADAPTER),
        *(nondeterministic(network, problem.dtype, problem.arch) if bucket.deterministic else ()),
        *(
            _no_drafts(problem, chained=bucket.chained)
            if bucket.queries > 1 or bucket.chained
            else ()
        ),
    )


def nondeterministic(network: spec.Network, dtype: str, arch: GPUArch) -> tuple[str, ...]:
    """List the parts that have no kernel for deterministic steps on a processor.

    Args:
        network: the network.
        dtype: name of the dtype of activations.
        arch: the processor.
    """
    # PyTorch's products of several streams have other bits beside other rows.
    found = [] if network.streams is None else ["no deterministic AltUp"]
    found += _inexact(network) if arch.is_cpu else []
    for mixer, choice in _other_kernels(network, dtype, arch):
        name = f"no deterministic {mixer}"
        if choice is None:
            found.append(name)
        elif not choice.spec.batch_invariant:
            why = f"{choice.spec.name} is not batch invariant"
            found.append(f"{name}: {'; '.join((why, *map(str, choice.refusals)))}")
    return tuple(dict.fromkeys(found))


def _other_kernels(
    network: spec.Network, dtype: str, arch: GPUArch
) -> Iterator[tuple[str, Choice[RecurrentSpec] | None]]:
    """Yield the names of mixers other than attention, and their kernels; None for one that has no registry."""
    for mixer in dict.fromkeys(mixer for it in network.layers for mixer in it.mixers):
        row = MIXERS.get(type(mixer))
        if not isinstance(mixer, Attention) and row is not None:
            choice = None if row.choice is None else row.choice(mixer, dtype, arch)
            yield type(mixer).__name__, choice


def _inexact(network: spec.Network) -> list[str]:
    """List the parts that PyTorch computes on a CPU by functions with other bits at the ends of what a thread computes.

    Sums of vectors and products of numbers have none.
    """
    mlps = {it.mlp for it in network.layers}
    inexact = {
        it.activation
        for it in mlps
        if it.sparsity or not is_exact(it.activation, it.inner, gated=it.gated)
    }
    parts = (it for layer in network.layers for it in layer.parts)
    others = {type(it).__name__ for it in parts if isinstance(it, (PerLayerInput, Laurel))}
    return [
        *(f"no deterministic {name} activation" for name in sorted(inexact)),
        *(f"no deterministic {name}" for name in sorted(others)),
        *reasons(
            (network.logit_softcap is not None, "no deterministic softcap of logits"),
            (
                any(it.query_scale is not None for it in network.attentions),
                "no deterministic scale of queries",
            ),
        ),
    ]


def _no_drafts(problem: ModelProblem, *, chained: bool) -> tuple[str, ...]:
    """List the mixers that cannot compute rows with drafts, or `chained` ones."""
    found = (
        f"no {mixer} of drafts"
        for mixer, choice in _other_kernels(problem.network, problem.dtype, problem.arch)
        if chained or choice is None or not choice.spec.several_queries
    )
    return tuple(dict.fromkeys(found))


def _layer_norms(network: spec.Network) -> tuple[str, ...]:
    """List where only RMS norms are computed and the network has layer norms."""
    per_head = (it.qk_norm for it in network.attentions if not it.qk_norm_by_head)
    after = (it.norm for it in network.layers if it.post_norms)
    others = any(it.post_norms and type(it.mixer) is not Attention for it in network.layers)
    return reasons(
        (any(it and it.kind == "layer" for it in per_head), "no layer norms of queries and keys"),
        (any(it.kind == "layer" for it in after), "no layer norms after attention and MLP"),
        (others, "no norms after mixers other than attention"),
    )


def _late_norms(problem: ModelProblem) -> tuple[str, ...]:
    """List why the norms after the rotation cannot be computed: their weights are applied to rotated queries alone."""
    late = [it for it in problem.network.attentions if it.qk_norm is not None and it.late_qk_norm]
    scaled = any(it.rotary is not None and it.rotary.attention_factor != 1 for it in late)
    return reasons(
        (
            bool(late) and problem.kv_dtype is not None,
            "no norms of queries and keys after the rotation over a KV cache in FP8: set --kv-cache-dtype auto",
        ),
        (scaled, "no norms of queries and keys after a rotation that scales them"),
        (
            any(it.joint_qk_norm for it in late),
            "no norms of all queries and of all keys after the rotation",
        ),
    )


def _value_norms(network: spec.Network) -> tuple[str, ...]:
    """List where norms of values cannot be computed, because the rotation includes no norms of queries and keys."""
    others = (
        it.qk_norm is None or it.joint_qk_norm or it.qk_norm_by_head or it.late_qk_norm
        for it in network.attentions
        if it.value_norm
    )
    return reasons((any(others), "no norms of values without norms of queries and keys per head"))


def _several_streams(network: spec.Network) -> tuple[str, ...]:
    """List what layers of several streams, and only these, have besides."""
    several = [it for it in network.layers if it.altup is not None]
    others = [it for it in network.layers if it.altup is None]
    return reasons(
        (any(it.scaled for it in several), "no scale of several streams"),
        (any(it.parallel for it in several), "no attention and MLP in parallel of several streams"),
        (any(it.laurel is not None for it in others), "no LAuReL of one stream"),
    )
