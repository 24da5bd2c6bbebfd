"""Reduces JSON schemas to what the grammar's library enforces exactly, and reports what is left.

What is reduced is never wider than the schema, but for the keywords that are reported. It may be narrower where a
narrower one is simple and nobody misses what it lacks: an excluded bound 0 becomes 0.000001.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from model.text.schema.disjoint import Disjointness
from model.text.schema.formats import PATTERNS
from model.text.schema.modern import DEFINITIONS, TYPES, ModernSchema, Schema, pointer
from model.text.schema.numbers import KEYWORDS, integer_bounds, number_bounds
from model.text.schema.patterns import UnsupportedPatternError, whole_expressions

LEVELS: Final = 3
"""Numbers of ways to reduce a schema, each with less work for the library than the one before."""

# The service generates no texts that are so long.
_UNBOUNDED_LENGTH: Final = 1_000_000
_UNBOUNDED_COUNT: Final = 100_000
_MOST_PERMUTED: Final = 3
_LONG_PATTERN: Final = 24
_STRINGS: Final = ("minLength", "maxLength", "pattern", "format")
_OBJECTS: Final = (
    "properties", "patternProperties", "additionalProperties", "propertyNames", "required", "minProperties",
    "maxProperties",
)  # fmt: skip
_IN_PLACE: Final = ("$ref", "allOf", "anyOf", "oneOf")


class Unenforced(NamedTuple):
    """A keyword that a grammar does not enforce, and where it is: a JSON pointer."""

    keyword: str
    place: str


class LoweredSchema(NamedTuple):
    """A schema for the grammar's library.

    Attributes:
        schema: with its definitions.
        unenforced: what the schema does not say.
    """

    schema: Schema
    unenforced: tuple[Unenforced, ...]


def lower_schema(modern: ModernSchema, level: int = 0) -> LoweredSchema:
    """Reduce a schema.

    Args:
        modern: the schema.
        level: 0 to `LEVELS` - 1; from 1 on also what the library can enforce, but not for every schema, is left out.
    """
    lowering = _Lowering(modern, level)
    root = lowering.root()
    return LoweredSchema(root, tuple(dict.fromkeys(lowering.unenforced)))


class _Lowering:
    def __init__(self, modern: ModernSchema, level: int) -> None:
        self._modern, self._level = modern, level
        self._definitions: dict[str, Schema] = {}
        self._pending: list[str] = []
        self.unenforced: list[Unenforced] = []

    def root(self) -> Schema:
        modern = self._modern
        root = self._schema(modern.root, "")
        while self._pending:
            name = self._pending.pop()
            self._definitions[name] = self._schema(modern.definitions[name], modern.places[name])
        if isinstance(root, bool) or not self._definitions:
            return root
        return {**root, "$defs": self._definitions}

    def _lose(self, keyword: str, place: str) -> None:
        self.unenforced.append(Unenforced(keyword, pointer(place, keyword)))

    def _schema(self, node: Schema, place: str) -> Schema:
        if isinstance(node, bool):
            return node
        if "const" in node or "enum" in node:
            return self._of_values(node, place)
        rest = dict(node)
        parts: list[Schema] = []
        for key, condition in _CONDITIONS.items():
            if key in rest:
                condition(self, rest.pop(key), rest, parts, place)
        if "not" in rest and (found := self._negation(rest, place)) is not None:
            return found
        out: dict[str, Any] = {}
        kinds = rest.get("type")
        if kinds is not None:
            out["type"] = kinds
        self._numbers(rest, out, place)
        if any(key in rest for key in _STRINGS):
            self._strings(rest, out, parts, place)
        self._arrays(rest, out, parts, place)
        if any(key in rest for key in _OBJECTS):
            self._objects(rest, out, place)
        if (kinds := out.get("type")) is not None and len(kinds) == 1:
            out["type"] = kinds[0]
        return self._with_applicators(rest, out, parts, place)

    def _of_values(self, node: dict[str, Any], place: str) -> Schema:
        keyword = "enum" if "enum" in node else "const"
        values = node["enum"] if keyword == "enum" else [node["const"]]
        if set(node) == {keyword, "type"}:
            values = [value for value in values if _is_of(value, node["type"])]
        elif set(node) != {keyword}:
            valid = _validity(node, self._modern.definitions)
            values = [value for value in values if valid(value)]
        kept = [value for value in values if _is_exact(value)]
        if kept or not values:
            return {"enum": kept} if kept else False
        self._lose(keyword, place)
        return self._schema({k: v for k, v in node.items() if k not in ("enum", "const")}, place)

    # The keyword of a condition was removed from `rest`; what replaces it is added to `rest` or to `parts`.

    def conditional(
        self, value: Schema, rest: dict[str, Any], parts: list[Schema], place: str
    ) -> None:
        """Replace `if`, where it is certain."""
        branches = {name: rest.pop(name, True) for name in ("then", "else")}
        if isinstance(value, bool) or not value:
            name = "then" if value is not False else "else"
            parts.append(self._schema(branches[name], pointer(place, name)))
        elif branches != {"then": True, "else": True}:
            self._lose("if", place)

    def dependent_required(
        self, value: dict[str, list[str]], rest: dict[str, Any], _: list[Schema], place: str
    ) -> None:
        """Replace `dependentRequired`, where it is certain."""
        required = dict.fromkeys(rest.get("required", []))
        for name, needed in value.items():
            if name in required:
                required.update(dict.fromkeys(needed))
            elif not set(needed) <= set(required):
                self._lose("dependentRequired", place)
        if required:
            rest["required"] = list(required)

    def dependent_schemas(
        self, value: dict[str, Schema], rest: dict[str, Any], parts: list[Schema], place: str
    ) -> None:
        """Replace `dependentSchemas`, where it is certain."""
        for name, schema in value.items():
            if name in rest.get("required", []) and rest.get("type") == ["object"]:
                parts.append(self._schema(schema, pointer(place, "dependentSchemas", name)))
            elif not _is_any(schema):
                self._lose("dependentSchemas", place)

    def unevaluated_items(
        self, value: Schema, rest: dict[str, Any], _: list[Schema], place: str
    ) -> None:
        """Replace `unevaluatedItems` where nothing beside it evaluates any."""
        if not any(key in rest for key in (*_IN_PLACE, "contains", "if", "dependentSchemas")):
            rest.setdefault("items", value)
        elif not _is_any(value):
            self._lose("unevaluatedItems", place)

    def unevaluated_properties(
        self, value: Schema, rest: dict[str, Any], _: list[Schema], place: str
    ) -> None:
        """Replace `unevaluatedProperties` where what is beside it lists the evaluated ones."""
        if _is_any(value):
            return
        names: dict[str, Schema] = {}
        options = [self._followed(part) for part in rest.get("allOf", [])]
        if "$ref" in rest:
            options.append(self._followed({"$ref": rest["$ref"]}))
        simple = not any(key in rest for key in ("anyOf", "oneOf", "if", "not", "dependentSchemas"))
        for option in options:
            if not isinstance(option, dict) or set(option) - {"type", "properties", "required"}:
                simple = False
                break
            names.update(dict.fromkeys(option.get("properties", {}), True))
        if "additionalProperties" in rest and not options and simple:
            return
        if not simple or "additionalProperties" in rest:
            self._lose("unevaluatedProperties", place)
            return
        if names:
            rest["properties"] = {**names, **rest.get("properties", {})}
        rest["additionalProperties"] = value

    def _followed(self, node: Schema) -> Schema:
        for _ in range(8):
            if not isinstance(node, dict) or set(node) != {"$ref"}:
                break
            node = self._modern.definitions.get(node["$ref"].removeprefix(DEFINITIONS), True)
        return node

    def _negation(self, rest: dict[str, Any], place: str) -> Schema | None:
        """Replace `not` by other keywords; return the whole schema if nothing follows it."""
        negated = self._followed(rest.pop("not"))
        if negated is True or negated == {}:
            return False
        if negated is False:
            return None
        assert isinstance(negated, dict)
        keys = set(negated)
        if keys == {"type"}:
            excluded = set(negated["type"])
            kinds = [kind for kind in rest.get("type", TYPES) if kind not in excluded]
            if "number" in excluded:
                kinds = [kind for kind in kinds if kind != "integer"]
            if "integer" not in excluded or "number" not in kinds:
                if not kinds:
                    return False
                rest["type"] = kinds
                return None
        elif keys == {"required"} and len(negated["required"]) == 1:
            (name,) = negated["required"]
            if rest.get("type") == ["object"] or "object" not in rest.get("type", TYPES):
                rest["properties"] = {**rest.get("properties", {}), name: False}
                return None
        self._lose("not", place)
        return None

    def _numbers(self, rest: dict[str, Any], out: dict[str, Any], place: str) -> None:
        found = {key: rest[key] for key in KEYWORDS if key in rest}
        kinds = list(out.get("type", TYPES))
        if not found or not {"number", "integer"} & set(kinds):
            return
        if self._level >= 1 and "multipleOf" in found:
            del found["multipleOf"]
            self._lose("multipleOf", place)
        if self._level >= 2:
            for key in found:
                self._lose(key, place)
            return
        step = found.get("multipleOf")
        if "number" in kinds and step is not None and step == step // 1:
            # The library takes 0.5 and 5e-1 for multiples of 5.
            kinds = [k for k in kinds if k not in ("number", "integer")] + ["integer"]
            out["type"] = kinds
        bounds, lost = (number_bounds if "number" in kinds else integer_bounds)(found)
        out.update(bounds)
        for key in lost:
            self._lose(key, place)
        if "number" in kinds and "integer" in kinds:
            out["type"] = [kind for kind in kinds if kind != "integer"]

    def _strings(
        self, rest: dict[str, Any], out: dict[str, Any], parts: list[Schema], place: str
    ) -> None:
        if "string" not in out.get("type", TYPES):
            return
        left_out = (
            [["pattern"], ["pattern", "minLength", "maxLength"]][self._level - 1]
            if self._level
            else []
        )
        for key in left_out:
            if rest.pop(key, None) is not None:
                self._lose(key, place)
        if rest.get("minLength"):
            out["minLength"] = rest["minLength"]
        if rest.get("maxLength", _UNBOUNDED_LENGTH) < _UNBOUNDED_LENGTH:
            out["maxLength"] = rest["maxLength"]
        for i, expression in enumerate(self._expressions(rest, place)):
            pattern = {"pattern": f"^(?:{expression})$"}
            if i:
                parts.append(pattern)
            else:
                out.update(pattern)

    def _expressions(self, rest: dict[str, Any], place: str) -> list[str]:
        """Return the regular expressions of a string, each of which the whole string matches."""
        found: dict[str, None] = {}
        if "pattern" in rest:
            try:
                found.update(dict.fromkeys(whole_expressions(rest["pattern"])))
            except UnsupportedPatternError:
                self._lose("pattern", place)
        known = PATTERNS.get(rest.get("format", ""))
        if known is not None and self._level < 2 and not (found and _is_whole(rest["pattern"])):
            found.update(dict.fromkeys(whole_expressions(known)))
        return list(found)

    def _arrays(
        self, rest: dict[str, Any], out: dict[str, Any], parts: list[Schema], place: str
    ) -> None:
        if "array" not in out.get("type", TYPES):
            return
        prefix, items = rest.get("prefixItems", []), rest.get("items", True)
        if prefix:
            out["prefixItems"] = [
                self._schema(item, pointer(place, "prefixItems", i))
                for i, item in enumerate(prefix)
            ]
        if "items" in rest:
            out["items"] = self._schema(items, pointer(place, "items"))
        least, most = self._lengths(rest, out, place)
        if "uniqueItems" in rest and most > 1:
            permuted = None if prefix else self._permuted(items, least, most)
            if permuted is None:
                self._lose("uniqueItems", place)
            else:
                parts.append(permuted)
        if "contains" in rest and not self._contains_is_sure(rest, least):
            self._lose("contains", place)

    def _lengths(self, rest: dict[str, Any], out: dict[str, Any], place: str) -> tuple[int, int]:
        """Write the bounds of an array's length, and return them."""
        least, most = rest.get("minItems", 0), rest.get("maxItems", _UNBOUNDED_COUNT)
        if self._level >= 2:
            for key in ("minItems", "maxItems"):
                if key in rest:
                    self._lose(key, place)
            return least, most
        if least:
            out["minItems"] = least
        if most < _UNBOUNDED_COUNT:
            out["maxItems"] = most
        return least, most

    def _permuted(self, items: Schema, least: int, most: int) -> Schema | None:
        """Return a schema of arrays of different values, None if there are too many."""
        followed = self._followed(items)
        if not isinstance(followed, dict) or set(followed) - {"type"} != {"enum"}:
            return None
        values = [v for v in followed["enum"] if _is_exact(v)]
        if len(values) > _MOST_PERMUTED or self._level >= 1:
            return None
        lists: list[list[Any]] = [[]]
        for known in lists:
            lists += [[*known, v] for v in values if not any(_same(v, other) for other in known)]
        lists = [known for known in lists if least <= len(known) <= most]
        others = [kind for kind in TYPES if kind != "array"]
        return {"anyOf": [{"enum": lists}, {"type": others}]} if lists else {"type": others}

    def _contains_is_sure(self, rest: dict[str, Any], least: int) -> bool:
        needed = rest.get("minContains", 1)
        if "maxContains" in rest:
            return False
        wanted = self._followed(rest["contains"])
        if not needed:
            return True
        trivial = (
            wanted is True or wanted == {} or wanted == self._followed(rest.get("items", True))
        )
        return bool(trivial) and "prefixItems" not in rest and least >= needed

    def _objects(self, rest: dict[str, Any], out: dict[str, Any], place: str) -> None:
        if "object" not in out.get("type", TYPES):
            return
        names = self._followed(rest.get("propertyNames", True))
        if names is not True and not self._with_names(names, rest):
            self._lose("propertyNames", place)
        properties = rest.get("properties", {})
        patterns = rest.get("patternProperties", {})
        required = [name for name in rest.get("required", []) if isinstance(name, str)]
        additional = rest.get("additionalProperties", True)
        if properties:
            out["properties"] = {
                name: self._schema(value, pointer(place, "properties", name))
                for name, value in properties.items()
            }
        if patterns:
            additional = self._patterns(patterns, additional, out, place)
        if required:
            out["required"] = required
        if not _is_any(additional):
            out["additionalProperties"] = self._schema(
                additional, pointer(place, "additionalProperties")
            )
        self._sizes(rest, out, place)

    def _patterns(
        self, patterns: dict[str, Schema], additional: Schema, out: dict[str, Any], place: str
    ) -> Schema:
        """Translate `patternProperties`; return `additionalProperties`."""
        found = {}
        try:
            for name, value in patterns.items():
                (expression,) = whole_expressions(name)
                found[f"^(?:{expression})$"] = (name, value)
        except (UnsupportedPatternError, ValueError):
            found = {}
        if not found or len(found) < len(patterns) or self._level >= 1:
            self._lose("patternProperties", place)
            if additional is False:
                self._lose("additionalProperties", place)
            return True
        out["patternProperties"] = {
            pattern: self._schema(value, pointer(place, "patternProperties", name))
            for pattern, (name, value) in found.items()
        }
        return additional

    def _with_names(self, names: Schema, rest: dict[str, Any]) -> bool:
        """Express `propertyNames` by other keywords; return whether that is possible."""
        if isinstance(names, bool) or "patternProperties" in rest:
            return False
        if not set(names) - {"type"}:
            return "type" not in names or "string" in names["type"]
        valid = _validity(names, self._modern.definitions)
        allowed = {
            name: value if valid(name) else False
            for name, value in rest.get("properties", {}).items()
        }
        additional = rest.get("additionalProperties", True)
        values = names.get("enum", [names["const"]] if "const" in names else None)
        if values is not None:
            more = [value for value in values if isinstance(value, str) and valid(value)]
            allowed = {**dict.fromkeys(more, additional), **allowed}
        elif additional is not False:
            pattern = None if self._level else _pattern_of_names(names)
            if pattern is None or not all(map(valid, rest.get("required", []))):
                return False
            rest["patternProperties"] = {pattern: additional}
        rest["properties"] = allowed
        rest["additionalProperties"] = False
        return True

    def _sizes(self, rest: dict[str, Any], out: dict[str, Any], place: str) -> None:
        least, most = rest.get("minProperties", 0), rest.get("maxProperties")
        required = out.get("required", [])
        optional = [name for name in out.get("properties", {}) if name not in required]
        closed = out.get("additionalProperties") is False and "patternProperties" not in out
        least = max(0, least - len(required))
        if most is not None and closed and most >= len(required) + len(optional):
            most = None
        if not least and most is None:
            return
        single = closed and least <= 1 and most in (None, len(required) + 1)
        # Properties with one name count once, but the library counts both.
        sure = self._level < 1 and (single if optional else least <= 1)
        if not sure:
            if least:
                self._lose("minProperties", place)
            if most is not None:
                self._lose("maxProperties", place)
            return
        if least:
            out["minProperties"] = rest["minProperties"]
        if most is not None:
            out["maxProperties"] = most

    def _with_applicators(
        self, rest: dict[str, Any], out: dict[str, Any], parts: list[Schema], place: str
    ) -> Schema:
        for key in ("anyOf", "oneOf"):
            if key in rest:
                found = self._alternatives(key, rest[key], place)
                parts.append(found if isinstance(found, bool) else {"anyOf": found})
        for i, part in enumerate(rest.get("allOf", ())):
            parts.append(self._schema(part, pointer(place, "allOf", i)))
        if "$ref" in rest:
            reference = self._reference(rest["$ref"])
            if not out and not parts:
                return reference
            if self._level >= 1:
                self._lose("$ref", place)
            else:
                parts.insert(0, reference)
        return self._joined(out, parts, place)

    def _joined(self, out: dict[str, Any], parts: list[Schema], place: str) -> Schema:
        """Return the intersection of a schema and others."""
        if any(part is False for part in parts):
            return False
        parts = [part for part in parts if not _is_any(part)]
        if not out and len(parts) == 1:
            return parts[0]
        if len(parts) == 1 and isinstance(parts[0], dict) and set(parts[0]) == {"anyOf"}:
            return {**out, **parts[0]}
        if parts and self._level >= 2:
            self._lose("allOf", place)
        elif parts:
            out["allOf"] = parts
        return out

    def _alternatives(self, key: str, options: list[Schema], place: str) -> list[Schema] | bool:
        found = [self._schema(option, pointer(place, key, i)) for i, option in enumerate(options)]
        if key == "oneOf" and len(options) > 1:
            possible = [
                o for o, lowered in zip(options, found, strict=True) if lowered is not False
            ]
            if not Disjointness(self._modern.definitions).all_disjoint(possible):
                self._lose("oneOf", place)
        if any(_is_any(option) for option in found):
            return True
        kept: list[Schema] = [option for option in found if option is not False]
        return kept or False

    def _reference(self, reference: str) -> Schema:
        name = reference.removeprefix(DEFINITIONS)
        if name not in self._definitions:
            self._definitions[name] = True  # until it is lowered
            self._pending.append(name)
        return {"$ref": reference}


