"""Messages: blocks of content become messages of a chat."""

import pytest

from server.http.context import AppContext
from tests.http.dialects.anthropic.conftest import USER

pytestmark = pytest.mark.anyio

HEADER = "x-anthropic-billing-header: cc_version=2.1.37; cc_entrypoint=cli; cch="
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "K"}}
CALLED = {"role": "assistant", "content": [CALL]}
CHAT_CALL = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "K"}},
}


def text(value):
    return {"type": "text", "text": value}


def result(content=None, call_id="toolu_1", **fields):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


@pytest.fixture
def rendered(ask, monkeypatch):
    """Posts a body and returns the messages that the chat template gets."""

    async def post(messages=(USER,), **fields):
        calls = []

        async def encode_chat(self, messages, **options):
            calls.append((messages, options))
            return self.tokenizer.encode("x")

        with monkeypatch.context() as patch:
            patch.setattr(AppContext, "encode_chat", encode_chat)
            template = "{{ tools }}{{ messages }}"
            response = await ask(messages, template, **fields)
        assert response.status_code == 200, response.text
        ((messages, _),) = calls
        return messages

    return post


@pytest.mark.parametrize("system", ["Be brief.", [text("Be brief.")]])
async def test_the_system_prompt_is_the_first_message(rendered, system):
    assert await rendered(system=system) == [{"role": "system", "content": "Be brief."}, USER]


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
async def test_an_empty_system_prompt_is_no_message(rendered, system):
    assert await rendered(system=system) == [USER]


@pytest.mark.parametrize(
    "system",
    [
        [text(f"{HEADER}1;"), text("Be brief.")],
        [text(f"{HEADER}1;\nBe brief.")],
        f"{HEADER}1;\n\nBe brief.",
    ],
)
async def test_the_billing_header_is_no_part_of_the_prompt(rendered, system):
    assert await rendered(system=system) == [{"role": "system", "content": "Be brief."}, USER]
    assert await rendered([{"role": "system", "content": system}, USER]) == [
        {"role": "system", "content": "Be brief."},
        USER,
    ]


async def test_requests_that_differ_in_their_billing_header_have_one_prompt(ask, engine):
    for number in range(2):
        await ask(system=[text(f"{HEADER}{number};"), text("Be brief.")])

    first, second = engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_only_the_system_prompt_has_a_billing_header(rendered):
    (message,) = await rendered([{"role": "user", "content": f"{HEADER}1;"}])

    assert message["content"] == f"{HEADER}1;"


async def test_messages_of_one_role_that_follow_each_other_are_one(rendered):
    messages = await rendered(
        [
            USER,
            {"role": "user", "content": [text("there")]},
            {"role": "assistant", "content": "A"},
            {"role": "assistant", "content": "B"},
            {"role": "system", "content": "Now be brief."},
            USER,
        ],
        system="S",
    )

    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "system", "user",
    ]  # fmt: skip


async def test_texts_are_those_of_the_same_parts_in_chat(ask, open_chat, engine):
    parts = [text("one"), text("two")]
    await ask([{"role": "user", "content": parts}])
    client = await open_chat()
    await client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]}
    )

    first, second = engine.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_calls_and_their_results_are_those_of_a_chat(rendered):
    messages = await rendered(
        [
            USER,
            {"role": "assistant", "content": [text("I look."), CALL]},
            {"role": "user", "content": [result("rain"), text("So?")]},
        ]
    )

    assert messages == [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "user", "content": "So?"},
    ]


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (result(), ""),
        (result([]), ""),
        (result([text("rain")]), "rain"),
        (result([{"type": "tool_reference", "tool_name": "weather"}]), "weather"),
        (result("no city", is_error=True), "Error: no city"),
        (result(is_error=True), "Error: "),
    ],
)
async def test_the_content_of_a_result_is_text(rendered, block, content):
    messages = await rendered([USER, CALLED, {"role": "user", "content": [block]}])

    assert messages[1] == {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]}
    assert messages[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": content}


async def test_reasoning_is_left_to_the_template(rendered):
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "redacted_thinking", "data": "AAAA"},
        text("A"),
    ]

    messages = await rendered([USER, {"role": "assistant", "content": blocks}, USER])

    assert messages[1] == {"role": "assistant", "content": "A", "reasoning_content": "Hm."}


async def test_an_empty_message_of_the_assistant_may_be_sent_back(rendered):
    messages = await rendered([USER, {"role": "assistant", "content": []}, USER])

    assert messages == [USER, {"role": "assistant", "content": ""}, USER]


SOURCE = {"type": "text", "media_type": "text/plain", "data": "It rains."}


@pytest.mark.parametrize(
    ("block", "content"),
    [
        ({"type": "document", "source": SOURCE}, "It rains."),
        ({"type": "document", "source": SOURCE, "title": "News", "context": None}, "News\nIt rains."),
        ({"type": "document", "source": SOURCE, "title": "News", "context": "Old"}, "News\nOld\nIt rains."),
        ({"type": "document", "source": {"type": "content", "content": "It rains."}}, "It rains."),
        ({"type": "document", "source": {"type": "content", "content": [text("It"), text("rains.")]}}, "It\nrains."),
        (
            {"type": "search_result", "source": "https://x.org", "title": "News", "content": [text("It rains.")]},
            "News\nhttps://x.org\nIt rains.",
        ),
    ],
)  # fmt: skip
async def test_documents_of_text_and_search_results_are_text(rendered, block, content):
    messages = await rendered([{"role": "user", "content": [block]}])
    results = [CALLED, {"role": "user", "content": [result([block])]}]

    assert messages == [{"role": "user", "content": content}]
    assert (await rendered(results))[1]["content"] == content


