"""Whether a decode step's norms, rotation, cache write and attention are one launch, and how it is cut: a pure choice.

One launch (`kernels.fused.attend_token`) saves what lies between two where attention reads little; with more rows or
longer sequences a kernel of its own that uses tensor cores is faster. Knows problems and processors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.arch import GPUArch
    from kernels.plan import AttentionProblem

MOST_ROWS = 8
MOST_SPLITS = 32
MOST_KV_HEADS = 256
_MOST_GROUP = 4
"""Query heads of a key-value head whose outputs fit in the registers of a thread."""
_MOST_DEPTH = 4
"""Keys and values of a thread that fit in its registers beside the outputs."""
_WIDEST_HEAD = 256
_VECTOR = 8
_AMPERE = 80


@dataclass(frozen=True, slots=True)
class TokenLaunch:
    """How the work is cut.

    Attributes:
        depth: keys that a line of threads (`kernels.fused.attend_token.lines_of`) has on their way at once.
        splits: most programs for a sequence and key-value head.
        num_warps: of a program.
    """

    depth: int
    splits: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class TokenStep:
    """A decode step of one token a sequence.

    Attributes:
        problem: of its attention.
        rows: sequences.
        max_keys: of a sequence, or an upper bound of it.
    """

    problem: AttentionProblem
    rows: int
    max_keys: int

    def __str__(self) -> str:
        """One line for logs and tables."""
        return f"{self.rows} x {self.max_keys} keys, {self.problem}"


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What was chosen for a step.

    Attributes:
        launch: of the one launch; None for two.
        why: one sentence for people.
        measured: whether the choice was made by timing on this architecture.
    """

    launch: TokenLaunch | None
    why: str
    measured: bool = False


def select_token(
    step: TokenStep,
    arch: GPUArch,
    table: Callable[[TokenStep, GPUArch], TokenChoice | None] = lambda *_: None,
) -> TokenChoice:
    """Choose between one launch and two; pure, so it also plans for absent hardware.

    Args:
        step: what is computed.
        arch: where.
        table: looks up what was timed, or returns None.
    """
    reason = objection(step, arch)
    if reason:
        return TokenChoice(None, reason)
    found = table(step, arch)
    if found is not None:
        return found
    return TokenChoice(None, f"not measured for {step}")


def objection(step: TokenStep, arch: GPUArch) -> str:
    """Say why a step cannot be one launch; empty where it can."""
    problem = step.problem
    tests = (
        (arch.is_cpu, "a CPU has no kernels of ours"),
        (arch.sm < _AMPERE, f"it needs sm_{_AMPERE}, this is sm_{arch.sm}"),
        (not 0 < step.rows <= MOST_ROWS, f"{step.rows} rows; it takes 1 to {MOST_ROWS}"),
        (problem.kv_dtype is not None, f"no cache in {problem.kv_dtype}"),
        (problem.block_size is None, "no packed keys"),
        (
            problem.num_kv_heads > MOST_KV_HEADS,
            f"{problem.num_kv_heads} key-value heads are too many",
        ),
        (problem.max_query_tokens > 1, "one query token a sequence only"),
        (problem.lse, "no log-sum-exp"),
        (not problem.causal, "causal only"),
        (problem.batch_invariant, "its splits depend on the number of rows"),
        (
            problem.group_size > _MOST_GROUP,
            f"{problem.group_size} query heads for a key-value head; it takes {_MOST_GROUP}",
        ),
        (
            problem.head_dim % (2 * _VECTOR) != 0 or problem.head_dim > _WIDEST_HEAD,
            f"no head dim of {problem.head_dim}",
        ),
    )
    return next((reason for refused, reason in tests if refused), "")


def launch_mistakes(launch: TokenLaunch) -> list[str]:
    """List why a launch does not fit its kernel; empty where it does."""
    found = [
        f"{name} is {value}; it must be a power of two"
        for name in ("depth", "splits", "num_warps")
        if (value := getattr(launch, name)) < 1 or value.bit_count() != 1
    ]
    limits = (("depth", _MOST_DEPTH), ("splits", MOST_SPLITS))
    found += [
        f"{name} is {value}; it must be at most {most}"
        for name, most in limits
        if (value := getattr(launch, name)) > most
    ]
    return found
