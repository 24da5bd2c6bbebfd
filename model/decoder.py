"""The decoder language model: its parameters, and the executors that compute with them.

The engine runs it step by step over a paged KV cache; training runs it over whole sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.linear.projection import Purpose
from model.executors.bound import BoundExecutors
from model.executors.cpu_library import CACHE_DTYPE, CPULibrary
from model.executors.layers.attention_plans import AttentionPlanner, attention_planner
from model.executors.layers.executor import Layers
from model.network.adapter_slots import AdapterSlots
from model.network.parameters import DecoderParameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from kernels.collective.communicator import Communicator
    from kernels.weight_format import WeightFormat
    from model.checkpoint.config import ModelConfig
    from model.device.kv_cache import KVCache
    from model.executors.step import StepInput, StepOutput


class DecoderLM(DecoderParameters):
    """A decoder of any supported family.

    Args:
        config: the model's configuration, including its family.
        dtype: dtype of parameters and activations.
        device: device of the parameters.
        weight_format: see `DecoderParameters`.
        communicator: see `DecoderParameters`.

    Attributes:
        config: of the whole model.
        executors: compute its steps. After `optimize` for the C library they have no `layers`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        weight_format: WeightFormat | Mapping[str, WeightFormat] | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(
            config.network,
            config.max_context,
            dtype,
            torch.device(device),
            weight_format,
            communicator,
        )
        self.config = config
        self._packed_bytes = 0
        self.executors = BoundExecutors(self, Layers(self, Purpose.TRAINING))

    def optimize(
        self,
        library_format: WeightFormat | None = None,
        threads: int = 1,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        """Bind the parameters to the fastest kernels of their device, for serving only.

        Afterwards the model cannot be trained. On a CPU it cannot be saved either, because the matrices are replaced by
        copies in the processor's packed layout. A tied head is copied too, because the embedding is still read row by
        row.

        Args:
            library_format: the `quantization` of a `CPULibrary`, which computes the model on a CPU whose
                `model.executors.cpu_library.unsupported` is empty; None for the other executors.
            threads: that compute a step in the C library; the products of layers have those of
                `kernels.cpu.workers.set_num_threads`.
            rounds_inputs: whether products of layers may round their inputs to 8 bits, where matrices are integers.
        """
        if self.is_packed:
            return
        self.rounds_inputs = rounds_inputs
        executors = self.executors
        executors.begin_serving()
        if library_format is not None:
            del executors.layers  # it holds the matrices, which are dropped one by one
            executors.cpu_library = CPULibrary(self, library_format, threads)
            self.assign_to_library(library_format)
            self.lm_head = None
            self.drop_embedding()
            return
        whole = self.weight_bytes
        del executors.layers  # as above
        executors.layers = Layers(self, Purpose.SERVING)
        self._packed_bytes = whole - self.weight_bytes

    def reserve_positions(self, num_positions: int) -> None:
        """Allocate the rotary tables for positions below `num_positions`, the only ones that later steps may use.

        Without this call, a step reserves every position that its cache can hold.
        """
        executors = self.executors
        (executors.cpu_library or executors.layers).reserve_positions(num_positions)

    def reserve_adapters(self, count: int, rank: int) -> None:
        """Allocate slots for adapters, to which the steps of sequences refer; after `optimize`.

        Args:
            count: number of slots.
            rank: the largest of an adapter.
        """
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        self.adapters = AdapterSlots(self.network, count, rank, dtype, self.device)
        if self.executors.cpu_library is not None:
            self.executors.cpu_library.bind_adapters(self.adapters)

    def step(
        self,
        step: StepInput,
        kv_cache: KVCache,
        sampled: Tensor | None = None,
        out: StepOutput | None = None,
    ) -> StepOutput:
        """Run one step: write its keys and values to the cache and compute what its bucket wants.

        The first executor of `model.executors.table` that supports the bucket computes it, for a deterministic step
        with kernels that are batch invariant (docs/decisions/0030-deterministic.md).

        Args:
            step: the step's arrays, already sent to the model's device.
            kv_cache: the cache; written.
            sampled: [capacity] int64, earlier sampled tokens, to which negative token ids of the step refer; None if
                there are no negative ids.
            out: where to write the logits, their argmax and its log-probability; the argmax is also written to
                `sampled`, at the step's `sampled_rows`. None computes only the logits, in a new tensor. Not with
                prompt scores.

        Returns:
            `out` if it is given, else the new logits, and the scores if the bucket wants them.
        """
        executors = self.executors
        try:
            return executors.find(step.bucket, kv_cache).step(step, sampled, out)
        except RuntimeError as error:
            if not executors.replaces_single_launch(error):
                raise
        return executors.find(step.bucket, kv_cache).step(step, sampled, out)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute the hidden states after the last norm of whole sequences, differentiably and without a cache.

        Args:
            input_ids: [B, L] int64.
            positions: [L] int64, each token's index in its sequence.

        Returns:
            [B, L, hidden_size] in the parameters' dtype. On a GPU only before `optimize`, and not for a model with a
            softcap of attention scores.
        """
        return self.executors.layers.dense(input_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., V] of hidden states [..., C] from `forward`, in their dtype."""
        return self.executors.layers.bound.head(hidden)

    def init_weights(self, std: float | None = None, seed: int | None = None) -> None:
        """Initialize the weights; see `DecoderParameters.initialize`.

        Args:
            std: standard deviation; None for the configuration's `initializer_range`.
            seed: seed of a separate generator; None uses PyTorch's global generator.
        """
        generator = None
        if seed is not None:
            generator = torch.Generator(self.device).manual_seed(seed)
        self.initialize(self.config.initializer_range if std is None else std, generator)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows for which projection kernels are compiled; empty if PyTorch computes the projections."""
        return self.executors.layers.row_counts

    @property
    def attention(self) -> AttentionPlanner:
        """Describes and plans the attention of the layers."""
        return attention_planner(self)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters, those included that `optimize` replaced by packed copies of the same dtype."""
        held = (*self.parameters(), *self.buffers())
        return self._packed_bytes + sum(tensor.nbytes for tensor in held)

    @property
    def is_packed(self) -> bool:
        """Whether `optimize` has replaced matrices by packed copies."""
        return self.executors.cpu_library is not None or self._packed_bytes > 0

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of a KV cache that is not quantized."""
        if self.executors.cpu_library is None:
            return self.dtype
        dtype: torch.dtype = getattr(torch, CACHE_DTYPE)
        return dtype
