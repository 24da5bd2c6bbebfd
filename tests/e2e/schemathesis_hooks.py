"""A check of schemathesis's: a body that the OpenAPI document allows is not refused for its types or names of fields.

It may be refused for a rule between fields or a limit of the model, which no schema states.
"""

import re

import schemathesis
from schemathesis.generation import GenerationMode

# Which fields a format needs depends on its type, and what a message needs on its role: rules between fields.
_BETWEEN_FIELDS = re.compile(
    r"`((response_format|text\.format)\.[a-z_.]+|messages\.\d+\.content|structures\.\d+\.end)`"
    r" is required"
)
_OF_THE_SCHEMA = re.compile(
    r"must be (an integer|a number|a string|a list|an object|true or false)|is required"
    r"|unknown field|cannot be empty|must be a JSON object"
)


@schemathesis.hook
def map_body(context, body):
    """Send whole numbers without a fraction: JSON Schema counts 2.0 among the integers, the service does not."""
    if isinstance(body, dict):
        return {name: map_body(context, value) for name, value in body.items()}
    if isinstance(body, list):
        return [map_body(context, value) for value in body]
    return int(body) if isinstance(body, float) and body.is_integer() else body


@schemathesis.check
def allowed_bodies_have_the_right_types(ctx, response, case):
    if case.meta.generation.mode is not GenerationMode.POSITIVE or response.status_code < 400:
        return
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    if _OF_THE_SCHEMA.search(_BETWEEN_FIELDS.sub("", message)):
        raise AssertionError(f"the schema allows this body: {message}")
