"""What computes a step: the protocol of executors, and what each states of itself for the choice among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from kernels import GPUArch
    from kernels.weight_format import WeightFormat
    from model.device.kv_cache import KVCache
    from model.executors.columns import Bucket
    from model.executors.step import StepInput, StepOutput
    from model.network.parameters import DecoderParameters
    from model.network.spec import Network

T = TypeVar("T")


class Executor(Protocol):
    """Computes the steps of a bucket, bound to a model and its state on the device."""

    def step(
        self, step: StepInput, sampled: Tensor | None, out: StepOutput | None, /
    ) -> StepOutput:
        """Compute a step; see `DecoderLM.step`."""


@dataclasses.dataclass(frozen=True)
class ModelProblem:
    """A model on a processor, for which executors say what they do not support. The processor may be absent.

    Attributes:
        network: what one rank computes.
        dtype: name of the dtype of its activations.
        weight_format: of the layers' matrices, or that of all matrices if it is one of `LIBRARY_FORMATS`.
        arch: the processor.
        kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
        num_ranks: that share the model.
        unmeasured: whether kernels may be chosen that were never measured on a GPU.
        refusals: why the driver has refused launches so far.
        other_formats: of the layers' matrices that are not in `weight_format`, each once.
        is_in_library: whether the C library for CPUs has the matrices.
    """

    network: Network
    dtype: str
    weight_format: WeightFormat
    arch: GPUArch
    kv_dtype: str | None = None
    num_ranks: int = 1
    unmeasured: bool = False
    refusals: tuple[str, ...] = ()
    other_formats: tuple[WeightFormat, ...] = ()
    is_in_library: bool = False


class StatelessExecutor(Protocol):
    """Computes the steps of any bucket over a state that it is given."""

    def step(
        self, state: KVCache, step: StepInput, sampled: Tensor | None, out: StepOutput | None
    ) -> StepOutput:
        """Compute a step; see `DecoderLM.step`."""

    def reserve_positions(self, num_positions: int) -> None:
        """See `DecoderLM.reserve_positions`."""


class ExecutorOfState(NamedTuple):
    """A stateless executor with a state."""

    executor: StatelessExecutor
    state: KVCache

    def step(
        self, step: StepInput, sampled: Tensor | None, out: StepOutput | None, /
    ) -> StepOutput:
        """See `Executor.step`."""
        return self.executor.step(self.state, step, sampled, out)


class Bindings(Protocol):
    """What executors bind, of one model.

    Attributes:
        model: its parameters.
    """

    model: DecoderParameters

    @property
    def layers(self) -> StatelessExecutor:
        """Computes layer by layer."""

    @property
    def cpu_library(self) -> StatelessExecutor | None:
        """Has the packed matrices; None where they are not packed for the C library."""

    @property
    def modules(self) -> StatelessExecutor | None:
        """Computes a network with modules of `transformers`; None for any other."""

    def bound_once(self, key: Hashable, kv_cache: KVCache, bind: Callable[[], T]) -> T:
        """Return what has been bound to a cache under a key; `bind` binds it at its first use."""


class ExecutorSpec(NamedTuple):
    """One way to compute steps.

    Attributes:
        name: for plans.
        unsupported: lists why it cannot compute a bucket's steps of a model; empty if it can.
        bind: makes the executor, where `unsupported` is empty; bound kernels are kept and serve several buckets.
        describe: a remark for plans; empty for none.
    """

    name: str
    unsupported: Callable[[ModelProblem, Bucket], tuple[str, ...]]
    bind: Callable[[Bindings, KVCache, Bucket], Executor]
    describe: Callable[[ModelProblem], str] = lambda _problem: ""
