"""The parameters of a decoder of any family, or one rank's part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from kernels import detect
from kernels.weight_format import LIBRARY_FORMATS, WeightFormat, unquantized
from kernels.weights import Weight
from model.network.initial_weights import initialize
from model.network.layers import DecoderLayer, layer_formats
from model.network.matrix import Matrix, shard, shard_sections
from model.network.new_parameters import norm_dtype
from model.network.parallel import head_rows, sections, shard_network
from model.network.rope import RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from kernels import GPUArch
    from kernels.collective.communicator import Communicator
    from model.network.adapter_slots import AdapterSlots
    from model.network.spec import Network

EMBEDDING: Final = "embed_tokens"
HEAD: Final = "lm_head"
TABLES: Final = (EMBEDDING, HEAD)
"""Names of the embedding and of a head of its own."""


class DecoderParameters(nn.Module):
    """The parameters of a network, and the rotary tables that belong to them.

    They are uninitialized until `initialize` or `model.checkpoint.weights` fills them. Afterwards they must be changed
    in place (`copy_`, `to`, an optimizer), never replaced, because kernels are bound to their memory.

    Args:
        network: what all ranks together compute.
        max_context: most tokens of a sequence.
        dtype: dtype of parameters and activations.
        device: device of the parameters.
        weight_format: of the layers' matrices, for serving only; a mapping has those of matrices by names such as
            `layers.0.qkv`, of which others have full numbers; None for full numbers. If it has those of `TABLES` too,
            these are read where they are: no kernel copies them.
        communicator: of the ranks that share the model, for serving only; this one has a part of the weights. None
            for a model that is whole.

    Attributes:
        whole_network: see `network`.
        network: what this rank computes.
        max_context: see above.
        weight_format: of the layers' matrices; if some have full numbers, that of the others. If the C library rounds
            them, that to which it does.
        other_formats: of the layers' matrices that are in another one, each once.
        is_in_library: whether the C library for CPUs computes the model.
        head_format: of the head, if `weight_format` has it; else None.
        ropes: the tables of each of `Network.rotaries`.
        embed_per_layer, per_layer_projection, per_layer_norm: of `Network.per_layer`, if there is one: [vocab, L * E],
            [L * E, C] and [E].
        streams_in, streams_out: the matrices of all but the first of `Network.streams`, if there are any, one above the
            other, [(A - 1) * C, C] each.
        unmeasured_kernels: whether kernels may be chosen that were never measured on a GPU; set before the first step.
        rounds_inputs: whether products may round their inputs to 8 bits, where matrices are integers; set before they
            are bound.
        adapters: slots of adapters; None until they are reserved.
        embedding_rows: looks up tokens, [T] int64, in a packed head that is tied to the embedding, which then has
            no other memory: [T, C] float32; None where there is none.
    """

    def __init__(
        self,
        network: Network,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        weight_format: WeightFormat | Mapping[str, WeightFormat] | None,
        communicator: Communicator | None,
    ) -> None:
        super().__init__()
        self.whole_network, self.max_context = network, max_context
        self.communicator = communicator
        self.network = network = shard_network(network, self.num_ranks)

        def empty(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=kind, device=device))

        hidden, positions = network.hidden, network.positions
        tables = {} if isinstance(weight_format, WeightFormat) else weight_format or {}

        def table(name: str, rows: int) -> nn.Parameter | Matrix:
            form = tables.get(name)
            if form is None:
                return empty(rows, hidden)
            return Matrix(Weight.empty(form, (rows, hidden), device))

        self._dtype = dtype
        self.embed_tokens = table(EMBEDDING, network.vocab)
        self.embed_positions = (
            empty(positions.offset + positions.count, hidden) if positions else None
        )
        table_of_layers, streams, count = network.per_layer, network.streams, len(network.layers)
        if table_of_layers is not None:
            size = table_of_layers.size
            self.embed_per_layer = empty(table_of_layers.vocab, count * size)
            self.per_layer_projection = empty(count * size, hidden)
            self.per_layer_norm = empty(size)
        if streams is not None:
            self.streams_in = empty((streams.count - 1) * hidden, hidden)
            self.streams_out = empty((streams.count - 1) * hidden, hidden)
        self.layers = nn.ModuleList(
            DecoderLayer(layer, hidden, dtype, device, layer_formats(weight_format, index))
            for index, layer in enumerate(network.layers)
        )
        forms = [it.format for layer in self.decoder_layers for it in layer.matrices.values()]
        self.weight_format = next((it for it in forms if it.is_quantized), unquantized(dtype))
        others = (it for it in forms if it != self.weight_format)
        self.other_formats = tuple(dict.fromkeys(others))
        self.is_in_library = False
        self.norm = empty(hidden, kind=norm_dtype(network.norm, dtype))
        self.norm_bias = empty(hidden) if network.norm.has_bias else None
        self._head_rows = head_rows(network.vocab, self.num_ranks)
        self.lm_head = None if network.tied else table(HEAD, self._head_rows)
        self.head_format = tables.get(EMBEDDING if network.tied else HEAD)
        self.lm_head_bias = empty(self._head_rows) if network.head_bias else None
        self.ropes = [RotaryEmbedding(*it) for it in network.rotaries]
        self.unmeasured_kernels = False
        self.rounds_inputs = False
        self.adapters: AdapterSlots | None = None
        self.embedding_rows: Callable[[Tensor], Tensor] | None = None

    def initialize(self, std: float, generator: torch.Generator | None = None) -> None:
        """Initialize the weights: matrices from a normal distribution, biases 0, norms 1.

        A rank gets that part of the numbers which a whole model would have.

        Args:
            std: standard deviation.
            generator: of the parameters' device; None uses PyTorch's global generator.
        """
        if self.communicator is None:
            initialize(self, std, generator)
            return
        rank, meta = self.communicator.rank, torch.device("meta")
        whole, own = (
            DecoderParameters(
                self.whole_network, self.max_context, torch.float32, meta, None, communicator
            )
            for communicator in (None, self.communicator)
        )
        shapes, own_shapes = (
            {name: parameter.shape for name, parameter in it.named_parameters()}
            for it in (whole, own)
        )

        def part(name: str, values: Tensor) -> Tensor:
            layer, _, kind = name.removeprefix("layers.").partition(".")
            if kind:
                its, of_all = (it.network.layers[int(layer)] for it in (self, whole))
                if found := sections(its, of_all, self.num_ranks, kind):
                    values = shard_sections(values, found, rank)
            return shard(values, own_shapes[name], rank)

        initialize(self, std, generator, shapes, part)

    def assign_to_library(self, quantization: WeightFormat) -> None:
        """Note that the C library for CPUs computes the model.

        Args:
            quantization: of the layers' matrices, as `CPULibrary` takes it.
        """
        self.is_in_library = True
        if quantization in LIBRARY_FORMATS:
            self.weight_format, self.other_formats = quantization, ()

    def drop_embedding(self, rows: Callable[[Tensor], Tensor] | None = None) -> None:
        """Free the embedding's memory; what remains says that activations are float32.

        Args:
            rows: becomes `embedding_rows`.
        """
        self.embedding_rows = rows
        empty = torch.empty(0, self.network.hidden, device=self.device)
        self.embed_tokens = nn.Parameter(empty, requires_grad=False)

    @property
    def arch(self) -> GPUArch:
        """The processor of the parameters' device."""
        return detect(self.device)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.norm.device

    @property
    def is_meta(self) -> bool:
        """Whether the parameters have no memory, so that the model can only be planned."""
        return self.norm.is_meta

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        table = self.embed_tokens
        return self._dtype if isinstance(table, Matrix) else table.dtype

    @property
    def dtype_name(self) -> str:
        """Name of the dtype of parameters and activations."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def is_quantized(self) -> bool:
        """Whether the layers' matrices are quantized."""
        return self.weight_format.is_quantized

    @property
    def num_ranks(self) -> int:
        """Number of ranks that share the model."""
        return 1 if self.communicator is None else self.communicator.size

    @property
    def rope_tables(self) -> tuple[Tensor, ...]:
        """Cos and sin of all reserved positions, for each of `Network.rotaries`."""
        return tuple(table for rope in self.ropes for table in rope.tables)

    @property
    def embedding(self) -> Weight:
        """The embedding of tokens, [V, C], whole on every rank."""
        return _weight(self.embed_tokens)

    @property
    def head(self) -> Weight:
        """The rows of the output head that this rank has, [V, C] in a model that is whole."""
        if not self.network.tied:
            assert self.lm_head is not None, "the head is packed"
            return _weight(self.lm_head)
        if self.communicator is None:
            return self.embedding
        shape = (self._head_rows, self.network.hidden)
        return shard(self.embedding.detach(), shape, self.communicator.rank)

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers in order."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def _weight(table: nn.Parameter | Matrix) -> Weight:
    return table.weight if isinstance(table, Matrix) else Weight.full(table)
