"""Reads adapter_config.json: which ranks and scales an adapter has. What it has beside LoRA is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from model.errors import AdapterError, ModelError
from model.json_input import check, convert, parse_json_object, shorten

CONFIG: Final = "adapter_config.json"
MAX_RANK: Final = 256
MAX_CONFIG_BYTES: Final = 1 << 20
_NAME: Final = re.compile(r"[\w.-]+", re.ASCII)
_PATTERN: Final = re.compile(
    r"\^?(?:[\w-]|\.\*|\\?\.|\\d\+?|\((?:\?:)?[\w.]+(?:\|[\w.]+)*\)|\[[\w-]+\]\+?)*\$?", re.ASCII
)
"""Regular expressions whose time is bounded, with `_MOST_REPEATED`."""
_MOST_REPEATED: Final = 2
_MOST_EXPRESSIONS: Final = 16
_MOST_CHARACTERS: Final = 200
_MOST_PATTERNS: Final = 4096
_CHANGES_BASE: Final = ("pissa", "olora", "loftq", "corda", "lora_ga")

T = TypeVar("T")
Rank: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_RANK)]
Alpha: TypeAlias = Annotated[float, Meta(ge=-1e6, le=1e6)]

_REFUSED: Final = {
    "use_dora": "DoRA has a magnitude of each output",
    "modules_to_save": "whole modules are stored with it",
    "lora_bias": "its matrices have biases",
    "layer_replication": "it repeats layers of the model",
    "trainable_token_indices": "it changes embeddings",
    "target_parameters": "it changes parameters of experts",
    "megatron_config": "it is for Megatron's layers",
    "use_qalora": "QALoRA pools the inputs",
    "alora_invocation_tokens": "it begins to act within a sequence (activated LoRA)",
    "arrow_config": "it chooses among other adapters",
    "use_bdlora": "its matrices are block diagonal",
}
"""What no executor computes, and why."""
_READ: Final = frozenset(("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"))
_WITHOUT_EFFECT: Final = frozenset(
    (
        "peft_type", "task_type", "bias", "init_lora_weights", "layers_to_transform", "layers_pattern",
        "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
        "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "target_modules", "ensure_weight_tying",
    )
)  # fmt: skip
"""Keys that are checked here, say how it was trained, or say again what the names of its tensors do."""


class _Fields(msgspec.Struct):
    """The keys that are read, with the defaults of PEFT."""

    r: Rank = 8
    lora_alpha: Alpha = 8
    rank_pattern: dict[str, Any] = {}
    alpha_pattern: dict[str, Any] = {}
    use_rslora: bool = False


class AdapterConfig:
    """The ranks and scales of an adapter's modules.

    Args:
        fields: of adapter_config.json.

    Raises:
        AdapterError: a value is of the wrong type, outside its limits, or asks for what is not computed.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        _check_kind(fields)
        try:
            self._fields = convert({it: fields.get(it) for it in _READ}, _Fields)
        except ModelError as error:
            raise AdapterError(str(error)) from None
        self._ranks: _Patterns[int] = _Patterns(self._fields.rank_pattern, Rank, "rank_pattern")
        self._alphas: _Patterns[float] = _Patterns(
            self._fields.alpha_pattern, Alpha, "alpha_pattern"
        )
        self._layers = fields.get("layers_to_transform")

    @classmethod
    def parse(cls, content: bytes, file: Path) -> AdapterConfig:
        """Read the content of a file.

        Args:
            content: of the file.
            file: for errors.

        Raises:
            AdapterError: it is broken, or the constructor refuses it.
        """
        fields = parse_json_object(content, file, AdapterError)
        try:
            return cls(fields)
        except AdapterError as error:
            raise AdapterError(f"{file}: {error}") from None

    def check_layers(self, num_layers: int) -> None:
        """Check that `layers_to_transform` names layers of a model.

        Raises:
            AdapterError: it does not.
        """
        for layer in self._stated_layers:
            if type(layer) is not int or not 0 <= layer < num_layers:
                raise AdapterError(
                    f"{CONFIG}: layers_to_transform has {shorten(layer)}; the model has layers 0 to {num_layers - 1}"
                )

    def changes(self, layer: int) -> bool:
        """Return whether the adapter may change a layer: PEFT reads no tensors of one that it leaves out."""
        return not self._stated_layers or layer in self._stated_layers

    @property
    def _stated_layers(self) -> list[Any]:
        """The value of `layers_to_transform`; empty for all layers, as in PEFT."""
        if self._layers is None:
            return []
        return self._layers if isinstance(self._layers, list) else [self._layers]

    def rank(self, module: str) -> int:
        """Return the rank of a module, by its name in PEFT's model."""
        return self._ranks.find(module, self._fields.r)

    def scale(self, module: str) -> float:
        """Return the factor on the product of a module's matrices.

        Source: Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023, for rslora.
        """
        alpha, rank = self._alphas.find(module, self._fields.lora_alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self._fields.use_rslora else rank)


