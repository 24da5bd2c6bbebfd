"""Writes the JSON schemas of Python's generators as JSON lines.

pip install pydantic[email] genson && python pydantic_types.py > pydantic.jsonl
"""

# ruff: noqa: T201, UP007, UP045

import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import typing
import uuid
from collections import deque
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar, Union

import genson
import pydantic
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from typing_extensions import TypedDict

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Flag(enum.IntFlag):
    A = 1
    B = 2


class Box(BaseModel, Generic[T]):
    item: T


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Node(BaseModel):
    value: int
    children: list["Node"] = []


class Closed(BaseModel):
    model_config = ConfigDict(
        extra="forbid", title="A closed one", json_schema_extra={"examples": [{}]}
    )
    a: int
    b: str | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int]
    a: int


class Computed(BaseModel):
    a: int = Field(alias="theA", deprecated=True)

    @pydantic.computed_field
    @property
    def twice(self) -> int:
        return 2 * self.a


class Typed(TypedDict, total=False):
    a: typing.Required[int]
    b: str


class Named(NamedTuple):
    a: int
    b: str = "x"


@dataclasses.dataclass
class Data:
    a: int
    b: list[str] = dataclasses.field(default_factory=list)
    c: Optional["Data"] = None


@pydantic.dataclasses.dataclass
class PydanticData:
    a: Annotated[int, Field(gt=0)]


class Root(pydantic.RootModel[list[int]]):
    pass


TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "bytes": bytes,
    "None": type(None),
    "Any": Any,
    "object": object,
    "Decimal": decimal.Decimal,
    "condecimal": pydantic.condecimal(max_digits=5, decimal_places=2),
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "UUID": uuid.UUID,
    "UUID4": pydantic.UUID4,
    "Path": pathlib.Path,
    "FilePath": pydantic.FilePath,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Interface": ipaddress.IPv6Interface,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "Pattern": re.Pattern,
    "list": list,
    "list[int]": list[int],
    "tuple": tuple,
    "tuple[int, str]": tuple[int, str],
    "tuple[int, ...]": tuple[int, ...],
    "set[int]": set[int],
    "frozenset[str]": frozenset[str],
    "set[Color]": set[Color],
    "deque[int]": deque[int],
    "dict": dict,
    "dict[str, int]": dict[str, int],
    "dict[int, str]": dict[int, str],
    "dict[Color, int]": dict[Color, int],
    "dict[UUID, int]": dict[uuid.UUID, int],
    "dict[constr, int]": dict[Annotated[str, Field(pattern="^[a-z]+$", max_length=4)], int],
    "Enum": Color,
    "IntEnum": Level,
    "IntFlag": Flag,
    "Literal": Literal["a", 1, None, True],
    "Optional[int]": Optional[int],
    "Union": Union[int, str, None],
    "Annotated": Annotated[int, Field(ge=0, lt=10)],
    "multiple_of": Annotated[int, Field(multiple_of=3, gt=0, le=30)],
    "float multiple_of": Annotated[float, Field(multiple_of=0.1)],
    "float bounds": Annotated[float, Field(gt=0, lt=0.1)],
    "finite": pydantic.FiniteFloat,
    "constr": Annotated[str, Field(min_length=1, max_length=5, pattern="^a")],
    "conlist": Annotated[list[int], Field(min_length=1, max_length=2)],
    "conset": Annotated[set[int], Field(min_length=1)],
    "condict": Annotated[dict[str, int], Field(min_length=1, max_length=2)],
    "PositiveInt": pydantic.PositiveInt,
    "NegativeFloat": pydantic.NegativeFloat,
    "NonNegativeInt": pydantic.NonNegativeInt,
    "StrictStr": pydantic.StrictStr,
    "EmailStr": pydantic.EmailStr,
    "NameEmail": pydantic.NameEmail,
    "AnyUrl": pydantic.AnyUrl,
    "HttpUrl": pydantic.HttpUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "Json": pydantic.Json,
    "Json[list[int]]": pydantic.Json[list[int]],
    "SecretStr": pydantic.SecretStr,
    "Base64Str": pydantic.Base64Str,
    "Base64Bytes": pydantic.Base64Bytes,
    "PastDate": pydantic.PastDate,
    "FutureDatetime": pydantic.FutureDatetime,
    "AwareDatetime": pydantic.AwareDatetime,
    "ByteSize": pydantic.ByteSize,
    "Model": Closed,
    "Open": Open,
    "Computed": Computed,
    "Node": Node,
    "Box[int]": Box[int],
    "list[Box[int]]": list[Box[int]],
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "plain union": Union[Cat, Dog],
    "TypedDict": Typed,
    "NamedTuple": Named,
    "dataclass": Data,
    "pydantic dataclass": PydanticData,
    "RootModel": Root,
    "JsonValue": pydantic.JsonValue,
    "list[Any]": list[Any],
    "nested": dict[str, list[Closed | None]],
    "Sequence": typing.Sequence[int],
    "Iterable": typing.Iterable[int],
    "Mapping": typing.Mapping[str, float],
    "Optional[Model]": Optional[Closed],
    "ImportString": pydantic.ImportString,
    "Callable": typing.Callable[[int], int],
    "type": type[int],
    "complex": complex,
    "Fraction": fractions.Fraction,
}


def write(generator, version, kind, schema):
    print(json.dumps({"generator": generator, "version": version, "type": kind, "schema": schema}))


def main():
    for name, kind in TYPES.items():
        seen = set()
        for mode in ("validation", "serialization"):
            try:
                model = pydantic.create_model("Value", value=(kind, ...))
                schema = TypeAdapter(model).json_schema(mode=mode)
            except pydantic.errors.PydanticInvalidForJsonSchema:
                continue
            if (text := json.dumps(schema, sort_keys=True)) not in seen:
                seen.add(text)
                write("pydantic", pydantic.VERSION, f"{name} {mode}", schema)
    values = [
        {},
        {"a": 1},
        {"a": [1, 2.5, "x", None]},
        {"a": {"b": [{"c": True}, {"d": 1}]}},
        {"a": []},
        {"a": [[1], ["x"]]},
    ]
    for i, value in enumerate(values):
        builder = genson.SchemaBuilder()
        builder.add_object(value)
        builder.add_object({"a": None, "z": 1})
        write("genson", genson.__version__, f"values {i}", builder.to_schema())


if __name__ == "__main__":
    main()