def _is_any(schema: Schema) -> bool:
    return schema is True or schema == {}


def _pattern_of_names(names: dict[str, Any]) -> str | None:
    """Return the pattern that texts match which follow a schema, None if no single one is known."""
    if set(names) - {"type", *_STRINGS}:
        return None
    least, most = names.get("minLength", 0), names.get("maxLength")
    if least or most is not None:
        pattern = f"^[\\s\\S]{{{least},{'' if most is None else most}}}$"
        return None if "pattern" in names else pattern
    given: str | None = names.get("pattern") or PATTERNS.get(names.get("format", ""))
    return given or "^[\\s\\S]*$"


def _is_whole(pattern: str) -> bool:
    """Return whether a pattern is long and anchored, as those that generators write for a format beside it."""
    return len(pattern) > _LONG_PATTERN and pattern.startswith("^") and pattern.endswith("$")


def _is_exact(value: Any) -> bool:  # noqa: ANN401 - a JSON value
    """Return whether the library writes a value exactly: it computes with 64-bit floats."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return abs(value) < 2**63 and int(float(value)) == value
    if isinstance(value, float):
        return abs(value) < 2**53  # larger ones are written as integers
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    return True


def _is_of(value: Any, types: list[str]) -> bool:  # noqa: ANN401 - a JSON value
    """Return whether a value has one of some types."""
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            return "number" in types or ("integer" in types and value == value // 1)
        case str():
            return "string" in types
        case list():
            return "array" in types
    return "object" in types


def _same(a: Any, b: Any) -> bool:  # noqa: ANN401 - JSON values
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _validity(node: dict[str, Any], definitions: Mapping[str, Schema]) -> Callable[[Any], bool]:
    """Return whether a value follows a schema of draft 2020-12."""
    from model.text.schema.validation import validator  # noqa: PLC0415 - imported for few schemas

    return functools.partial(validator(node, definitions).is_valid)


_CONDITIONS: Final[
    dict[str, Callable[[_Lowering, Any, dict[str, Any], list[Schema], str], None]]
] = {
    # These first, since the others remove what may evaluate something.
    "unevaluatedProperties": _Lowering.unevaluated_properties,
    "unevaluatedItems": _Lowering.unevaluated_items,
    "if": _Lowering.conditional,
    "dependentRequired": _Lowering.dependent_required,
    "dependentSchemas": _Lowering.dependent_schemas,
}
