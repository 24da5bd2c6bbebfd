"""Reads what compressed-tensors checkpoints say of their matrices: groups of modules, each stored in a way of its own.

A row of `model.checkpoint.formats.table.FORMATS` reads one compression format; `split` gives it the configuration of
one group at a time, so that it never reads a mixture. Rounding of activations is not applied: products take them in the
model's dtype, or round them to FP8 by scales of their own.

Source: the `compressed-tensors` package of the vLLM project.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from model.checkpoint.formats.format import require
from model.checkpoint.formats.unsupported import refuse_known
from model.errors import UnsupportedModelError
from model.json_input import check, refuse, shorten
from model.patterns import compiled

METHOD: Final = "compressed-tensors"
MOST_INPUTS: Final = 65_536
"""Inputs or outputs that share a scale, at most."""

_PATTERN: Final = "re:"
_DIGITS: Final = re.compile("[0-9]{1,9}")
_MIXED: Final = "mixed-precision"
_NAIVE: Final = "naive-quantized"
_STRATEGIES: Final = ("tensor", "channel", "group", "block")
_KINDS: Final = ("int", "float")
_HARMLESS: Final = (((), ("transform_config", "moe_sparsity_config")),)
_COUNT: Final = Annotated[int, Meta(ge=1, le=MOST_INPUTS)]
_EMBEDDINGS: Final = ("embed_tokens", "embed_positions", "wte", "wpe", "embed_in")


class WeightScheme(NamedTuple):
    """How the weights of a group are rounded.

    Attributes:
        where: the keys that lead to it, for errors.
        bits: of a number.
        kind: "int" or "float".
        symmetric: whether there are no zero points.
        strategy: what shares a scale: "tensor", "channel" (an output), "group" or "block".
        group: inputs that share one, of the strategy "group"; else 0.
        block: outputs and inputs that share one, of the strategy "block"; else (0, 0).
        actorder: as stated; None and False for none.
    """

    where: str
    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group: int
    block: tuple[int, int]
    actorder: object

    def require(self, **supported: tuple[object, ...]) -> None:
        """Check values by the names of their keys.

        Raises:
            UnsupportedModelError: one has another value; names the key, the value and what is supported.
        """
        found = {"num_bits": self.bits, "symmetric": self.symmetric, "strategy": self.strategy}
        for key, values in supported.items():
            if found[key] not in values:
                raise unsupported(f"{self.where}.{key}", found[key], values)


@dataclasses.dataclass(frozen=True)
class Part:
    """The configuration of one group.

    Attributes:
        config: as `quantization_config`, but with this group alone and its own format.
        targets: its modules: names, `re:` and a regular expression, or the names of classes.
    """

    config: Mapping[str, Any]
    targets: tuple[str, ...]

    def rank(self, module: str) -> int | None:
        """Return how the targets name a module: 0 by its name, 1 by a pattern, 2 by its class; None for not at all."""
        if module in self.targets:
            return 0
        patterns = (it.removeprefix(_PATTERN) for it in self.targets if it.startswith(_PATTERN))
        if any(compiled(it).match(module) for it in patterns):
            return 1
        kind = "Embedding" if module.rpartition(".")[2] in _EMBEDDINGS else "Linear"
        # Other names, such as those of a layer's class, are of no class that holds a matrix.
        return 2 if kind in self.targets else None


def unsupported(where: str, found: object, values: tuple[object, ...]) -> UnsupportedModelError:
    """Return the error for a value of config.json that is none of the supported ones."""
    supported = " or ".join(map(repr, values))
    return UnsupportedModelError(
        f"{where} = {shorten(found)} is not supported; supported is {supported}"
    )


def split(found: Mapping[str, Any], key: str) -> tuple[Part, ...]:
    """Return the configuration of each group that rounds weights; none if only the KV cache is rounded.

    Args:
        found: `quantization_config`.
        key: its name.

    Raises:
        UnsupportedModelError: there are no groups, or a group is none; names the key.
    """
    refuse(found, _HARMLESS, f"{key}.")
    groups = found.get("config_groups")
    if groups == {} and found.get("kv_cache_scheme") is not None:
        return ()
    if not isinstance(groups, dict) or not groups:
        raise UnsupportedModelError(f"{key} has no config_groups, which describe the weights")
    sparsity = found.get("sparsity_config") or {}
    require(sparsity, {}, f"{key}.sparsity_config")
    if sparsity.get("format") not in (None, "dense"):
        refuse_known(f"{key}.sparsity_config.format", sparsity["format"])
        raise unsupported(f"{key}.sparsity_config.format", sparsity["format"], ("dense",))
    parts = []
    for name, group in groups.items():
        where = f"{key}.config_groups.{name}"
        targets = check(
            require(group, {}, where).get("targets", ["Linear"]), list[str], f"{where}.targets"
        )
        if "weights" in group and group["weights"] is None and len(groups) > 1:
            continue  # it rounds activations alone
        form = group.get("format") or found.get("format")
        if form == _MIXED:
            raise UnsupportedModelError(
                f"{where} has no format, which each group needs where {key}.format is {_MIXED!r}"
            )
        config = {**found, "config_groups": {name: group}, "format": form}
        if form == _NAIVE:
            kind = read_weights(config, key).kind
            config["format"] = f"{kind}-quantized"
        parts.append(Part(config, tuple(targets)))
    if not parts:
        raise UnsupportedModelError(f"no group of {key}.config_groups describes weights")
    return tuple(parts)


def read_weights(found: Mapping[str, Any], key: str) -> WeightScheme:
    """Read how the weights of the only group of a configuration are rounded.

    Args:
        found: the configuration of a `Part`.
        key: the name of `quantization_config`.

    Raises:
        ModelFolderError: a value is of the wrong type or outside its limits; names the key.
        UnsupportedModelError: no such rounding is known; names the key, the value and what is supported.
    """
    ((name, group),) = found["config_groups"].items()
    where = f"{key}.config_groups.{name}.weights"
    weights = require(group.get("weights"), {}, where)
    kind = str(weights.get("type", "int")).lower()
    if kind not in _KINDS:
        raise unsupported(f"{where}.type", weights["type"], _KINDS)
    if weights.get("dynamic") not in (None, False):
        raise unsupported(f"{where}.dynamic", weights["dynamic"], (False,))
    size, block = weights.get("group_size"), weights.get("block_structure")
    strategy = weights.get("strategy")
    if strategy is None:  # as the library infers it
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in _STRATEGIES:
        raise unsupported(f"{where}.strategy", strategy, _STRATEGIES)
    return WeightScheme(
        where,
        check(weights.get("num_bits", 8), Annotated[int, Meta(ge=1, le=8)], f"{where}.num_bits"),
        kind,
        check(weights.get("symmetric", True), bool, f"{where}.symmetric"),
        strategy,
        check(size, _COUNT, f"{where}.group_size") if strategy == "group" else 0,
        _block(block, f"{where}.block_structure") if strategy == "block" else (0, 0),
        weights.get("actorder"),
    )


def _block(found: object, where: str) -> tuple[int, int]:
    if isinstance(found, str):  # the older form, "128x128"
        found = [int(it) if _DIGITS.fullmatch(it) else it for it in found.split("x")]
    outputs, inputs = check(found, tuple[_COUNT, _COUNT], where)  # type: ignore[valid-type]
    return outputs, inputs
