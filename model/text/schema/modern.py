"""Reads a JSON schema of any draft, or of OpenAPI 3.0, as one of draft 2020-12 that means the same.

What says nothing is left out: annotations, unknown keywords, and null where a keyword may be missing. Every reference
is to `#/$defs/NAME`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

from model.errors import GrammarError
from model.text.lark import MAX_DEPTH
from model.text.schema.patterns import check_pattern
from model.text.schema.references import References

Schema: TypeAlias = dict[str, Any] | bool

DEFINITIONS: Final = "#/$defs/"
TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")
_SUBSCHEMAS: Final = frozenset(
    {
        "not", "if", "then", "else", "additionalProperties", "propertyNames", "contains", "unevaluatedProperties",
        "unevaluatedItems",
    }
)  # fmt: skip
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAPS: Final = frozenset({"properties", "patternProperties", "dependentSchemas"})
_NUMBERS: Final = frozenset({"minimum", "maximum", "multipleOf"})
_COUNTS: Final = frozenset(
    {
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains",
        "maxContains",
    }
)  # fmt: skip
_REFERENCES: Final = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_MAX_DEFINITIONS: Final = 5000


class ModernSchema(NamedTuple):
    """A schema of draft 2020-12.

    Attributes:
        root: the schema.
        definitions: by name, what its references refer to.
        places: of the definitions in the document that was read, as JSON pointers.
    """

    root: Schema
    definitions: dict[str, Schema]
    places: dict[str, str]

    @property
    def document(self) -> Schema:
        """The schema with its definitions."""
        if isinstance(self.root, bool) or not self.definitions:
            return self.root
        return {**self.root, "$defs": self.definitions}


def read_schema(value: Schema) -> ModernSchema:
    """Read a schema.

    Raises:
        GrammarError: it is not valid; the message says where.
    """
    return _Reader(value).read()


def pointer(place: str, *keys: str | int) -> str:
    """Return the JSON pointer of a part of what is at `place`."""
    return place + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)


class _Reader:
    def __init__(self, value: Schema) -> None:
        self._value = value
        self._references = References(value)
        self._names: dict[int, str] = {}
        self._pending: list[tuple[str, Any, str, str]] = []
        self._places: dict[str, str] = {}
        self._depth = 0

    def read(self) -> ModernSchema:
        root = self._schema(self._value, self._references.base_of(self._value, ""), "")
        definitions: dict[str, Schema] = {}
        while self._pending:
            name, node, base, place = self._pending.pop()
            definitions[name] = self._schema(node, base, place)
        checked: set[str] = set()
        for name in definitions:
            _check_loop(name, definitions, checked)
            checked.add(name)
        return ModernSchema(root, definitions, self._places)

    def _schema(self, node: Any, base: str, place: str) -> Schema:  # noqa: ANN401 - a JSON value
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise _wrong(place, "must be a schema, an object or a boolean")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GrammarError(f"must be nested at most {MAX_DEPTH} levels deep")
        base = self._references.base_of(node, base)
        out: dict[str, Any] = {}
        for key, value in node.items():
            if value is not None or key == "const":
                self._read(out, node, key, base, pointer(place, key))
        if "if" not in out:
            out.pop("then", None)
            out.pop("else", None)
        self._depth -= 1
        return _with_null(out) if node.get("nullable") is True else out

    def _read(
        self, out: dict[str, Any], node: dict[str, Any], key: str, base: str, place: str
    ) -> None:
        value = node[key]
        if key == "const":
            out[key] = value
        elif key in _SUBSCHEMAS:
            out[key] = self._schema(value, base, place)
        elif key in _LISTS:
            out[key] = [*out.get(key, []), *self._list(value, base, place)]
            if not value:
                del out[key]
                if key in ("anyOf", "oneOf"):
                    raise _wrong(place, "must not be empty")
        elif reader := _READERS.get(key):
            if (read := reader(value, place)) is not None:
                out[key] = [*out.get(key, []), *read] if key == "required" else read
        elif rule := _RULES.get(key):
            rule(self, out, node, base, place)

    def map(self, out: dict[str, Any], node: dict[str, Any], base: str, place: str) -> None:
        """Read a keyword whose value has a schema for each name."""
        key = place.rpartition("/")[2]
        value = node[key]
        out[key] = self._map(value, base, place)
        if key == "properties":
            # As in draft 3.
            needed = [
                name
                for name, item in value.items()
                if isinstance(item, dict) and item.get("required") is True
            ]
            if needed:
                out["required"] = [*needed, *out.get("required", [])]

    def reference(self, out: dict[str, Any], node: dict[str, Any], base: str, place: str) -> None:
        """Read a reference of any kind."""
        key = place.rpartition("/")[2]
        name = self._define("#" if key == "$recursiveRef" else _text(node[key], place), base)
        if "$ref" in out:
            out.setdefault("allOf", []).append({"$ref": name})
        else:
            out["$ref"] = name

    def _list(self, value: Any, base: str, place: str) -> list[Schema]:  # noqa: ANN401 - a JSON value
        if not isinstance(value, list):
            raise _wrong(place, "must be a list of schemas")
        return [self._schema(item, base, pointer(place, i)) for i, item in enumerate(value)]

    def _map(self, value: Any, base: str, place: str) -> dict[str, Schema]:  # noqa: ANN401 - a JSON value
        if not isinstance(value, dict):
            raise _wrong(place, "must be an object of schemas")
        return {
            key: self._schema(item, base, pointer(place, key))
            for key, item in value.items()
            if item is not None
        }

    def _define(self, reference: str, base: str) -> str:
        node, base = self._references.find(reference, base)
        name = self._names.get(id(node))
        if name is None or isinstance(node, bool):
            if len(self._names) >= _MAX_DEFINITIONS:
                raise GrammarError(f"must have at most {_MAX_DEFINITIONS} definitions")
            name = f"d{len(self._places)}"
            self._names[id(node)] = name
            self._places[name] = reference if reference.startswith("#/") else f"#{reference}"
            self._places[name] = self._places[name].removeprefix("#")
            self._pending.append((name, node, base, self._places[name]))
        return DEFINITIONS + name

    def items(self, out: dict[str, Any], node: dict[str, Any], base: str, place: str) -> None:
        """Read `items`, which was a list in older drafts."""
        value = node["items"]
        if isinstance(value, list):
            out["prefixItems"] = self._list(value, base, place)
            if (more := node.get("additionalItems")) is not None:
                out["items"] = self._schema(more, base, pointer(place, "..", "additionalItems"))
        else:
            out["items"] = self._schema(value, base, place)

    def dependencies(
        self, out: dict[str, Any], node: dict[str, Any], base: str, place: str
    ) -> None:
        """Read `dependencies` of older drafts."""
        value = node["dependencies"]
        if not isinstance(value, dict):
            raise _wrong(place, "must be an object")
        for key, item in value.items():
            if isinstance(item, str | list):
                names = [item] if isinstance(item, str) else _names(item, pointer(place, key))
                out.setdefault("dependentRequired", {})[key] = names
            elif item is not None:
                found = self._schema(item, base, pointer(place, key))
                out.setdefault("dependentSchemas", {})[key] = found


def _exclusive(bound: str) -> Callable[[_Reader, dict[str, Any], dict[str, Any], str, str], None]:
    """Return the rule of an exclusive bound, a boolean in draft 4 that changes the other bound."""
    key = "exclusive" + bound.capitalize()

    def rule(_: _Reader, out: dict[str, Any], node: dict[str, Any], base: str, place: str) -> None:
        del base
        value = node[key]
        if value is True:
            if (other := node.get(bound)) is not None:
                out[key] = _number(other, place)
        elif value is not False:
            out[key] = _number(value, place)

    return rule


_RULES: Final[dict[str, Callable[[_Reader, dict[str, Any], dict[str, Any], str, str], None]]] = {
    **dict.fromkeys(_MAPS, _Reader.map),
    **dict.fromkeys(_REFERENCES, _Reader.reference),
    "items": _Reader.items,
    "dependencies": _Reader.dependencies,
    "exclusiveMinimum": _exclusive("minimum"),
    "exclusiveMaximum": _exclusive("maximum"),
}


def _wrong(place: str, what: str) -> GrammarError:
    parent, _, key = place.rpartition("/")
    where = f"`{key}`" + (f" at `{parent}`" if parent else "") if place else "the schema"
    shown = where[:200].encode("unicode_escape").decode()
    return GrammarError(f"{shown} {what}")


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise _wrong(place, "must be a string")
    return value


def _names(value: object, place: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(place, "must be a list of strings")
    return list(dict.fromkeys(value))


def _number(value: object, place: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(place, "must be a number")
    return value


def _count(value: object, place: str) -> int | None:
    number = _number(value, place)
    if number < 0 or number != number // 1:
        raise _wrong(place, "must be an integer >= 0")
    return int(number)


def _step(value: object, place: str) -> int | float:
    number = _number(value, place)
    if number <= 0:
        raise _wrong(place, "must be > 0")
    return number


def _required(value: object, place: str) -> list[str] | None:
    return None if isinstance(value, bool) else _names(value, place) or None


def _pattern(value: object, place: str) -> str:
    pattern = _text(value, place)
    try:
        check_pattern(pattern)
    except GrammarError as error:
        raise _wrong(place, f"is no pattern: {error}") from None
    return pattern


def _types(value: object, place: str) -> list[str]:
    names = [value] if isinstance(value, str) else _names(value, place)
    for name in names:
        if name not in TYPES:
            shown = name[:60].encode("unicode_escape").decode()
            raise _wrong(place, f"must be of {', '.join(TYPES)}. Given: {shown}")
    if not names:
        raise _wrong(place, "must not be empty")
    return names


def _values(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(place, "must be a list")
    return value


def _flag(value: object, place: str) -> bool | None:
    if not isinstance(value, bool):
        raise _wrong(place, "must be true or false")
    return value or None


def _dependent(value: object, place: str) -> dict[str, list[str]]:
    if not isinstance(value, dict):
        raise _wrong(place, "must be an object of lists of strings")
    return {key: _names(item, pointer(place, key)) for key, item in value.items()}


_READERS: Final[dict[str, Callable[[Any, str], Any]]] = {
    **dict.fromkeys(_COUNTS, _count),
    "minimum": _number,
    "maximum": _number,
    "multipleOf": _step,
    "type": _types,
    "enum": _values,
    "required": _required,
    "pattern": _pattern,
    "format": _text,
    "uniqueItems": _flag,
    "dependentRequired": _dependent,
}


def _with_null(schema: dict[str, Any]) -> Schema:
    """Return a schema that also allows null, as OpenAPI's `nullable` says."""
    if not schema:
        return schema
    if set(schema) & {"type"} and not set(schema) & {
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "const",
    }:
        out = dict(schema)
        out["type"] = list(dict.fromkeys([*schema["type"], "null"]))
        if "enum" in schema and None not in schema["enum"]:
            out["enum"] = [*schema["enum"], None]
        return out
    return {"anyOf": [schema, {"type": ["null"]}]}


def _check_loop(name: str, definitions: dict[str, Schema], checked: set[str]) -> None:
    """Check that a definition does not consist of itself; those in `checked` do not.

    Raises:
        GrammarError: it does.
    """
    seen, level = checked | {name}, [name]
    while level:
        node = definitions.get(level.pop())
        if not isinstance(node, dict):
            continue
        for part in (node, *node.get("allOf", ())):
            reference = part.get("$ref") if isinstance(part, dict) else None
            if reference is None:
                continue
            other = reference.removeprefix(DEFINITIONS)
            if other == name:
                raise GrammarError("a reference leads back to itself")
            if other not in seen:
                seen.add(other)
                level.append(other)
