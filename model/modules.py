"""A decoder that modules of `transformers` compute: its network and its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from kernels.weight_format import unquantized
from model.checkpoint.files.shards import read_headers
from model.decoder import DecoderLM
from model.device.memory import free_bytes
from model.errors import ModelFolderError, UnsupportedModelError, WeightsError
from model.executors.bound import BoundExecutors
from model.executors.modules.check import check_modules
from model.executors.modules.executor import ModulesExecutor
from model.executors.modules.interface import PROBE, STEPS, library, probe, unsupported
from model.families.unlisted import NAME
from model.network.rope import RotaryEmbedding
from model.network.spec import Modules, Network

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from model.checkpoint.config import ModelConfig
    from model.checkpoint.weights import LoadFormat

_logger = logging.getLogger(__name__)
_LISTED: Final = 8
_DUMMY_SEED: Final = 0
_ROPES_BY_LENGTH: Final = ("dynamic", "longrope")
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")


class ModulesLM(DecoderLM):
    """A decoder for serving alone, with the parts of a `DecoderLM` that an engine uses.

    Args:
        config: the model's configuration, whose network `with_modules` has stated.
        modules: the model of the library, in evaluation mode, on its device.
    """

    def __init__(self, config: ModelConfig, modules: nn.Module) -> None:
        nn.Module.__init__(self)  # not those of the parameters that the network of a family has
        network = config.network
        self.config, self.max_context = config, config.max_context
        self.network = self.whole_network = network
        self.communicator = None
        self.library = cast("Any", modules)
        self.embed_tokens = self.library.get_input_embeddings().weight
        self.weight_format = unquantized(self.dtype_name)
        self.other_formats = ()
        self.is_in_library = False
        self.unmeasured_kernels = False
        self.adapters = None
        self.ropes = [RotaryEmbedding(*it) for it in network.rotaries]
        self._packed_bytes = 0
        self.executors = BoundExecutors(self, None)
        self.executors.modules = ModulesExecutor(self, modules)

    def optimize(
        self, library_format: object = None, threads: int = 1, *, rounds_inputs: bool = False
    ) -> None:
        """Bind nothing: the modules are those of the library."""
        del library_format, threads, rounds_inputs
        self.executors.begin_serving()

    def reserve_positions(self, num_positions: int) -> None:
        """See `DecoderLM.reserve_positions`."""
        assert self.executors.modules is not None
        self.executors.modules.reserve_positions(num_positions)

    def check(self, block_size: int) -> None:
        """Compare the first tokens with the library's own attention; see `check_modules`."""
        assert self.executors.modules is not None
        check_modules(self, self.executors.modules, self.library, block_size)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.embedding.numbers.device

    @property
    def is_meta(self) -> bool:
        """Whether the parameters have no memory, so that the model can only be planned."""
        return self.embedding.numbers.is_meta

    @property
    def row_counts(self) -> tuple[int, ...]:
        """None: the library computes the projections."""
        return ()


def with_modules(path: Path, config: ModelConfig) -> ModelConfig:
    """Return the configuration with the network that the modules of the library state, which are built without memory.

    Args:
        path: the checkpoint folder.
        config: its configuration; returned as it is if its network has no modules.

    Raises:
        ModelFolderError: the library cannot read the configuration.
        UnsupportedModelError: the library does not have the model, or its modules are not what our attention computes.
    """
    return config if config.network.modules is None else _built(path, config)[0]


def plan_modules(path: Path, config: ModelConfig, dtype: torch.dtype) -> ModulesLM:
    """Return the model without weights, on the device "meta"; arguments and errors as for `with_modules`."""
    stated, modules = _built(path, config)
    return ModulesLM(stated, modules.to(dtype))


def load_modules(
    path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
) -> ModulesLM:
    """Build the modules and load their weights from safetensors files, with the loader of the library.

    Args:
        path: the checkpoint folder.
        config: from `with_modules`.
        dtype: of the weights in the model.
        device: of the model.
        load_format: "dummy" for random weights.

    Raises:
        WeightsError: the files do not match the configuration or are damaged, or memory does not suffice.
    """
    num_bytes = config.network.num_parameters * dtype.itemsize
    if num_bytes > (free := free_bytes(device)):
        raise WeightsError(
            f"the weights need {num_bytes / 2**30:.1f} GiB as {str(dtype).removeprefix('torch.')} on {device}; free are"
            f" {free / 2**30:.1f} GiB"
        )
    with _quiet():
        if load_format == "dummy":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(_DUMMY_SEED)
                modules = library().AutoModelForCausalLM.from_config(
                    _library_config(path), dtype=dtype, attn_implementation=STEPS
                )
        else:
            read_headers(path)
            modules = _read(path, dtype)
    modules.requires_grad_(requires_grad=False).eval().to(device)
    return ModulesLM(config, modules)


