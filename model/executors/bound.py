"""The executors of a model, bound to its caches, and why it has no deterministic steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from kernels import NoKernelError
from kernels.linear.cpu.lora import computes
from kernels.selection import VectorProblem, triton_unsupported
from model.executors import cpu_library, single_launch
from model.executors.columns import Bucket
from model.executors.executor import ModelProblem
from model.executors.layers.layer_kernels import layer_kernels
from model.executors.layers.limits import nondeterministic
from model.executors.table import choose_executor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kernels import GPUArch
    from model.device.kv_cache import KVCache
    from model.executors.executor import Executor
    from model.executors.layers.executor import Layers
    from model.executors.modules.executor import ModulesExecutor
    from model.network.parameters import DecoderParameters

_logger = logging.getLogger(__name__)
_MOST_BUCKETS: Final = 4096
T = TypeVar("T")


class BoundExecutors:
    """Chooses and binds the executor of each bucket of a model's steps when it is first needed.

    Args:
        model: its parameters.
        layers: computes layer by layer; None for a network with modules.

    Attributes:
        model: see above.
        layers: see above; bound again for serving. Deleted where the C library has packed the matrices.
        modules: computes a network with modules; None for any other.
        cpu_library: has the packed matrices; None where they are not packed for the C library.
        for_serving: whether the parameters are bound to kernels for serving; until then the layers compute every step.
    """

    layers: Layers

    def __init__(self, model: DecoderParameters, layers: Layers | None) -> None:
        self.model = model
        if layers is not None:
            self.layers = layers
        self.modules: ModulesExecutor | None = None
        self.cpu_library: cpu_library.CPULibrary | None = None
        self.for_serving = False
        self._refusals: tuple[str, ...] = ()
        self._found: WeakKeyDictionary[KVCache, dict[Bucket, Executor]] = WeakKeyDictionary()
        self._kept: WeakKeyDictionary[KVCache, dict[Hashable, Any]] = WeakKeyDictionary()

    def begin_serving(self) -> None:
        """Forget what is bound for training."""
        self.for_serving = True
        self._found.clear()
        self._kept.clear()

    def find(self, bucket: Bucket, kv_cache: KVCache) -> Executor:
        """Return the executor of a bucket's steps over a cache: the first of the table that supports them."""
        by_bucket = self._found.get(kv_cache)
        if by_bucket is None or len(by_bucket) > _MOST_BUCKETS:
            by_bucket = self._found[kv_cache] = {}
        found = by_bucket.get(bucket)
        if found is None:
            problem = self.problem(self.model.arch, kv_cache.kv_dtype)
            spec = choose_executor(problem, bucket).spec
            found = by_bucket[bucket] = spec.bind(self, kv_cache, bucket)
        return found

    def bound_once(self, key: Hashable, kv_cache: KVCache, bind: Callable[[], T]) -> T:
        """Return what an executor has bound to a cache under a key; `bind` binds it at its first use."""
        kept = self._kept.setdefault(kv_cache, {})
        if key not in kept:
            kept[key] = bind()
        found: T = kept[key]
        return found

    def problem(self, arch: GPUArch, kv_dtype: str | None = None) -> ModelProblem:
        """Describe the model on a processor, which need not be present, for the choice of executors.

        Args:
            arch: the processor.
            kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
        """
        model = self.model
        return ModelProblem(
            model.network,
            model.dtype_name,
            model.weight_format,
            arch,
            kv_dtype,
            model.num_ranks,
            model.unmeasured_kernels,
            self._refusals if self.for_serving or model.is_meta else ("bound for training",),
            other_formats=model.other_formats,
            is_in_library=model.is_in_library,
        )

    @property
    def has_refusals(self) -> bool:
        """Whether the driver has refused a single launch."""
        return bool(self._refusals)

    def replaces_single_launch(self, error: RuntimeError) -> bool:
        """Compute all later steps layer by layer if an error is the driver's refusal of a single launch.

        Args:
            error: raised by a launch, by its recording or by a replay.

        Returns:
            Whether the step can be computed again, without a single launch.
        """
        reason = single_launch.launch_refusal(error)
        if reason is None or reason in self._refusals:
            return False
        _logger.warning("a decode step is not a single launch: %s", reason)
        self._refusals += (reason,)
        self._found.clear()
        self._kept.clear()
        return True


def deterministic_unsupported(
    model: DecoderParameters, arch: GPUArch, block_size: int, kv_dtype: str | None = None
) -> tuple[str, ...]:
    """List why a model on `arch` cannot compute deterministic steps; empty if it can.

    Args:
        model: the model.
        arch: the processor; it need not be present.
        block_size: tokens per cache block.
        kv_dtype: dtype of a quantized cache, as `KVCache.kv_dtype`.
    """
    if model.is_in_library:
        return ()
    if model.network.modules is not None:
        return ("modules of transformers give no equal bits in every step",)
    reasons = nondeterministic(model.network, model.dtype_name, arch)
    if not arch.is_cpu:
        reasons += triton_unsupported(VectorProblem(model.dtype_name), arch)
    elif kv_dtype is not None:
        return ("on a CPU no KV cache in FP8: set --kv-cache-dtype auto", *reasons)
    elif not model.weight_format.is_quantized:
        needed = "on a CPU the C library must multiply by weights in int8 or int4"
        return (f"{needed}: set --quantization int8 or int4, and --dtype auto", *reasons)
    elif model.num_ranks > 1:
        reasons += (f"{model.num_ranks} ranks share the model on a CPU: set --tensor-parallel 1",)
    elif model.adapters is not None and not all(
        computes(it) for layer in model.adapters.layers for it in layer.values()
    ):
        reasons += ("matrices whose adapters PyTorch multiplies: sizes are no multiples of 16",)
    bucket = Bucket(
        rows=1, prompt_tokens=1, prompt_seqs=1, columns=1, num_logits=1, deterministic=True
    )
    try:
        for _ in layer_kernels(model, bucket, arch, block_size, kv_dtype):
            pass  # chosen
    except NoKernelError as error:
        text = str(error)
        if arch.is_cpu:  # without the reasons of the kernels for GPUs
            text = f"{text.partition(': ')[0]}: set --quantization int8 or int4 where weights are full numbers"
        return (*reasons, text)
    return reasons
