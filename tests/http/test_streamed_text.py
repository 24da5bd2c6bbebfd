"""Any tokens, sent in any groups, stream to the text of a whole decode up to the first stop string in each dialect."""

import asyncio
import itertools
import json

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.text.chat_template import ChatTemplate
from server.engine.core.request import FinishReason
from server.http.app import create_app
from tests.http.conftest import CONFIG
from tests.http.fakes import EOS_ID, IM_END_ID, FakeEngine, event, put

# Characters of one to four bytes. No name of a special token contains one, so that only ordinary text completes a stop
# string.
ALPHABET = "ab\u00e9\u20ac\U0001f600 wE!"
SPECIAL = (EOS_ID, IM_END_ID)


def body_of_generate(options):
    parameters = {"stop": options["stop"], "max_new_tokens": 100}
    return {"inputs": "a", "parameters": parameters}


def body_of_completions(options):
    return {"prompt": "a", **options}


def body_of_chat(options):
    return {"messages": [{"role": "user", "content": "a"}], **options}


def body_of_responses(options):
    return {"input": "a", **options}


def body_of_messages(options):
    fields = {**options, "max_tokens": 60}
    if "stop" in fields:
        fields["stop_sequences"] = fields.pop("stop")
    return {"messages": [{"role": "user", "content": "a"}], **fields}


def data_of(response):
    lines = [line.removeprefix("data:") for line in response.text.split("\n")]
    return [json.loads(line) for line in lines if line.startswith((" {", "{"))]


def texts_of_generate(events):
    streamed = "".join(e["token"]["text"] for e in events if not e["token"]["special"])
    text, last = events[-1]["generated_text"], events[-1]["token"]
    assert text.startswith(streamed)
    # As in TGI, a character that a special token leaves incomplete at the end is in no token's text.
    rest = set(text[len(streamed) :])
    assert not rest or (last["special"] and rest == {"\ufffd"})
    return text


def texts_of_responses(events):
    streamed = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
    (done,) = (e["text"] for e in events if e["type"] == "response.output_text.done")
    assert done == streamed
    (message,) = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == streamed
    return streamed


# path and stream's path, body, text of a plain reply, text of a stream's events, whether `stop` stays in the text
DIALECTS = {
    "generate": (
        "/generate",
        "/generate_stream",
        body_of_generate,
        lambda reply: reply["generated_text"],
        texts_of_generate,
    ),
    "completions": (
        "/v1/completions",
        "/v1/completions",
        body_of_completions,
        lambda reply: reply["choices"][0]["text"],
        lambda events: "".join(e["choices"][0]["text"] for e in events),
    ),
    "chat": (
        "/v1/chat/completions",
        "/v1/chat/completions",
        body_of_chat,
        lambda reply: reply["choices"][0]["message"]["content"],
        lambda events: "".join(e["choices"][0]["delta"].get("content") or "" for e in events),
    ),
    "responses": (
        "/v1/responses",
        "/v1/responses",
        body_of_responses,
        lambda reply: reply["output"][0]["content"][0]["text"],
        texts_of_responses,
    ),
    "messages": (
        "/v1/messages",
        "/v1/messages",
        body_of_messages,
        lambda reply: "".join(block["text"] for block in reply["content"]),
        lambda events: "".join(
            e["delta"]["text"] for e in events if e["type"] == "content_block_delta"
        ),
    ),
}


class Service:
    """An application in an event loop of its own, so that examples share it."""

    def __init__(self, tokenizer):
        self.engine = FakeEngine()
        self.loop = asyncio.Runner()
        template = ChatTemplate({"default": "{{ messages[0].content }}"}, tokenizer)
        app = create_app(self.engine, tokenizer, CONFIG, chat_template=template)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    def post(self, path, body):
        response = self.loop.run(self.client.post(path, json=body))
        assert response.status_code == 200, response.text
        return response


@pytest.fixture(scope="module")
def service(tokenizer):
    service = Service(tokenizer)
    yield service
    service.loop.run(service.client.aclose())
    service.loop.close()


