"""Random JSON schemas with keywords of every kind, and outputs that follow their grammars."""

import json

from model.errors import GrammarError
from model.sampling.grammar import compile_constraint, compile_matcher

NAMES = ["a", "b", "name", "k_1", "x-y", 'q"', "Box[int]"]
TEXTS = ["", "a", "ab", 'say "x"', "\\", "é", "\n", "0"]
NUMBERS = [
    0,
    1,
    -1,
    3,
    10,
    2**31 - 1,
    2**53 + 1,
    -(2**63),
    2**63 - 1,
    2**64 - 1,
    0.1,
    -0.5,
    2.5,
    1e-7,
    1.7976931348623157e308,
    99.99,
]
STEPS = [1, 2, 3, 5, 7, 0.5, 0.25, 0.01, 0.1, 1.5, 1e-9, 10, 1000]
PATTERNS = [
    "^a+$",
    "b",
    "^[a-z]{2,4}$",
    "^[^a]+$",
    '^[^"]*$',
    "^\\d{3}-\\w+$",
    "^\\S+$",
    "^[\\u0000-\\u001f]{1,3}$",
    "a|^b$",
    "^(?!x)[a-z]+$",
    "^(a|b)*c?$",
    "\\.",
    "^.{1,3}$",
    "^[\\s\\S]*$",
    "[\\\\/]",
    "^\\W$",
    "^(?=.*[0-9])[a-z0-9]{2,6}$",
]
FORMATS = [
    "date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "int64", "float",
    "regex", "binary",
]  # fmt: skip
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


