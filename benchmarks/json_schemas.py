"""Makes JSON schemas of the shapes that real requests have, and documents that nearly follow them."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

Schema = dict[str, Any]

_WORDS: Final = (
    "name", "id", "status", "tags", "size", "price", "e-mail", "created at", "größe", "items", "next", "left", "right",
    "value", "unit", "street", "city", "zip", "phone", "kind",
)  # fmt: skip
_PATTERNS: Final = (
    "^[a-z]{1,8}$", r"^\d{3}-\d{4}$", "^(red|green|blue)( light)?$", "[0-9]+", "^[A-Z][a-z]+$", "^#[0-9a-f]{6}$",
    "^a.*z$", r"^\w+$",
)  # fmt: skip
_FORMATS: Final = ("date", "ipv4", "uuid", "email")
_MAX_DEPTH: Final = 3


class SchemaMaker:
    """Makes random schemas with the keywords that llguidance implements.

    Args:
        seed: equal seeds make equal schemas.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self) -> Schema:
        """Return the next schema."""
        pick = self._random.random()
        if pick < 0.1:
            return self._recursive()
        if pick < 0.2:
            return self._with_definitions()
        return self._schema(0) if pick < 0.35 else self._object(0)

    def _schema(self, depth: int) -> Schema:
        makers: list[Callable[[int], Schema]] = [
            self._string, self._string, self._integer, self._number, self._constant, self._simple,
        ]  # fmt: skip
        if depth < _MAX_DEPTH:
            makers += [
                self._object,
                self._object,
                self._array,
                self._array,
                self._choice,
                self._all,
            ]
        return self._random.choice(makers)(depth)

    def _string(self, _depth: int) -> Schema:
        rng = self._random
        kind = rng.randrange(5)
        if kind == 0:
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": rng.choice(_FORMATS)}
        schema: Schema = {"type": "string"}
        least = rng.randint(0, 5)
        if rng.random() < 0.5:
            schema["minLength"] = least
        if rng.random() < 0.8:
            schema["maxLength"] = least + rng.randint(0, 12)
        return schema

    def _integer(self, _depth: int) -> Schema:
        rng = self._random
        schema: Schema = {"type": "integer"}
        least = rng.randint(-1000, 1000)
        if rng.random() < 0.7:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = least
        if rng.random() < 0.7:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = least + rng.randint(2, 5000)
        if rng.random() < 0.15:
            schema["multipleOf"] = rng.choice([2, 5, 7])
        return schema

    def _number(self, _depth: int) -> Schema:
        rng = self._random
        schema: Schema = {"type": "number"}
        least = round(rng.uniform(-50, 50), rng.randint(0, 3))
        if rng.random() < 0.6:
            schema["minimum"] = least
        if rng.random() < 0.6:
            schema["maximum"] = least + rng.randint(1, 500)
        return schema

    def _constant(self, _depth: int) -> Schema:
        rng = self._random
        values: list[Any] = [
            None,
            True,
            0,
            -3,
            2.5,
            "",
            "text",
            'a "quote"',
            "größe\n",
            [1, "x"],
            {"k": 1},
        ]
        if rng.random() < 0.3:
            return {"const": rng.choice(values)}
        return {"enum": rng.sample(values, rng.randint(1, 5))}

    def _simple(self, _depth: int) -> Schema:
        rng = self._random
        if rng.random() < 0.5:
            return {"type": rng.choice(["boolean", "null"])}
        return {"type": rng.sample(["string", "integer", "boolean", "null"], rng.randint(1, 3))}

    def _object(self, depth: int) -> Schema:
        rng = self._random
        names = rng.sample(_WORDS, rng.randint(0, 5))
        schema: Schema = {
            "type": "object",
            "properties": {name: self._schema(depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
        }
        extra = rng.random()
        if extra < 0.6:
            schema["additionalProperties"] = False
        elif extra < 0.8:
            schema["additionalProperties"] = self._schema(_MAX_DEPTH)
        if rng.random() < 0.1:
            schema["patternProperties"] = {"^x-[a-z]+$": self._schema(_MAX_DEPTH)}
        if rng.random() < 0.05:
            schema["minProperties"] = rng.randint(1, 3)
        if rng.random() < 0.05:
            schema["maxProperties"] = rng.randint(1, 4)
        if rng.random() < 0.3:
            schema |= {"title": "A title", "description": "What this is for."}
        return schema

    def _array(self, depth: int) -> Schema:
        rng = self._random
        schema: Schema = {"type": "array"}
        if rng.random() < 0.2:
            schema["prefixItems"] = [self._schema(depth + 1) for _ in range(rng.randint(1, 3))]
            schema["items"] = False if rng.random() < 0.5 else self._schema(depth + 1)
        else:
            schema["items"] = self._schema(depth + 1)
        least = rng.randint(0, 2)
        if rng.random() < 0.4:
            schema["minItems"] = least
        if rng.random() < 0.7:
            schema["maxItems"] = least + rng.randint(0, 3)
        return schema

    def _choice(self, depth: int) -> Schema:
        rng = self._random
        key = rng.choice(["anyOf", "anyOf", "oneOf"])
        return {key: [self._schema(depth + 1) for _ in range(rng.randint(1, 3))]}

    def _all(self, depth: int) -> Schema:
        parts = [self._object(depth + 1) for _ in range(2)]
        for part in parts:
            part.pop("additionalProperties", None)
        return {"allOf": parts}

    def _recursive(self) -> Schema:
        node = {
            "type": "object",
            "properties": {
                "value": self._schema(2),
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return node | {"$schema": "https://json-schema.org/draft/2020-12/schema"}

    def _with_definitions(self) -> Schema:
        definitions = {f"part{i}": self._schema(1) for i in range(3)}
        properties = {
            name: {"$ref": f"#/$defs/part{self._random.randrange(3)}"}
            for name in self._random.sample(_WORDS, 3)
        }
        return {
            "$defs": definitions,
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }


def mutate(document: object, rng: random.Random) -> object:
    """Return a copy of a JSON document with one random change, which may or may not break its schema."""
    paths: list[tuple[Any, Any]] = []
    copy = json.loads(json.dumps(document))
    holder = [copy]
    stack: list[Any] = [holder]
    while stack:
        node = stack.pop()
        entries = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        paths += [(node, key) for key, _ in entries]
        stack += [value for _, value in entries if isinstance(value, dict | list)]
    node, key = rng.choice(paths)
    values: list[Any] = [
        None, True, 0, -1, 99_999, 1.5, -0.25, 1e300, "", "x", "a much longer text than most", [], {}, [None], {"x": 1},
    ]  # fmt: skip
    action = rng.randrange(5)
    if action == 0 and node is not holder:
        del node[key]
    elif action == 1 and isinstance(node[key], dict):
        node[key][rng.choice([*_WORDS, "x-a", "unknown"])] = rng.choice(values)
    elif action == 1 and isinstance(node[key], list):
        node[key].insert(rng.randint(0, len(node[key])), rng.choice(values))
    elif action == 2 and isinstance(node[key], str):
        node[key] = node[key] + rng.choice(["!", "0", "a", "\n", "ü", "aaaaaaaaaaaaaaaaaaaaa"])
    elif action == 2 and isinstance(node[key], int | float) and not isinstance(node[key], bool):
        node[key] = node[key] + rng.choice([1, -1, 0.5, 10_000, -10_000])
    else:
        node[key] = rng.choice(values)
    return holder[0]
