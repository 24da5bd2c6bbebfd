"""instructor: a typed answer in each mode that it has for OpenAI's API."""

import functools

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, Field, field_validator
from scenario import MODEL, run, url


class Answer(BaseModel):
    """A typed answer."""

    city: str
    degrees: int


def ask(mode, streamed):
    """Ask once."""
    client = instructor.from_openai(
        OpenAI(base_url=f"{url()}/v1", api_key="none", max_retries=0), mode=mode
    )
    arguments = {
        "model": MODEL,
        "max_tokens": 200,
        "temperature": 0.0,
        "max_retries": 1,
        "messages": [{"role": "user", "content": "How warm is Rome?"}],
    }
    if streamed:
        for _ in client.chat.completions.create_partial(response_model=Answer, **arguments):
            pass
    else:
        client.chat.completions.create(response_model=Answer, **arguments)


def by_responses(mode):
    """Ask once by Responses."""
    client = instructor.from_openai(
        OpenAI(base_url=f"{url()}/v1", api_key="none", max_retries=0), mode=mode
    )
    messages = [{"role": "user", "content": "How warm is Rome?"}]
    client.chat.completions.create(
        response_model=Answer, model=MODEL, max_output_tokens=200, max_retries=1, messages=messages
    )


class Refused(BaseModel):
    """An answer that is never valid, so that the model is asked again, with its call and the fault."""

    degrees: int = Field(ge=0, le=9)

    @field_validator("degrees")
    @classmethod
    def _refuse(cls, value):
        raise ValueError(f"not {value}")


def again(mode):
    """Ask until the retries are over."""
    client = instructor.from_openai(
        OpenAI(base_url=f"{url()}/v1", api_key="none", max_retries=0), mode=mode
    )
    messages = [{"role": "user", "content": "How warm is Rome?"}]
    try:
        client.chat.completions.create(
            response_model=Refused, model=MODEL, max_tokens=200, max_retries=2, messages=messages
        )
    except InstructorRetryException as error:
        found = str(error)
    # A request that the service refuses ends the retries too.
    assert "Error code" not in found, found
    assert 'generation number="2"' in found, found


MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON")
RESPONSES = ("RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS")
run(
    {
        f"{name}, streamed {streamed}": functools.partial(
            ask, getattr(instructor.Mode, name), streamed
        )
        for name in MODES
        for streamed in (False, True)
    }
    | {name: functools.partial(by_responses, getattr(instructor.Mode, name)) for name in RESPONSES}
    | {
        f"{name}, again": functools.partial(again, getattr(instructor.Mode, name))
        for name in ("TOOLS", "JSON_SCHEMA")
    },
    tolerated=(InstructorRetryException, IncompleteOutputException),
)
