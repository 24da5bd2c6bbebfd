"""An adapter that fits a model: read from a folder, and checked before anything uses it. Imports no PyTorch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from model.adapters.config import CONFIG, MAX_CONFIG_BYTES, AdapterConfig
from model.adapters.file import WEIGHTS, AdapterFile
from model.adapters.targets import Target, find_targets
from model.checkpoint.stored_names import StoredNames
from model.errors import AdapterError
from model.families.table import FAMILIES
from model.families.tensors import CONVOLUTION, HEAD
from model.files import read_file
from model.hub.resolve import resolve
from model.json_input import shorten

if TYPE_CHECKING:
    from model.checkpoint.config import ModelConfig

_TENSOR: Final = re.compile(
    r"(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.default)?\.weight", re.DOTALL
)
_PREFIX: Final = "base_model.model."
_EMBEDDING: Final = re.compile(r"\.lora_embedding_[AB]$|(^|\.)(embed_tokens|wte|wpe|embed_in)\.")
_FLOAT_BYTES: Final = 4


class LowRank(NamedTuple):
    """What an adapter adds to a linear layer: B A x * scale.

    Attributes:
        target: the linear layer.
        rank: rows of A.
        scale: the factor.
        a, b: names of the tensors, [rank, inputs] and [outputs, rank].
    """

    target: Target
    rank: int
    scale: float
    a: str
    b: str


class Adapter(NamedTuple):
    """An adapter that was checked.

    Attributes:
        file: its tensors.
        modules: what it adds, by the names of the linear layers.
    """

    file: AdapterFile
    modules: dict[str, LowRank]

    @property
    def digest(self) -> str:
        """See `AdapterFile.digest`."""
        return self.file.digest

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(it.rank for it in self.modules.values())


class AdapterReader:
    """Reads adapters for a model; may be used by several threads.

    Args:
        config: of the model.
        max_rank: the largest rank of an adapter.

    Raises:
        AdapterError: the model cannot have adapters.
    """

    def __init__(self, config: ModelConfig, max_rank: int) -> None:
        self._max_rank = max_rank
        self._targets = find_targets(config)
        self._tensors = FAMILIES[config.architecture].tensors
        self._num_layers = len(config.network.layers)
        needed = (f"{name}.weight" for name in self._targets)
        self._names = StoredNames(self._tensors, needed, self._num_layers)
        sizes = sum(it.inputs + it.outputs for it in self._targets.values())
        self._max_bytes = sizes * max_rank * _FLOAT_BYTES

    def read(self, folder: Path) -> Adapter:
        """Read and check an adapter.

        Args:
            folder: with adapter_config.json and adapter_model.safetensors.

        Raises:
            AdapterError: it does not fit the model, has what is not supported, or is damaged.
        """
        # Read once, so that what is checked is what the digest is of.
        content = read_file(folder, CONFIG, MAX_CONFIG_BYTES, AdapterError)
        if content is None:
            raise AdapterError(f"{folder} has no {CONFIG}: it is no adapter of PEFT")
        config = AdapterConfig.parse(content, folder / CONFIG)
        config.check_layers(self._num_layers)
        file = AdapterFile(folder, content, self._max_bytes)
        try:
            adapter = Adapter(file, self._modules(file, config))
        except AdapterError as error:
            raise AdapterError(f"{folder / WEIGHTS}: {error}") from None
        if (name := file.find_not_finite()) is not None:
            raise AdapterError(f"{folder / WEIGHTS}: {name} has numbers that are not finite")
        return adapter

    def _modules(self, file: AdapterFile, config: AdapterConfig) -> dict[str, LowRank]:
        found: dict[str, dict[str, str]] = {}
        peft_names: dict[str, str] = {}
        for name in file.entries:
            plain = name.removeprefix(_PREFIX)
            match = _TENSOR.fullmatch(plain)
            if match is None:
                raise AdapterError(f"{shorten(name)} is not supported{self._reason(plain)}")
            module = self._names.full(f"{match['module']}.weight").removesuffix(".weight")
            if module not in self._targets:
                raise AdapterError(
                    f"the module {shorten(match['module'])} cannot have an adapter{self._reason(plain)}"
                )
            if not config.changes(self._targets[module].layer):
                raise AdapterError(
                    f"{shorten(name)} is in a layer that layers_to_transform of {CONFIG} leaves out"
                )
            matrices = found.setdefault(module, {})
            if (other := matrices.setdefault(match["matrix"], name)) != name:
                raise AdapterError(f"{shorten(name)} and {shorten(other)} are the same matrix")
            peft_names[module] = match["module"]
        if not found:
            raise AdapterError("it has no tensors")
        return {
            name: self._module(name, matrices, file, config, peft_names[name])
            for name, matrices in found.items()
        }

    def _module(
        self,
        name: str,
        matrices: dict[str, str],
        file: AdapterFile,
        config: AdapterConfig,
        peft_name: str,
    ) -> LowRank:
        for matrix in "AB":
            if matrix not in matrices:
                raise AdapterError(f"{name} has no lora_{matrix}")
        target, rank = self._targets[name], config.rank(peft_name)
        if rank > self._max_rank:
            raise AdapterError(
                f"{name} has rank {rank}, more than --max-lora-rank {self._max_rank}"
            )
        shapes = {"A": (rank, target.inputs), "B": (target.outputs, rank)}
        for matrix, shape in shapes.items():
            stored = file.entries[matrices[matrix]].shape
            if stored != shape:
                raise AdapterError(
                    f"{matrices[matrix]} is {list(stored)}, must be {list(shape)} by the model and {CONFIG}"
                )
        return LowRank(target, rank, config.scale(peft_name), matrices["A"], matrices["B"])

    def _reason(self, name: str) -> str:
        """Return why a tensor is refused; the end of a sentence."""
        if "lora_magnitude_vector" in name:
            return ": DoRA has a magnitude of each output"
        if name.startswith(f"{HEAD}.") or f".{HEAD}." in name:
            return ": the head is that of the model"
        if _EMBEDDING.search(name):
            return ": embeddings are those of the model"
        if self._is_convolution(name):
            return ": convolutions are those of the model"
        if self._names.is_beyond_layers(name):
            return f": the model has layers 0 to {self._num_layers - 1}"
        listed = dict.fromkeys(it.rpartition(".")[2] for it in self._targets)
        return f"; adapters may change {', '.join(listed)}"

    def _is_convolution(self, name: str) -> bool:
        module = self._tensors.layer_modules.get(CONVOLUTION)
        return module is not None and f".{module}." in name


def find_adapter_folder(path: str, revision: str | None = None) -> Path:
    """Return the folder of an adapter: a folder, or a repository of the Hub, which is downloaded if necessary.

    Args:
        path: of the folder, or the name of the repository.
        revision: of the repository.

    Raises:
        ModelError: there is neither, or it cannot be read.
    """
    try:
        folder = Path(path).expanduser()
        is_adapter, is_folder = (folder / CONFIG).is_file(), folder.is_dir()
    except OSError as error:
        raise AdapterError(f"{shorten(path)} cannot be read: {error.strerror}") from None
    except (RuntimeError, ValueError) as error:  # no such user, or no path
        raise AdapterError(f"{shorten(path)} cannot be read: {error}") from None
    if is_adapter:
        return folder
    if is_folder:
        raise AdapterError(f"{folder} has no {CONFIG}: it is no adapter of PEFT")
    return resolve(path, revision)