class SchemaMaker:
    """Makes random schemas.

    Args:
        rng: decides.
    """

    def __init__(self, rng):
        self._rng = rng

    def make(self):
        """Return a schema with definitions."""
        rng = self._rng
        self._definitions = rng.sample(["A", "B", "Box[int]"], rng.choice([0, 0, 1, 2]))
        schema = self._schema(3)
        if self._definitions:
            if not isinstance(schema, dict):
                schema = {"allOf": [schema]}
            schema["$defs"] = {name: self._schema(2) for name in self._definitions}
        return schema

    def _maybe(self, out, chance, **fields):
        if self._rng.random() < chance:
            for key, value in fields.items():
                out[key.rstrip("_").replace("dollar", "$")] = value()

    def _schema(self, depth):
        rng = self._rng
        pick = rng.random()
        if pick < 0.03:
            return rng.choice([True, {}])
        if depth <= 0 or pick < 0.12:
            return self._simple()
        if pick < 0.2 and self._definitions:
            name = rng.choice(self._definitions)
            out = {"$ref": f"#/$defs/{name}"}
            self._maybe(out, 0.3, description=lambda: "x", title=lambda: "T")
            return out
        if pick < 0.32:
            key = rng.choice(["anyOf", "oneOf", "allOf"])
            count = rng.choice([1, 2, 3])
            out = {key: [self._schema(depth - 1) for _ in range(count)]}
            self._maybe(out, 0.2, type_=lambda: rng.choice(TYPES))
            return out
        if pick < 0.36:
            out = self._object(depth)
            key = rng.choice(["not", "if", "dependentSchemas", "dependentRequired"])
            if key == "if":
                out |= {"if": self._schema(0), "then": self._schema(1), "else": self._schema(1)}
            elif key == "not":
                out["not"] = self._schema(1)
            elif key == "dependentSchemas":
                out[key] = {rng.choice(NAMES): self._schema(1)}
            else:
                out[key] = {rng.choice(NAMES): [rng.choice(NAMES)]}
            return out
        return rng.choice([self._object, self._object, self._array, lambda _: self._simple()])(
            depth
        )

    def _simple(self):
        rng = self._rng
        kind = rng.choice(["integer", "number", "string", "string", "enum", "const", "other"])
        if kind in ("integer", "number"):
            out = {"type": kind}
            number = lambda: rng.choice(NUMBERS)  # noqa: E731
            self._maybe(out, 0.3, minimum=number)
            self._maybe(out, 0.3, maximum=number)
            self._maybe(out, 0.15, exclusiveMinimum=number)
            self._maybe(out, 0.15, exclusiveMaximum=number)
            self._maybe(out, 0.2, multipleOf=lambda: rng.choice(STEPS))
            self._maybe(out, 0.2, format=lambda: rng.choice(FORMATS))
            return out
        if kind == "string":
            out = {"type": "string"}
            self._maybe(out, 0.3, minLength=lambda: rng.choice([0, 1, 3]))
            self._maybe(out, 0.3, maxLength=lambda: rng.choice([1, 4, 9, 2**31]))
            self._maybe(out, 0.5, pattern=lambda: rng.choice(PATTERNS))
            self._maybe(out, 0.3, format=lambda: rng.choice(FORMATS))
            return out
        if kind == "enum":
            values = [*TEXTS, *NUMBERS, None, True, [1, "a"], {"a": 1.5}]
            out = {"enum": rng.sample(values, rng.choice([1, 2, 4]))}
            self._maybe(out, 0.3, type_=lambda: rng.choice(TYPES))
            self._maybe(out, 0.2, minLength=lambda: 1, minimum=lambda: 1)
            return out
        if kind == "const":
            return {"const": rng.choice([*TEXTS, *NUMBERS, None, False, [], {"b": [1]}])}
        out = {"type": rng.choice([*TYPES[:2], rng.sample(TYPES[:5], 2)])}
        self._maybe(out, 0.2, minimum=lambda: 1, pattern=lambda: "^a", minItems=lambda: 1)
        self._maybe(out, 0.3, default=lambda: None, examples=lambda: [1], readOnly=lambda: True)
        return out

    def _array(self, depth):
        rng = self._rng
        out = {"type": "array"}
        self._maybe(out, 0.8, items=lambda: self._schema(depth - 1))
        self._maybe(
            out,
            0.3,
            prefixItems=lambda: [self._schema(depth - 1) for _ in range(rng.choice([1, 2]))],
        )
        self._maybe(out, 0.3, minItems=lambda: rng.choice([0, 1, 2]))
        self._maybe(out, 0.4, maxItems=lambda: rng.choice([1, 2, 3]))
        self._maybe(out, 0.2, uniqueItems=lambda: rng.choice([True, False]))
        self._maybe(out, 0.1, contains=lambda: self._schema(0))
        self._maybe(out, 0.05, minContains=lambda: rng.choice([0, 2]))
        self._maybe(out, 0.05, unevaluatedItems=lambda: False)
        return out

    def _object(self, depth):
        rng = self._rng
        names = rng.sample(NAMES, rng.choice([0, 1, 2, 3]))
        out = {"type": "object"}
        if names or rng.random() < 0.3:
            out["properties"] = {name: self._schema(depth - 1) for name in names}
        self._maybe(out, 0.7, required=lambda: [n for n in NAMES[:4] + names if rng.random() < 0.4])
        self._maybe(
            out, 0.6, additionalProperties=lambda: rng.choice([False, False, True, self._schema(0)])
        )
        self._maybe(
            out,
            0.15,
            propertyNames=lambda: rng.choice(
                [
                    {"type": "string"},
                    {"pattern": "^[a-c]$"},
                    {"enum": ["a", "b", "c"]},
                    {"maxLength": 3},
                    {"minLength": 1},
                ]
            ),
        )
        self._maybe(out, 0.15, patternProperties=lambda: {rng.choice(PATTERNS): self._schema(0)})
        self._maybe(out, 0.15, minProperties=lambda: rng.choice([0, 1, 2, 3]))
        self._maybe(out, 0.15, maxProperties=lambda: rng.choice([1, 2, 4]))
        self._maybe(out, 0.1, unevaluatedProperties=lambda: False)
        self._maybe(out, 0.1, title=lambda: "T", nullable=lambda: False, x_note=lambda: 1)
        return out


def outputs(walker, schema, seed, walks, limit=200):
    """Return the translation of a schema and some outputs that follow it; None and the reason if it is refused."""
    try:
        found = compile_constraint(walker.vocabulary, "json_schema", schema)
        matcher = compile_matcher(walker.vocabulary, found.grammar)
    except GrammarError as error:
        return None, str(error)
    walker.reseed(seed)
    texts = [walker.walk(matcher.copy(), limit) for _ in range(walks)]
    return found, [json.loads(text) for text in texts if text is not None]