def _check_kind(fields: Mapping[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"peft_type = {shorten(kind)} is not supported; supported is 'LORA'")
    if (task := fields.get("task_type")) not in (None, "CAUSAL_LM"):
        raise AdapterError(
            f"task_type = {shorten(task)} is not supported; supported is 'CAUSAL_LM'"
        )
    if (bias := fields.get("bias")) not in (None, "none"):
        raise AdapterError(
            f"bias = {shorten(bias)} is not supported: biases of the model would change"
        )
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"init_lora_weights = {shorten(initial)} is not supported: it belongs to a model whose weights that"
            " changed; save it with PEFT's path_initial_model_for_weight_conversion"
        )
    for key, value in fields.items():
        if not value or key in _READ or key in _WITHOUT_EFFECT:
            continue
        reason = _REFUSED.get(key, "this key is not known")
        raise AdapterError(f"{shorten(key)} = {shorten(value)} is not supported: {reason}")


class _Patterns(Generic[T]):
    """Values by names of modules, or by regular expressions of the ends of names, of which the first that fits counts.

    Args:
        values: of `rank_pattern` or `alpha_pattern`.
        kind: of a value.
        key: that name, for errors.

    Raises:
        AdapterError: there are too many, an expression could take long, or a value is not of the kind.
    """

    def __init__(self, values: Mapping[str, Any], kind: Any, key: str) -> None:  # noqa: ANN401 - a type with limits
        if len(values) > _MOST_PATTERNS:
            raise AdapterError(f"{key} has {len(values)} entries, more than {_MOST_PATTERNS}")
        self._names: dict[str, tuple[int, T]] = {}
        self._expressions: list[tuple[re.Pattern[str], tuple[int, T]]] = []
        for place, (text, given) in enumerate(values.items()):
            try:
                value: T = check(given, kind, f"{key}[{shorten(text)}]")
            except ModelError as error:
                raise AdapterError(str(error)) from None
            if _NAME.fullmatch(text):
                self._names[text] = place, value
            else:
                self._expressions.append((_compiled(text), (place, value)))
        if len(self._expressions) > _MOST_EXPRESSIONS:
            raise AdapterError(
                f"{key} has {len(self._expressions)} regular expressions, more than {_MOST_EXPRESSIONS}"
            )

    def find(self, module: str, default: T) -> T:
        """Return the value of a module."""
        parts = module.split(".")
        ends = (".".join(parts[at:]) for at in range(len(parts)))
        found = [self._names[it] for it in ends if it in self._names]
        found += [value for it, value in self._expressions if it.fullmatch(module)]
        return min(found, key=lambda it: it[0])[1] if found else default


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a key of `rank_pattern` or `alpha_pattern` as PEFT reads it: a regular expression of a name's end."""
    repeated = pattern.count("*") + pattern.count("+")
    is_short = len(pattern) <= _MOST_CHARACTERS and repeated <= _MOST_REPEATED
    # In a class "--" will mean the difference of two.
    if not is_short or "--" in pattern or not _PATTERN.fullmatch(pattern):
        raise AdapterError(
            f"the pattern {shorten(pattern)} is not supported: give names of modules"
        )
    start, body = ("", pattern[1:]) if pattern.startswith("^") else (r"(?:.*\.)?", pattern)
    try:
        return re.compile(f"{start}(?:{body.removesuffix('$')})")
    except re.error as error:
        raise AdapterError(
            f"the pattern {shorten(pattern)} is no regular expression: {error.msg}"
        ) from None
