"""Chooses the number of engine processes and the GPU of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.cli.nvidia import count_gpus, may_have_gpu
from server.engine.core.start_checks import StartupError
from server.engine.link.spawn import gpu_variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from server.cli.settings import Settings


def engine_environments(settings: Settings) -> Sequence[Mapping[str, str]]:
    """Return the engine processes of a service: for each, the variables of its environment that make it use its GPU.

    On a CPU they have none; there the engines share processors and memory.

    Raises:
        StartupError: there are fewer GPUs than engines.
    """
    wanted = settings.data_parallel
    if wanted == 1:
        return ({},)
    num_gpus = count_gpus() if settings.device != "cpu" and may_have_gpu() else 0
    if wanted is None:
        wanted = max(1, num_gpus)
    if wanted == 1:
        return ({},)
    if num_gpus or settings.device == "cuda":
        if wanted > num_gpus:
            raise StartupError(
                f"--data-parallel {wanted}: each engine needs a GPU of its own, and {num_gpus} "
                f"{'is' if num_gpus == 1 else 'are'} visible (CUDA_VISIBLE_DEVICES chooses among those of the machine)"
            )
        return tuple(gpu_variables(number) for number in range(wanted))
    return ({},) * wanted
