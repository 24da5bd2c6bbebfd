"""The conditions under which an engine computes, and how those of two receipts differ."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from server.receipts.record import Conditions
from server.version import version

if TYPE_CHECKING:
    from server.engine.core.messages import EngineInfo
    from server.engine.core.plan_report import PlanReport


def conditions_of(
    info: EngineInfo, weights: str | None, revision: str | None = None, adapter: str | None = None
) -> Conditions:
    """Return the conditions of an engine.

    Args:
        info: that the engine reported.
        weights: digest of its checkpoint; None if it is not known.
        revision: commit of which its checkpoint is a snapshot; None if it is none.
        adapter: digest of the adapter, in hexadecimal; None for the model alone.
    """
    instructions = info.versions.get("instructions")
    arch = info.plan.arch_name
    return Conditions(
        model=info.model_id,
        revision=revision,
        weights=weights,
        adapter=UNSET if adapter is None else f"sha256:{adapter}",
        quantization=info.quantization,
        dtype=info.dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        kernels=kernels_digest(info.plan),
        device=arch if instructions is None else f"{arch}, {instructions}",
        versions={"tessera": version(), "torch": info.versions.get("torch", "")},
    )


def kernels_digest(plan: PlanReport) -> str:
    """Return the digest of the executors and kernels of a plan, and of their launches.

    Reasons, peaks and sizes of memory do not count: they change no result.
    """
    phases = [
        (it.phase, it.sliding_window, it.softcap, it.kernel, it.launches) for it in plan.phases
    ]
    steps = [
        (
            it.step,
            it.executor,
            [(operation.operation, operation.kernel) for operation in it.operations],
        )
        for it in plan.steps
    ]
    content: Any = (phases, steps, plan.block_size, plan.num_ranks, plan.one_sequence)
    return f"sha256:{hashlib.sha256(msgspec.json.encode(content)).hexdigest()}"


def is_deterministic(info: EngineInfo, *, requested: bool) -> bool:
    """Return whether an engine computes a request with the same bits whatever else it computes."""
    return requested or info.plan.deterministic.requests == "all"


def differences(then: Conditions, now: Conditions) -> list[str]:
    """Return a phrase for each condition that is another one now: what it is, and what it was.

    The name of the model and its revision are none: a checkpoint may have another path here, and a revision may change
    other files. An unknown digest differs from any.
    """
    found = []
    for name in Conditions.__struct_fields__:
        old, new = getattr(then, name), getattr(now, name)
        if name in ("model", "revision"):
            continue
        if name == "adapter":
            if old != new:
                found.append(f"adapter {_adapter(new)} instead of {_adapter(old)}")
            continue
        if name == "versions":
            names = sorted(old.keys() | new.keys())
            found += [
                f"version of {it} {new.get(it, 'unknown')} instead of {old.get(it, 'unknown')}"
                for it in names
                if old.get(it) != new.get(it)
            ]
        elif old != new or old is None:
            words = name.replace("_", " ")
            found.append(f"{words} {_short(new)} instead of {_short(old)}")
    return found


def _adapter(value: str | UnsetType) -> str:
    return "none" if value is UNSET else _short(value)


def _short(value: str | None) -> str:
    """Return a value for a line of text; of a digest its beginning."""
    return "unknown" if value is None else f"{value:.19}" if value.startswith("sha256:") else value
