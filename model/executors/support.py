"""What an executor cannot compute of a network.

An executor declares which fields of which parts it computes (`Reads`). Everything else is found by `unsupported`, field
by field: a part or a field that an executor does not list is refused, whoever added it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, TypeAlias

from model.network.spec import TEXT, Attention, Dense, Network, Norm

ALL: Final = None
"""Every value of a field."""
Reads: TypeAlias = Mapping[type, Mapping[str, Collection[Any] | None] | None]
"""For each part that an executor computes, the fields that it reads and the values of each; `ALL` for every value, or
for every field. It computes each field without a default, the default of each other one, and a part within a part by
the entry of its type: only whether there is an optional part must be listed.
"""
Varying: TypeAlias = Collection[tuple[type, str]]
"""The fields in which the layers of a network may differ for an executor, as (part, field)."""


def unsupported(network: Network, reads: Reads, varying: Varying) -> tuple[str, ...]:
    """List what an executor cannot compute of a network; empty if nothing.

    Args:
        network: the network.
        reads: what the executor computes.
        varying: what may differ from layer to layer.

    Returns:
        Reasons such as "no softcap of logits", each once.
    """
    differing = _differing(network.layers, frozenset(varying))
    return tuple(dict.fromkeys((*unread(network, reads), *differing)))


def unread(network: Network, reads: Reads) -> tuple[str, ...]:
    """List what an executor whose layers may differ in everything cannot compute; arguments as for `unsupported`."""
    return tuple(dict.fromkeys(_unread(network, reads)))


def _unread(part: Any, reads: Reads) -> Iterator[str]:  # noqa: ANN401 - any part of a network
    if type(part) not in reads:
        yield f"no {type(part).__name__}"
        return
    read = reads[type(part)]
    for it in dataclasses.fields(part):
        value = getattr(part, it.name)
        is_default = it.default is dataclasses.MISSING or value == it.default
        is_part = dataclasses.is_dataclass(value) and type(value) is type(it.default)
        if not is_default and not is_part and read is not ALL:
            values = read.get(it.name, ())
            if values is not ALL and value not in values:
                yield f"no {_text(part, it, value)}"
                continue
        for inner in dict.fromkeys(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(inner):
                yield from _unread(inner, reads)


def _text(part: Any, it: dataclasses.Field[Any], value: object) -> str:  # noqa: ANN401 - any part of a network
    text: str = it.metadata.get(TEXT, f"{type(part).__name__}.{it.name} = {{}}")
    return text.format(value)


def _differing(parts: Collection[Any], varying: Collection[tuple[type, str]]) -> Iterator[str]:
    """Yield the fields in which parts at the same place differ, unless they may."""
    first, *others = dict.fromkeys(parts)
    if any(type(part) is not type(first) for part in others):
        names = dict.fromkeys(type(part).__name__ for part in (first, *others))
        yield f"no layers of different kinds: {', '.join(names)}"
        return
    for it in dataclasses.fields(first):
        values = dict.fromkeys(getattr(part, it.name) for part in (first, *others))
        if len(values) == 1 or (type(first), it.name) in varying:
            continue
        if TEXT not in it.metadata and all(map(dataclasses.is_dataclass, values)):
            yield from _differing(values, varying)
            continue
        text = it.metadata.get(TEXT, f"{type(first).__name__}.{it.name}").format("one")
        yield f"no other {text} for some layers"


def is_attention_and_dense(network: Network) -> bool:
    """Whether each layer has attention and a dense MLP, so that an executor of these may read their sizes."""
    return all(type(it.mixer) is Attention and type(it.mlp) is Dense for it in network.layers)


def different_norms(network: Network, *names: str) -> tuple[str, ...]:
    """List the fields in which norms of a network differ, as reasons of an executor that takes one value for all."""
    norms = {part for part in _parts(network) if isinstance(part, Norm)}
    return tuple(
        f"no norms that differ in {name}"
        for name in names
        if len({getattr(norm, name) for norm in norms}) > 1
    )


def _parts(part: Any) -> Iterator[Any]:  # noqa: ANN401 - any part of a network
    """Yield a part and the parts within it."""
    yield part
    for it in dataclasses.fields(part):
        value = getattr(part, it.name)
        for inner in dict.fromkeys(value if isinstance(value, tuple) else (value,)):
            if dataclasses.is_dataclass(inner):
                yield from _parts(inner)