async def test_citations_have_no_effect(ask):
    document = {"type": "document", "source": SOURCE, "citations": {"enabled": True}}
    silent = [{"role": "user", "content": [document | {"citations": {"enabled": False}}]}]
    results = [CALLED, {"role": "user", "content": [result([document])]}]

    warned = [
        (await ask(messages)).json().get("warnings")
        for messages in (silent, [{"role": "user", "content": [document]}], results)
    ]

    assert warned == [None, ["`citations` has no effect"], ["`citations` has no effect"]]


async def test_what_tools_of_anthropic_did_is_skipped_with_a_warning(ask, rendered):
    blocks = [
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
        text("It rains."),
    ]
    conversation = [USER, {"role": "assistant", "content": blocks}, USER]

    messages = await rendered(conversation)
    response = await ask(conversation)

    assert messages == [USER, {"role": "assistant", "content": "It rains."}, USER]
    assert response.json()["warnings"] == [
        "`messages`: blocks of the type `server_tool_use` are skipped",
        "`messages`: blocks of the type `web_search_tool_result` are skipped",
    ]


@pytest.mark.parametrize("kind", ["base64", "url", "file", None, []])
async def test_documents_of_other_sources_are_refused(ask, kind):
    document = {"type": "document", "source": {"type": kind, "data": "AAAA", "url": "x"}}

    response = await ask([{"role": "user", "content": [document]}])

    assert response.status_code == 400
    assert "Given: `document`" in response.json()["error"]["message"]


def block(kind, **fields):
    return {"role": "user", "content": [{"type": kind, **fields}]}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "`messages` cannot be empty"),
        ([USER, {"role": "user", "content": []}], "`messages.1.content` cannot be empty"),
        ([{"role": "assistant", "content": ""}], "`messages` has no text that begins a prompt"),
        ([{"role": "tool", "content": "x"}], "`messages.0.role` must be one of user, assistant, system. Given: `tool`"),
        ([{"content": "x"}], "`messages.0.role` must be one of user, assistant, system. Given: null"),
        ([{"role": "user"}], "`messages.0.content` must be a string or a list of blocks. Given: null"),
        ([{"role": "user", "content": [1]}], "`messages.0.content.0` must be an object. Given: 1"),
        ([{"role": [], "content": "x"}], "`messages.0.role` must be one of user, assistant, system. Given: a list"),
        (
            [USER, block("image", source={})],
            "`messages.1.content.0.type` must be `text` or `tool_result`: the model reads text only. Given: `image`",
        ),
        (
            [block("document", source={})],
            "`messages.0.content.0.type` must be `text` or `tool_result`: the model reads text only. Given: `document`",
        ),
        ([block("text")], "`messages.0.content.0.text` must be a string. Given: null"),
        (
            [block("tool_result", tool_use_id="x")],
            "`messages.0.content.0.tool_use_id` must be the `id` of a `tool_use` before it. Given: `x`",
        ),
        (
            [CALLED, block("tool_result", tool_use_id="toolu_1", content=[{"type": "image"}])],
            "`messages.1.content.0.content.0.type` must be `text` or `tool_reference`: the model reads text only. "
            "Given: `image`",
        ),
        (
            [CALLED, block("tool_result", tool_use_id="toolu_1", is_error="no")],
            "`messages.1.content.0.is_error` must be true or false. Given: a string",
        ),
        (
            [{"role": "assistant", "content": [CALL | {"input": "{}"}]}],
            "`messages.0.content.0.input` must be an object. Given: a string",
        ),
        (
            [USER, CALLED],
            "`messages`: a message of the user with a `tool_result` for each `tool_use` must follow the last one",
        ),
    ],
)  # fmt: skip
async def test_what_the_model_cannot_read_is_refused_by_name(ask, engine, messages, message):
    response = await ask(messages)

    assert response.status_code == 400
    assert response.json()["error"] == {"type": "invalid_request_error", "message": message}
    assert engine.requests == []


async def test_a_system_prompt_of_other_blocks_is_refused(ask):
    response = await ask(system=[{"type": "image"}])

    assert response.json()["error"]["message"] == (
        "`system.0.type` must be `text`: the model reads text only. Given: `image`"
    )


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_thread_that_is_continued_is_not_found_so_that_clients_send_all_messages(
    open_chat, path
):
    client = await open_chat()
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    messages = [{"role": "user", "content": [result("20")]}]

    response = await client.post(
        path, json={"max_tokens": 9, "messages": messages, "thread": thread}
    )

    assert response.status_code == 404
    error = response.json()["error"]
    assert error["type"] == "not_found_error"
    assert error["details"] == {"error_code": "thread_not_found"}


async def test_a_thread_that_is_created_has_no_effect(ask):
    response = await ask(thread={"type": "create"})

    assert response.status_code == 200
    assert response.json()["warnings"] == ["`thread` has no effect"]


@pytest.mark.parametrize("thread", [{"type": "fork"}, {}, "create"])
async def test_another_thread_is_an_error(ask, thread):
    response = await ask(thread=thread)

    assert response.status_code == 400
    assert "`thread" in response.json()["error"]["message"]
