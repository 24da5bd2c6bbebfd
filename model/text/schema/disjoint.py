"""Tells whether no value follows two schemas of draft 2020-12, as far as that is easy to see."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from model.text.schema.modern import DEFINITIONS, TYPES, Schema
from model.text.schema.numbers import Limit, limits

_MAX_STEPS: Final = 4000
_MAX_REFERENCES: Final = 8
_ALL: Final = frozenset(TYPES)


class Disjointness:
    """Compares schemas that share definitions."""

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._steps = 0

    def all_disjoint(self, options: list[Schema]) -> bool:
        """Return whether no value certainly follows two of the options."""
        return self._values_differ(options) or all(
            self.disjoint(first, second)
            for i, first in enumerate(options)
            for second in options[i + 1 :]
        )

    def _values_differ(self, options: list[Schema]) -> bool:
        """Return whether each option lists its values, or those of a property that it requires, without a common one.

        In contrast to a comparison of pairs, this takes no longer for many options.
        """
        followed = [self._followed(option) for option in options]
        nodes = [node for node in followed if isinstance(node, dict)]
        if len(nodes) < len(followed):
            return False
        if _no_common_value(list(map(_values, nodes))):
            return True
        names = nodes[0].get("required", ()) if nodes else ()
        return any(
            _no_common_value([self._values_of_required(node, name) for node in nodes])
            for name in names
        )

    def _values_of_required(self, node: dict[str, Any], name: str) -> list[Any] | None:
        """Return the values that a property may have; None if it may have any, or be missing."""
        if node.get("type") != ["object"] or name not in node.get("required", ()):
            return None
        value = self._followed(node.get("properties", {}).get(name, True))
        return _values(value) if isinstance(value, dict) else None

    def _followed(self, node: Schema) -> Schema:
        for _ in range(_MAX_REFERENCES):
            if not isinstance(node, dict) or "$ref" not in node or _values(node) is not None:
                break
            node = self._target(node["$ref"])
        return node

    def disjoint(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        """Return whether certainly no value follows both."""
        self._steps += 1
        if self._steps > _MAX_STEPS or depth > 12:
            return False
        if a is False or b is False:
            return True
        if a is True or b is True:
            return False
        for first, second in ((a, b), (b, a)):
            if self._part_is_disjoint(first, second, depth):
                return True
        kinds_a, kinds_b = self._types(a), self._types(b)
        common = kinds_a & kinds_b
        if ("number" in kinds_a and "integer" in kinds_b) or (
            "number" in kinds_b and "integer" in kinds_a
        ):
            common |= {"integer"}
        return all(_DIFFER.get(kind, _never)(self, a, b, depth) for kind in common)

    def _part_is_disjoint(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        values = _values(a)
        if values is not None:
            others = _values(b)
            if others is not None:
                return not set(map(_key, values)) & set(map(_key, others))
            return all(self._excludes(b, value, depth) for value in values)
        if "$ref" in a and self.disjoint(self._target(a["$ref"]), b, depth + 1):
            return True
        for key in ("anyOf", "oneOf"):
            if key in a and all(self.disjoint(option, b, depth + 1) for option in a[key]):
                return True
        return any(self.disjoint(part, b, depth + 1) for part in a.get("allOf", ()))

    def _excludes(self, schema: Schema, value: Any, depth: int) -> bool:  # noqa: ANN401 - a JSON value
        """Return whether a value certainly does not follow a schema."""
        return self.disjoint(_with_value(value), schema, depth + 1) if depth < 12 else False

    def _target(self, reference: str) -> Schema:
        return self._definitions.get(reference.removeprefix(DEFINITIONS), True)

    def _types(self, schema: dict[str, Any]) -> frozenset[str]:
        return frozenset(schema["type"]) if "type" in schema else _ALL

    def numbers(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Compare the bounds of numbers."""
        del depth
        (low, high), (other_low, other_high) = limits(a), limits(b)
        return _apart(low, other_high) or _apart(other_low, high)

    def strings(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Compare the lengths of strings."""
        del depth
        return _counts_differ(a, b, "minLength", "maxLength")

    def arrays(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Compare arrays: their lengths, and the items that one of them must have."""
        if _counts_differ(a, b, "minItems", "maxItems"):
            return True
        needed = max(a.get("minItems", 0), b.get("minItems", 0))
        return any(
            self.disjoint(_item(a, i), _item(b, i), depth + 1) for i in range(min(needed, 16))
        )

    def objects(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Compare objects: their sizes, and the properties that one of them must have."""
        if _counts_differ(a, b, "minProperties", "maxProperties"):
            return True
        needed = dict.fromkeys([*a.get("required", ()), *b.get("required", ())])
        return any(
            self.disjoint(_property(a, name), _property(b, name), depth + 1) for name in needed
        )


def _never(*_: object) -> bool:
    return False


_DIFFER: Final = {
    "integer": Disjointness.numbers,
    "number": Disjointness.numbers,
    "string": Disjointness.strings,
    "array": Disjointness.arrays,
    "object": Disjointness.objects,
}


def _apart(low: Limit, high: Limit) -> bool:
    if low is None or high is None:
        return False
    return low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))


def _counts_differ(a: dict[str, Any], b: dict[str, Any], least: str, most: str) -> bool:
    infinite = float("inf")
    return bool(a.get(least, 0) > b.get(most, infinite) or b.get(least, 0) > a.get(most, infinite))


def _item(schema: dict[str, Any], index: int) -> Schema:
    first = schema.get("prefixItems", [])
    found: Schema = first[index] if index < len(first) else schema.get("items", True)
    return found


def _property(schema: dict[str, Any], name: str) -> Schema:
    properties = schema.get("properties", {})
    other = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    found: Schema = properties.get(name, other)
    return found


def _no_common_value(lists: list[list[Any] | None]) -> bool:
    """Return whether all lists are known, and no value is in two of them."""
    keys = [{_key(value) for value in values} for values in lists if values is not None]
    return len(keys) == len(lists) and len(set().union(*keys)) == sum(map(len, keys))


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _key(value: Any) -> str:  # noqa: ANN401 - a JSON value
    """Return a text that equal values share."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:  # noqa: ANN401 - a JSON value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _with_value(value: Any) -> Schema:  # noqa: ANN401 - a JSON value
    """Return a schema without `const` that a value follows, as narrow as is useful."""
    match value:
        case None:
            return {"type": ["null"]}
        case bool():
            return {"type": ["boolean"]}
        case int() | float():
            kind = "integer" if value == value // 1 else "number"
            return {"type": [kind], "minimum": value, "maximum": value}
        case str():
            return {"type": ["string"], "minLength": len(value), "maxLength": len(value)}
        case list():
            return {"type": ["array"], "minItems": len(value), "maxItems": len(value)}
    return {
        "type": ["object"],
        "properties": {key: {"const": item} for key, item in value.items()},
        "required": list(value),
        "additionalProperties": False,
    }
