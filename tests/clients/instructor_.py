"""instructor: a typed answer in each mode that it has for OpenAI's API."""

import functools

import instructor
from instructor.core import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel
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


MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON")
run(
    {
        f"{name}, streamed {streamed}": functools.partial(
            ask, getattr(instructor.Mode, name), streamed
        )
        for name in MODES
        for streamed in (False, True)
    },
    tolerated=(InstructorRetryException, IncompleteOutputException),
)
