"""The table of executors, most preferred first, and the choice among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kernels.selection import Choice, choose
from model.executors import cpu_library, single_launch
from model.executors.layers import executor as layers
from model.executors.modules import executor as modules

if TYPE_CHECKING:
    from model.executors.columns import Bucket
    from model.executors.executor import ExecutorSpec, ModelProblem

EXECUTORS: Final = (
    single_launch.SINGLE_LAUNCH, cpu_library.CPU_LIBRARY, layers.LAYERS, modules.MODULES,
)  # fmt: skip


def choose_executor(
    problem: ModelProblem, bucket: Bucket, what: str = "step"
) -> Choice[ExecutorSpec]:
    """Choose the executor of a bucket's steps.

    Args:
        problem: the model and the processor.
        bucket: of the steps.
        what: they are, for the texts of the choice.

    Raises:
        NoKernelError: no executor supports them; lists every reason.
    """
    return choose(EXECUTORS, lambda row: row.unsupported(problem, bucket), what, problem.arch)