def in_groups(token_ids, sizes):
    """Make a script that delivers the tokens in groups of these sizes, the last one with the rest."""
    last = len(token_ids) - 1
    events = [event(t, FinishReason.LENGTH if i == last else None) for i, t in enumerate(token_ids)]

    async def script(_engine, _request, stream):
        rest = list(events)
        for size in [*sizes, len(rest)]:
            put(stream, *rest[:size])
            del rest[:size]
            await asyncio.sleep(0)

    return script


def whole_text(tokenizer, ids, stop, *, skip_special, included):
    """Decode all tokens at once and cut the text at the first stop string, found by a naive search.

    Returns None if a special token lies within a character, for which a search of the whole text has no position.
    """
    pieces, ordinary = [], []
    for token_id in [*ids, None]:
        if token_id is None or token_id in SPECIAL:
            pieces.append(("text", tokenizer.decode(ordinary)))
            ordinary = []
            if token_id is not None:
                pieces.append(("special", tokenizer.token_text(token_id)))
        else:
            ordinary.append(token_id)

    def visible(end):
        start, shown = 0, []
        for kind, text in pieces:
            if kind == "text" or not skip_special:
                shown.append(text[: max(0, end - start)])
            start += len(text)
        return "".join(shown)

    searched = "".join(text for _, text in pieces)
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special)
    if not stop:
        return whole
    if visible(len(searched)) != whole:
        return None
    for end in range(1, len(searched) + 1):
        found = [s for s in stop if searched[:end].endswith(s)]
        if found:
            return visible(end if included else end - max(map(len, found)))
    return whole


def token_lists(tokenizer):
    text = st.text(ALPHABET, min_size=1, max_size=8).map(tokenizer.encode)
    tokens = st.lists(st.integers(0, 259), min_size=1, max_size=6)
    return st.lists(text | tokens, min_size=1, max_size=4).map(
        lambda parts: [*itertools.chain(*parts)]
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_any_tokens_stream_to_the_text_of_a_whole_decode(service, tokenizer, dialect):
    path, stream_path, make_body, text_of_reply, text_of_stream = DIALECTS[dialect]
    first, *rest = tokenizer.encode("\U0001f600")

    @settings(max_examples=80)
    @given(
        ids=token_lists(tokenizer),
        sizes=st.lists(st.integers(1, 5), max_size=12),
        stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4),
        skip_special=st.booleans(),
        included=st.booleans(),
    )
    @example([first, EOS_ID, *rest], [1, 1, 1], [], True, False)  # within a character
    @example([first, EOS_ID], [1, 1], [], True, False)  # likewise, at the end
    @example([first, EOS_ID, *rest], [1, 1, 1], ["\U0001f600"], True, False)
    @example(tokenizer.encode("xab!y"), [1, 1, 1, 1], ["ab!", "b!y"], True, False)
    @example([*tokenizer.encode("a"), EOS_ID, *tokenizer.encode("b")], [1], ["ab"], True, False)
    @example(tokenizer.encode(" world!"), [], ["w"], True, True)
    def check(ids, sizes, stop, skip_special, included):
        options = {"stop": stop, "max_tokens": 100}
        options |= {"skip_special_tokens": skip_special, "include_stop_str_in_output": included}
        if dialect == "generate":  # keeps the stop string and has no special tokens in its text
            skip_special, included = True, True
        if dialect == "responses":
            options["max_output_tokens"] = options.pop("max_tokens")
        body = make_body(options)
        service.engine.script = in_groups(ids, sizes)

        plain = text_of_reply(service.post(path, body).json())
        streams = [
            text_of_stream(data_of(service.post(stream_path, body | {"stream": True})))
            for _ in range(2)  # the second is sent from the cache of rendered tokens
        ]

        expected = whole_text(tokenizer, ids, stop, skip_special=skip_special, included=included)
        assert streams == [plain, plain]
        if expected is not None:
            assert plain == expected

    check()
