"""A checkpoint's configuration, checked when it is read.

This module does not import PyTorch, because the front end imports it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Meta

from kernels.weight_format import WeightFormat
from model.checkpoint.files.header import stored_dtype
from model.checkpoint.files.side_files import with_side_files
from model.checkpoint.formats.table import CONFIG_KEYS, detect, stored_formats
from model.checkpoint.formats.unsupported import UnsupportedFormatError, unquantized_hint
from model.checkpoint.generation_config import FILE as GENERATION_CONFIG
from model.checkpoint.generation_config import MAX_FILE_BYTES
from model.checkpoint.other_folders import describe, describe_architecture, embeds
from model.errors import ModelError, ModelFolderError, UnsupportedModelError
from model.families.keys import Keys
from model.families.rotary import POSITIONS
from model.families.table import FAMILIES
from model.families.tensors import Rewrite, Tensors
from model.families.unlisted import HINT, NAME, ModelBackend, find_family
from model.json_input import read_json_object, shorten
from model.network.parallel import parallel_unsupported
from model.network.spec import Network

CONFIG: Final = "config.json"
DTYPES: Final = ("float32", "bfloat16", "float16")

_NO_DTYPE: Final = (None, "", "auto", "torch.auto")
"""Values of the key with which the files decide."""
_DTYPE_ALIASES: Final = {"half": "float16", "float": "float32"}
"""PyTorch's other names."""
_DEVIATION: Final = Meta(ge=0, le=10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The configuration of one checkpoint.

    Attributes:
        architecture: a key of `FAMILIES`, or another one if `network` has modules.
        network: the function that the model computes.
        max_context: maximum number of tokens in a sequence.
        initializer_range: standard deviation of freshly initialized weights.
        dtype: dtype of the checkpoint: "float32", "bfloat16" or "float16".
        weight_format: in which a model holds the matrices of the layers, of several formats the first; None for full
            numbers.
        eos_token_ids: all ids that end a generation by config.json and generation_config.json.
        eos_by_file: the same by file.
        content: of config.json, from which the other attributes follow.
        notes: sentences about what the files state and what has no effect, for the log.
    """

    architecture: str
    network: Network
    max_context: int
    initializer_range: float = 0.02
    dtype: str = "float32"
    weight_format: WeightFormat | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    eos_by_file: Mapping[str, tuple[int, ...]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    content: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @classmethod
    def from_folder(cls, path: str | Path, backend: ModelBackend = "tessera") -> ModelConfig:
        """Read `config.json` and, if it exists, `generation_config.json`; or the metadata of a GGUF file.

        Args:
            path: of the folder or the file.
            backend: as for `find_family`.

        Raises:
            ModelFolderError: a file is missing or broken, or a value is missing, of the wrong type
                or outside its limits.
            UnsupportedModelError: the architecture or a feature is not supported.
        """
        folder = Path(path)
        if not folder.is_dir() and not folder.is_file():
            raise ModelFolderError(
                f"{folder} is not a folder; a model is a folder with a config.json, or a GGUF file"
            )
        file = folder if folder.is_file() else folder / CONFIG
        config, generation_config = (
            read_json_object(folder, name, MAX_FILE_BYTES) for name in (CONFIG, GENERATION_CONFIG)
        )
        if config is None:
            what = describe(folder) or "a model folder needs one"
            raise ModelFolderError(f"{folder} has no {CONFIG}: {what}")
        if embeds(folder):
            raise UnsupportedModelError(
                f"{folder} is a model of sentence-transformers, which embeds texts and generates none"
            )
        config = with_side_files(folder, config, MAX_FILE_BYTES)
        try:
            found = cls.from_dict(config, generation_config, stored_dtype(folder), backend)
        except UnsupportedFormatError as error:
            text = f"{file}: {error}{unquantized_hint(folder, config)}"
            raise UnsupportedModelError(text) from None
        except ModelError as error:
            raise type(error)(f"{file}: {error}") from None
        if found.network.modules is not None and folder.is_file():
            raise UnsupportedModelError(
                f"{file}: {NAME} reads folders with safetensors files, no GGUF files"
            )
        return found

    @classmethod
    def from_dict(
        cls,
        config: dict[str, Any],
        generation_config: dict[str, Any] | None = None,
        stored_dtype: str | None = None,
        backend: ModelBackend = "tessera",
    ) -> ModelConfig:
        """Build the configuration from the parsed content of `config.json`.

        Args:
            config: in the classic form (`rope_scaling`, `torch_dtype`) or in that of transformers 5
                (`rope_parameters`, `dtype`).
            generation_config: its end-of-sequence ids are added to those of `config`.
            stored_dtype: of the weights in the files, for a `config` that states none; None if it is not known.
            backend: as for `find_family`.

        Raises:
            ModelFolderError: a value is missing, of the wrong type or outside its limits.
            UnsupportedModelError: the architecture or a feature is not supported.
        """
        try:
            family = find_family(config, backend)
        except UnsupportedModelError as error:
            advice = describe_architecture(config) or HINT
            raise UnsupportedModelError(f"{error}; {advice}") from None
        architecture = family.architecture
        weight_format = detect(config)
        keys = family.keys(config)
        outer = Keys(config) if family.part else keys
        network = family.network(keys)
        has_modules = network.modules is not None
        if has_modules and stored_formats(config).first is not None:
            raise UnsupportedModelError(
                f"{NAME} reads checkpoints of full numbers alone, and this one is quantized"
            )
        if not has_modules and not network.attentions:
            raise UnsupportedModelError(
                f"a network of {' and '.join(network.other_mixers)} without attention is not supported"
            )
        family.rewrites(keys)
        bos, eos = (
            outer.token_ids(key, network.vocab) + keys.token_ids(key, network.vocab)
            for key in ("bos_token_id", "eos_token_id")
        )
        generation = Keys(generation_config or {}, prefix=f"{GENERATION_CONFIG}: ")
        eos_by_file = {
            CONFIG: tuple(dict.fromkeys(eos)),
            GENERATION_CONFIG: generation.token_ids("eos_token_id", network.vocab),
        }
        if code := config.get("auto_map"):
            outer.note(
                f"auto_map = {shorten(code)} has no effect: no code of a checkpoint is run, and {architecture} is"
                " computed as transformers computes it"
            )
        found = cls(
            architecture=architecture,
            network=network,
            max_context=max_context(network, keys.integer("max_position_embeddings", POSITIONS)),
            initializer_range=keys.number("initializer_range", _DEVIATION, cls.initializer_range),
            dtype=_dtype(outer, keys) or stored_dtype or cls.dtype,
            weight_format=weight_format,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(itertools.chain(*eos_by_file.values()))),
            eos_by_file=eos_by_file,
            content=config,
            notes=tuple(dict.fromkeys(it for at in (outer, keys, generation) for it in at.notes)),
        )
        for it in () if has_modules else (outer, keys):
            it.refuse_unread()
        return found

    def untied(self) -> ModelConfig:
        """Return the configuration of the same model with a head of its own."""
        return dataclasses.replace(
            self,
            network=dataclasses.replace(self.network, tied=False),
            content={**self.content, "tie_word_embeddings": False},
        )

    @property
    def stored_format(self) -> WeightFormat | None:
        """The format in which matrices of the layers are stored, of several the first; None for full numbers.

        `weight_format` is None in its place where config.json asks for full numbers.
        """
        return stored_formats(self.content).first

    def tensors(self) -> Tensors:
        """Return the tensors of the checkpoint."""
        family = FAMILIES[self.architecture]
        return family.tensors_of(family.keys(self.content))

    def rewrites(self) -> Mapping[str, Rewrite]:
        """Return what loading changes, as `Family.rewrites`."""
        family = FAMILIES[self.architecture]
        return family.rewrites(family.keys(self.content))

    def within(self, max_model_len: int | None) -> ModelConfig:
        """Return the configuration for a service, with what sequences of its length need.

        Args:
            max_model_len: most tokens of a sequence; None for the model's own limit.
        """
        tokens = self.max_context if max_model_len is None else max_model_len
        return dataclasses.replace(self, network=self.network.within(tokens))

    def parallel_unsupported(self, size: int) -> tuple[str, ...]:
        """List why `size` ranks cannot share the model; empty if they can."""
        return parallel_unsupported(self.network, size)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `config.json`, without the compression of the checkpoint that it was read from."""
        replaced = ("dtype", *CONFIG_KEYS)
        kept = {key: it for key, it in self.content.items() if key not in replaced}
        return kept | {
            "architectures": [self.architecture],
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_ids) or None,
            "torch_dtype": self.dtype,
        }


def max_context(network: Network, stated: int) -> int:
    """Return the maximum number of tokens in a sequence.

    It is the length that the checkpoint states, which is also that of a table of learned positions. `yarn` and
    `dynamic` checkpoints often state the length before the extension; then it is that length times the factor.
    """
    extended = (
        math.floor(rotary.original_max_positions * rotary.factor)
        for rotary, _ in network.rotaries
        if rotary is not None and rotary.rope_type in ("yarn", "dynamic")
    )
    return max((stated, *extended))


def _dtype(*places: Keys) -> str | None:
    """Read the dtype from the first place that states it; None if none does."""
    found = [keys.text(key) for keys in places for key in ("dtype", "torch_dtype")]
    stated = next((it for it in found if it not in _NO_DTYPE), None)
    if stated is None:
        return None
    dtype = stated.removeprefix("torch.")
    dtype = _DTYPE_ALIASES.get(dtype, dtype)
    if dtype not in DTYPES:
        raise UnsupportedModelError(
            f"dtype = {shorten(stated)} is not supported; supported are {', '.join(DTYPES)}"
        )
    return dtype
