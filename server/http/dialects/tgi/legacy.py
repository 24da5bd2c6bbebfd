"""Fields that clients of TGI's routes send and TGI ignores or renamed: what each means here, or that it has no effect.

They come from Hugging Face's hosted inference API, the pipelines of transformers, and clients written for these:
huggingface.js 3 (`stop_sequences`, `options`), Semantic Kernel (`Details`, `max_time`, `num_return_sequences`,
`options`), llm-ls (`stop_tokens`; `parameters` in `parameters`), LangChain and Haystack (`stop_sequences`, and whatever
their users pass on to `generate`). Null always means that nothing is asked for. A name in no table is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from server.errors import ValidationError
from server.http.body.validation import describe, fields_of, parse
from server.http.dialects.tgi.schema import GenerateBody, GenerateParameters


class Renamed(NamedTuple):
    """Another name of a field. Lists of both names are joined.

    Attributes:
        field: the field that gets the value.
        convert: converts the value.
    """

    field: str
    convert: Callable[[object], object] = lambda value: value


class Fixed(NamedTuple):
    """A field that has one value here; any other is refused, because the reply would not be what was asked for.

    Attributes:
        value: the value.
    """

    value: object


class Ignored(NamedTuple):
    """A field without effect, which causes a warning.

    Attributes:
        neutral: values that ask for nothing, and cause none.
        instead: the field to use instead; empty if there is none.
    """

    neutral: tuple[object, ...] = ()
    instead: str = ""


Legacy: TypeAlias = Renamed | Fixed | Ignored


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _milliseconds(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return value  # refused as a value of the field
    return math.ceil(1000 * value)


BODY: Mapping[str, Legacy] = {
    "model": Ignored(),
    "options": Ignored(neutral=({},)),
    "task": Ignored(neutral=("text-generation",)),
}
"""Fields beside `inputs`. `options` has use_cache, wait_for_model and the like, for the hosted API's queue."""

PARAMETERS: Mapping[str, Legacy] = {
    "Details": Renamed("details"),
    "stop_sequences": Renamed("stop"),
    "stop_tokens": Renamed("stop"),
    "eos_token_id": Renamed("stop_token_ids", _as_list),
    "num_return_sequences": Fixed(1),
    "max_time": Renamed("timeout_ms", _milliseconds),
    "min_length": Ignored(neutral=(0,), instead="min_new_tokens"),
    "num_beams": Ignored(neutral=(1,)),
    "num_beam_groups": Ignored(neutral=(1,)),
    "early_stopping": Ignored(neutral=(False,)),
    "length_penalty": Ignored(neutral=(1,)),
    "diversity_penalty": Ignored(neutral=(0,)),
    "no_repeat_ngram_size": Ignored(neutral=(0,)),
    "encoder_no_repeat_ngram_size": Ignored(neutral=(0,)),
    "encoder_repetition_penalty": Ignored(neutral=(1,)),
    "penalty_alpha": Ignored(neutral=(0,)),
    "epsilon_cutoff": Ignored(neutral=(0,)),
    "eta_cutoff": Ignored(neutral=(0,)),
    "bos_token_id": Ignored(),
    "pad_token_id": Ignored(),
    "use_cache": Ignored(neutral=(True,)),
    "prefix": Ignored(neutral=("",)),
    "padding": Ignored(neutral=(False,)),
    "truncation": Ignored(neutral=(False,), instead="truncate"),
    "handle_long_generation": Ignored(instead="truncate"),
    "return_text": Ignored(neutral=(True,)),
    "return_tensors": Ignored(neutral=(False,)),
    "clean_up_tokenization_spaces": Ignored(neutral=(False,)),
    "skip_special_tokens": Ignored(neutral=(True,)),
}
"""Fields of `parameters`."""

_WATERMARK = "`watermark` has no effect"


def read_body(body: object) -> tuple[GenerateBody, tuple[str, ...]]:
    """Check a decoded JSON body and convert it.

    Returns:
        The body, and a warning for each field that has no effect.

    Raises:
        ValidationError: the body is not an object, or a field is unknown, missing, of the wrong type or outside
            its range.
    """
    warnings: list[str] = []
    if isinstance(body, dict):
        body = _translated(body, BODY, fields_of(GenerateBody), warnings)
        parameters = body.get("parameters")
        if isinstance(parameters, dict):
            parameters = _lifted(parameters)
            parameters = _translated(
                parameters, PARAMETERS, fields_of(GenerateParameters), warnings
            )
            body = {**body, "parameters": parameters}
    request = parse(GenerateBody, body)
    if request.parameters is not None and request.parameters.watermark:
        warnings.append(_WATERMARK)
    return request, tuple(warnings)


def _lifted(parameters: dict[str, object]) -> dict[str, object]:
    """Return parameters without the object of parameters inside, where llm-ls puts its own if the user has none."""
    inner = parameters.get("parameters")
    if not isinstance(inner, dict):
        return parameters
    return {**inner, **{name: v for name, v in parameters.items() if name != "parameters"}}


def _translated(
    fields: dict[str, object],
    table: Mapping[str, Legacy],
    known: Mapping[str, object],
    warnings: list[str],
) -> dict[str, object]:
    """Return an object without the fields of `table`, and append a warning for each that has no effect.

    Unknown fields stay, to be refused.
    """
    if fields.keys() <= known.keys():
        return fields
    kept = {name: value for name, value in fields.items() if name not in table}
    for name, row in table.items():
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(row, Renamed):
            if not _add(kept, row.field, row.convert(value)):
                warnings.append(f"`{name}` has no effect beside `{row.field}`")
        elif isinstance(row, Fixed):
            if not _equal(value, row.value):
                only = describe(row.value)
                raise ValidationError(f"`{name}` must be {only}. Given: {describe(value)}")
        elif not any(_equal(value, neutral) for neutral in row.neutral):
            instead = f"; use `{row.instead}`" if row.instead else ""
            warnings.append(f"`{name}` has no effect{instead}")
    return kept


def _add(fields: dict[str, object], name: str, value: object) -> bool:
    """Set a field, or join its list with another. Return whether the value has an effect."""
    present = fields.get(name)
    if present is None:
        fields[name] = value
        return True
    if isinstance(present, list) and isinstance(value, list):
        fields[name] = present + [entry for entry in value if entry not in present]
        return True
    return present == value


def _equal(value: object, other: object) -> bool:
    """Return whether two JSON values are equal; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
