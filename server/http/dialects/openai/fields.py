"""Checks a body, and reports the fields that have no effect. Unknown fields are refused only with `--strict-fields`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

import pydantic

from server.errors import UnknownModelError
from server.http.body.validation import fields_of, parse, quote
from server.http.request_id import current_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.http.config import HTTPConfig

BodyT = TypeVar("BodyT", bound=pydantic.BaseModel)
# A field without effect: prefix, name, and whether it is known. Plain, since a body may have 200,000 of them.
_Ignored: TypeAlias = tuple[str, str, bool]

NO_EFFECT: Mapping[str, tuple[object, ...]] = {
    "logit_processors": ([],),
    "logits_processors": ([],),
    "metadata": ({},),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "use_beam_search": (False,),
    "user": (),
    "verbosity": (),
    "watermark": (False,),
}
"""Known fields without effect, never refused, and their values that ask for nothing."""
# Further ones are only counted, so that the header stays short.
_MOST_WARNINGS = 8
# TGI's clients and huggingface_hub's send these names, or the server's URL.
_ANY_MODEL = ("tgi", "dummy")
_ANY_MODEL_PREFIXES = ("http://", "https://")


def parse_body(
    model: type[BodyT],
    body: object,
    config: HTTPConfig,
    *,
    no_effect: Mapping[str, tuple[object, ...]] = NO_EFFECT,
    model_prefixes: tuple[str, ...] = (),
) -> tuple[BodyT, tuple[str, ...]]:
    """Check a decoded JSON body and convert it.

    Args:
        model: type of the body.
        body: the JSON.
        config: the names of the served model, and whether unknown fields are refused.
        no_effect: known fields without effect, as `NO_EFFECT`.
        model_prefixes: names that begin with one of these are accepted too.

    Returns:
        The body, and a warning for each field that has no effect.

    Raises:
        ValidationError: the body is not an object, or a field is missing, of the wrong type or outside its range;
            with `strict_fields` also if it is unknown.
        UnknownModelError: the body names a model that is not served.
    """
    ignored: list[_Ignored] = []
    if isinstance(body, dict):
        body, ignored = _without_extra(model, body, no_effect, strict=config.strict_fields)
    parsed = parse(model, body)
    name = getattr(parsed, "model", None)
    current_request().model = name
    check_model(name, config, model_prefixes)
    return parsed, _warnings(ignored)


def served_names(config: HTTPConfig) -> tuple[str, ...]:
    """Return the names of the served model; the first is the one in replies."""
    return config.served_model_name or (config.model_id,)


def check_model(name: str | None, config: HTTPConfig, prefixes: tuple[str, ...] = ()) -> None:
    """Check that a request's model is the served one, or that its name begins with one of the prefixes.

    Raises:
        UnknownModelError: it is not.
    """
    if name is None or name in served_names(config):
        return
    if name in _ANY_MODEL or name.startswith((*_ANY_MODEL_PREFIXES, *prefixes)):
        return
    raise UnknownModelError(
        f"the `model` {quote('', name)} does not exist; this server has "
        + " and ".join(f"`{served}`" for served in served_names(config))
    )


def _warnings(ignored: list[_Ignored]) -> tuple[str, ...]:
    warnings = [
        f"{quote(prefix, name)} {'has' if known else 'is unknown and has'} no effect"
        for prefix, name, known in ignored[:_MOST_WARNINGS]
    ]
    more = len(ignored) - _MOST_WARNINGS
    return (*warnings, f"{more} more fields have no effect") if more > 0 else tuple(warnings)


def _without_extra(
    model: type[pydantic.BaseModel],
    body: dict[str, object],
    no_effect: Mapping[str, tuple[object, ...]],
    *,
    strict: bool,
) -> tuple[dict[str, object], list[_Ignored]]:
    """Return a body without the fields that have no effect, and these fields if they ask for anything.

    Unknown fields stay in the body if they are to be refused.
    """
    known = fields_of(model)
    kept: dict[str, object] = {}
    ignored: list[_Ignored] = []
    for name, value in body.items():
        if name in known:
            kept[name] = value
            ignored += _ignored_within(model, name, value)
        elif name in no_effect:
            if value is not None and value not in no_effect[name]:
                ignored.append(("", name, True))
        elif strict:
            kept[name] = value
        elif value is not None:
            ignored.append(("", name, False))
    return kept, ignored


def _ignored_within(model: type[pydantic.BaseModel], name: str, value: object) -> list[_Ignored]:
    """Return the unknown fields of an object in a field, such as `stream_options`."""
    if not isinstance(value, dict):
        return []
    for option in getattr(fields_of(model)[name].annotation, "__args__", ()):
        if isinstance(option, type) and issubclass(option, pydantic.BaseModel):
            known = {field.alias or key for key, field in option.model_fields.items()}
            return [
                (f"{name}.", key, False)
                for key, entry in value.items()
                if key not in known and entry is not None
            ]
    return []
