"""guidance: text, choices, expressions and schemas by its models for vLLM and SGLang."""

import functools

from guidance import assistant, gen, json, regex, select, user
from guidance.models.experimental import SglangModel, VLLMModel
from pydantic import BaseModel, ConfigDict, Field
from scenario import MODEL, run, url


class Answer(BaseModel):
    """A typed answer; short, since guidance recurses once for each piece of a stream."""

    model_config = ConfigDict(extra="forbid")

    degrees: int = Field(ge=0, le=99)


GRAMMARS = {
    "text": gen("x", max_tokens=8),
    "choice": select(["cold", "warm"], name="x"),
    "regex": regex("[0-9]{1,3}", name="x"),
    "schema": json("x", schema=Answer),
}


def ask(kind, grammar):
    """Ask once."""
    model = kind(MODEL, base_url=f"{url()}/v1", api_key="none", echo=False)
    with user():
        model += "How warm is Rome?"
    with assistant():
        model += grammar
    assert model["x"] is not None


run(
    {
        f"{kind.__name__}, {name}": functools.partial(ask, kind, grammar)
        for kind in (VLLMModel, SglangModel)
        for name, grammar in GRAMMARS.items()
    }
)
