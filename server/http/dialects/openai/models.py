"""Describes the served model, once for each of its names."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from server.http.dialects.openai.fields import check_model, served_names
from server.http.dialects.openai.replies import Model, ModelList

if TYPE_CHECKING:
    from server.http.context import AppContext


def list_models(context: AppContext, created: int) -> ModelList:
    """Return all names of the served model.

    Args:
        context: the application's context.
        created: when the server started, in seconds since 1970.

    Raises:
        UnavailableError: the engine is not ready.
    """
    names = served_names(context.config)
    return ModelList(
        object="list",
        data=[_describe(name, context, created) for name in names],
        first_id=names[0],
        last_id=names[-1],
    )


def find_model(name: str, context: AppContext, created: int) -> Model:
    """Return the model with a name.

    Raises:
        UnknownModelError: there is none.
        UnavailableError: the engine is not ready.
    """
    check_model(name, context.config)
    names = served_names(context.config)
    return _describe(name if name in names else names[0], context, created)


def _describe(name: str, context: AppContext, created: int) -> Model:
    longest = context.engine_info().max_total_tokens
    return Model(
        id=name,
        object="model",
        created=created,
        owned_by="tessera",
        root=context.config.model_id,
        parent=None,
        max_model_len=longest,
        display_name=name,
        created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
        max_input_tokens=longest - 1,
        max_tokens=longest - 1,
    )
