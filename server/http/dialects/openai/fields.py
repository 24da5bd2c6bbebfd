"""Checks a body, and reports the fields that have no effect. Unknown fields are refused only with `--strict-fields`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

import pydantic

from server.errors import UnknownModelError, ValidationError
from server.http.adapters.names import ANY_MODEL
from server.http.body.validation import fields_of, parse, quote, unsupported
from server.http.config import served_names
from server.http.request_id import current_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from server.http.config import HTTPConfig
    from server.http.context import AppContext

BodyT = TypeVar("BodyT", bound=pydantic.BaseModel)
# A field without effect: prefix, name, and whether it is known. Plain, since a body may have 200,000 of them.
_Ignored: TypeAlias = tuple[str, str, bool]

NO_EFFECT: Mapping[str, tuple[object, ...]] = {
    "access_programs": ([],),
    "background_options": ({},),
    "cache_prompt": (True,),
    "client_metadata": ({},),
    "context_length_exceeded_behavior": ("error",),
    "context_management": ([],),
    "documents": ([],),
    "guided_decoding_backend": (),
    "image": ({},),
    "include_reasoning": (True,),
    "max_tool_calls": (),
    "metadata": ({},),
    "moderation": (),
    "n_probs": (0,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": (),
    "reasoning": ({}, {"effort": "none"}, {"effort": None, "summary": None}),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "separate_reasoning": (),
    "service_tier": ("auto", "default"),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_prompt": (),
    "top_n_tokens": (0,),
    "use_beam_search": (False,),
    "user": (),
    "verbosity": (),
    "watermark": (False,),
    "web_search_options": (),
}
"""Known fields without effect, never refused, and their values that ask for nothing."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "custom_logit_processor": ("",),
    "guided_decoding": ({},),
    "guided_decoding_params": ({},),
    "guided_json_object": (False,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "input_ids": (),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_path": (),
    "n_indent": (0,),
    "prompt_embeds": (),
    "stop_regex": ("", []),
    "template": ("",),
}
"""Fields of other servers that this one does not support and that change what the text may be, so that they cannot be
left out, and their values that ask for nothing."""

OTHER_NAMES: Mapping[str, str] = {
    "grammar_string": "grammar",
    "max_new_tokens": "max_tokens",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "regex_pattern": "regex",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
}
"""Names that other servers have for fields, where a body has such a field."""
_NO_LIMIT = -1  # of `n_predict`
# The same within `structured_outputs`, `nvext` and `text`. Those of JSON have none on other constraints.
_JSON = frozenset({"json", "json_object"})
_ONLY_OF_JSON = frozenset(
    {"disable_additional_properties", "disable_any_whitespace", "whitespace_pattern"}
)
_NO_EFFECT_WITHIN = _ONLY_OF_JSON | {
    "backend", "disable_fallback", "guided_decoding_backend", "verbosity",
}  # fmt: skip
# Further ones are only counted, so that the header stays short.
_MOST_WARNINGS = 8
# TGI's clients and huggingface_hub's send these names, or the server's URL.
_ANY_MODEL_PREFIXES = ("http://", "https://")


def parse_body(
    model: type[BodyT],
    body: object,
    context: AppContext,
    *,
    no_effect: Mapping[str, tuple[object, ...]] = NO_EFFECT,
    model_prefixes: tuple[str, ...] = (),
) -> tuple[BodyT, tuple[str, ...]]:
    """Check a decoded JSON body and convert it.

    Args:
        model: type of the body.
        body: the JSON.
        context: has the names of the served model and of adapters, and whether unknown fields are refused.
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
        body, ignored = _without_extra(model, body, no_effect, strict=context.config.strict_fields)
    parsed = parse(model, body)
    name = getattr(parsed, "model", None)
    current_request().model = name
    check_model(name, context, model_prefixes)
    return parsed, _warnings(ignored)


def check_model(name: str | None, context: AppContext, prefixes: tuple[str, ...] = ()) -> None:
    """Check that a request's model is the served one or an adapter, or that its name begins with one of the prefixes.

    The current request has the adapter from then on.

    Raises:
        UnknownModelError: it is neither.
    """
    served, adapters = served_names(context.config), context.adapters
    if name is None or name in served:
        return
    if adapters.knows(name):
        adapters.choose(name)
        return
    if name in ANY_MODEL or name.startswith((*_ANY_MODEL_PREFIXES, *prefixes)):
        return
    raise UnknownModelError(
        f"the `model` {quote('', name)} does not exist; this server has "
        + " and ".join([*(f"`{it}`" for it in served), *adapters.listed()])
    )


def reply_model(name: str | None, config: HTTPConfig) -> str:
    """Return the model that a reply names: that of the request if it is served, or its adapter."""
    names = served_names(config)
    return current_request().adapter_name or (name if name in names else names[0])


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
        if name not in known and OTHER_NAMES.get(name) in known:
            _rename(kept, body, name, value)
        elif name in known:
            if name in kept:  # under another name, which agrees or says nothing
                continue
            kept[name] = value
            ignored += _ignored_within(model, name, value)
        elif name in no_effect:
            if value is not None and value not in no_effect[name]:
                ignored.append(("", name, True))
        elif name in REFUSED:
            if value is not None and value not in REFUSED[name]:
                raise ValidationError(unsupported(name, value))
        elif strict:
            kept[name] = value
        elif value is not None:
            ignored.append(("", name, False))
    return kept, ignored


def _rename(kept: dict[str, object], body: dict[str, object], name: str, value: object) -> None:
    """Keep a field under the name that it has here.

    Raises:
        ValidationError: the body has that field too, or another name of it, with another value.
    """
    if value is None or (name == "n_predict" and value == _NO_LIMIT):
        return
    field = OTHER_NAMES[name]
    for other in (body.get(field), kept.get(field)):
        if other is not None and other != value:
            raise ValidationError(f"`{field}` and `{name}` exclude each other")
    kept[field] = value


def _ignored_within(model: type[pydantic.BaseModel], name: str, value: object) -> list[_Ignored]:
    """Return the unknown fields of an object in a field, such as `stream_options`."""
    if not isinstance(value, dict):
        return []
    for option in getattr(fields_of(model)[name].annotation, "__args__", ()):
        if isinstance(option, type) and issubclass(option, pydantic.BaseModel):
            known = {field.alias or key for key, field in option.model_fields.items()}
            if not value.keys() & _JSON:
                known -= _ONLY_OF_JSON
            return [
                (f"{name}.", key, key in _NO_EFFECT_WITHIN)
                for key, entry in value.items()
                if key not in known and entry is not None
            ]
    return []