def _read(path: Path, dtype: torch.dtype) -> nn.Module:
    try:
        modules, report = library().AutoModelForCausalLM.from_pretrained(
            path,
            config=_library_config(path),
            dtype=dtype,
            attn_implementation=STEPS,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # of many types
        raise WeightsError(f"{path}: transformers cannot load it: {_first_line(error)}") from error
    problems = [
        f"{len(names)} {what}: {_listed(names)}"
        for key, what in (("missing_keys", "missing"), ("mismatched_keys", "wrongly shaped"))
        if (names := report[key])
    ]
    if problems or report["error_msgs"]:
        text = "; ".join((*problems, *map(str, report["error_msgs"])))
        raise WeightsError(f"the tensors in {path} do not fit its config.json: {text}")
    if unexpected := report["unexpected_keys"]:
        _logger.warning("tensors that the modules do not have are ignored: %s", _listed(unexpected))
    found: nn.Module = modules
    return found


def _listed(names: Iterable[Any]) -> str:
    ordered = sorted(it if isinstance(it, str) else str(it[0]) for it in names)
    rest = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep bars and messages of the library out of the log."""
    log = library().utils.logging
    level = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        log.enable_progress_bar()


def _library_config(path: Path) -> Any:  # noqa: ANN401 - the library's
    """Return the library's configuration of a checkpoint.

    Raises:
        ModelFolderError: it cannot be read.
        UnsupportedModelError: the library does not have the model.
    """
    auto = library().AutoConfig
    try:
        with _quiet():
            return auto.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of many types
        raise ModelFolderError(
            f"{path}: transformers cannot read config.json: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _built(path: Path, config: ModelConfig) -> tuple[ModelConfig, nn.Module]:
    """Build the modules without memory; return the configuration with their network, and the modules."""
    library_config = _library_config(path)
    known = library().MODEL_FOR_CAUSAL_LM_MAPPING
    if type(library_config) not in known:
        raise UnsupportedModelError(
            f"{NAME}: transformers has no decoder of model_type {library_config.model_type!r}"
        )
    kind = known[type(library_config)]
    text = library_config.get_text_config()
    _check_class(kind, text, config)
    try:
        with _quiet(), torch.device("meta"):
            modules = library().AutoModelForCausalLM.from_config(
                library_config, attn_implementation=PROBE, experts_implementation="batched_mm"
            )
    except Exception as error:  # code of the library, of any model
        raise UnsupportedModelError(
            f"{NAME}: transformers cannot build {kind.__name__} from config.json: {_first_line(error)}"
        ) from error
    modules = modules.eval()
    layers = probe(modules, config.max_context)
    assert config.network.modules is not None
    network = Network(
        config.network.vocab,
        modules.get_input_embeddings().weight.shape[1],
        layers,
        modules=Modules(
            config.network.modules.model_type, sum(it.numel() for it in modules.parameters())
        ),
    )
    return dataclasses.replace(config, network=network), modules


def _check_class(kind: Any, text: Any, config: ModelConfig) -> None:  # noqa: ANN401 - the library's
    """Check what a class and a configuration of the library say of themselves.

    Raises:
        UnsupportedModelError: they are not what our attention computes.
    """
    problems = []
    if kind._is_stateful:  # noqa: SLF001 - how the library says it
        problems.append("layers with a state of fixed size (recurrent or convolutional)")
    if not kind._supports_attention_backend:  # noqa: SLF001 - likewise
        problems.append("attention of its own, not that of an attention backend")
    types = dict.fromkeys(getattr(text, "layer_types", None) or ())
    problems += [f"layers of type {it}" for it in types if it not in _LAYER_TYPES]
    if text.vocab_size != config.network.vocab:
        problems.append(f"{text.vocab_size} tokens, not the {config.network.vocab} of config.json")
    stated = getattr(text, "rope_parameters", None) or {}
    ropes = (stated, *(it for it in stated.values() if isinstance(it, dict)))
    problems += [
        f"a rotation of type {it}, which depends on the longest sequence of a step"
        for it in dict.fromkeys(rope.get("rope_type") for rope in ropes)
        if it in _ROPES_BY_LENGTH
    ]
    if problems:
        raise unsupported(kind.__name__, problems)
