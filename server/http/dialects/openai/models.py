"""Describes the served model, once for each of its names."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from server.http.config import served_names
from server.http.dialects.openai.fields import check_model
from server.http.dialects.openai.replies import Model, ModelList
from server.http.request_id import current_request

if TYPE_CHECKING:
    from server.http.context import AppContext


def list_models(context: AppContext, created: int) -> ModelList:
    """Return all names of the served model, and the adapters that are loaded.

    Args:
        context: the application's context.
        created: when the server started, in seconds since 1970.

    Raises:
        UnavailableError: the engine is not ready.
    """
    names = served_names(context.config)
    data = [_describe(name, context, created) for name in names]
    data += [_describe(it.ref.name, context, created, names[0]) for it in context.adapters.loaded]
    return ModelList(object="list", data=data, first_id=data[0].id, last_id=data[-1].id)


def find_model(name: str, context: AppContext, created: int) -> Model:
    """Return the model with a name.

    Raises:
        UnknownModelError: there is none.
        UnavailableError: the engine is not ready.
    """
    check_model(name, context)
    names = served_names(context.config)
    if current_request().adapter_name is not None:
        return _describe(name, context, created, names[0])
    return _describe(name if name in names else names[0], context, created)


def _describe(name: str, context: AppContext, created: int, parent: str | None = None) -> Model:
    longest = context.engine_info().max_total_tokens
    return Model(
        id=name,
        object="model",
        created=created,
        owned_by="tessera",
        root=context.config.model_id if parent is None else name,
        parent=parent,
        max_model_len=longest,
        display_name=name,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        max_input_tokens=longest - 1,
        max_tokens=longest - 1,
    )
