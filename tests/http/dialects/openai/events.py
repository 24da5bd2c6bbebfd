"""Reads the events of an OpenAI stream."""

import json

from tests.http.fakes import FinishReason, event, put


def chunks(response):
    """Return the JSON of every event of a stream; checks that it ends with `[DONE]`."""
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    assert all(e.startswith("data: ") for e in events)
    return [json.loads(e.removeprefix("data: ")) for e in events]


def failing(*token_ids):
    """Make a script that fails after these tokens."""

    async def script(_engine, _request, stream):
        put(stream, *(event(i) for i in token_ids))
        put(stream, event(None, FinishReason.ERROR, error="engine restarted"))

    return script
