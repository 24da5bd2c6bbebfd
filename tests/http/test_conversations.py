"""What a template lacks is said in a way that it writes, on every route alike; what the service sent is accepted."""

import httpx
import msgspec
import pytest

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.text.tools.formats import FORMATS
from tests.http.fakes import INFO
from tests.model.text import chat_cases

pytestmark = pytest.mark.anyio

GEMMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ 'model' if m['role'] == 'assistant' else \
m['role'] }}>{{ m['content'] | trim }}\n{% endfor %}"""
QWEN3 = """{% if tools %}<system>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% elif messages[0].role == 'system' %}<system>{{ messages[0].content }}
{% endif %}{% for m in messages %}{% set content = m.content if m.content is string else '' %}\
{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}<{{ m.role }}>{{ content }}
{% elif m.role == 'assistant' %}<assistant>{{ m.reasoning_content }}{{ content }}{% for call in m.tool_calls %}\
<tool_call>{"name": "{{ call.function.name }}", "arguments": {% if call.function.arguments is string %}\
{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}}</tool_call>{% endfor %}
{% elif m.role == 'tool' %}<tool>{{ content }}
{% endif %}{% endfor %}"""
# The branch with tools drops the system message; the first call of a message is the only one.
LOSSY = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% set messages = messages | \
rejectattr('role', 'equalto', 'system') | list %}{% endif %}{% for m in messages %}{% if m.tool_calls %}\
[{{ m.tool_calls[0].function | tojson }}]{% else %}{{ m.role }}:{{ m.content }}
{% endif %}{% endfor %}"""
ITEMS = LOSSY.replace(
    "{{ m.tool_calls[0].function | tojson }}",
    "{{ m.tool_calls[0].function.name }}{% for k, v in m.tool_calls[0].function.arguments.items() %}"
    "{{ k ~ '=' ~ v }}{% endfor %}",
)
# As DeepSeek's: arguments must be a text, and calls are written only beside null.
TEXT_ONLY = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}\
{% if m.tool_calls and m.content is none %}{% for call in m.tool_calls %}\
{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}{% else %}{{ m.role + ':' + m.content }}
{% endif %}{% endfor %}"""
# As Mistral's: roles alternate but for results, and ids have nine characters.
MISTRAL = """{% for m in messages %}{% if m.role in ('user', 'assistant') and not m.tool_calls %}\
{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}\
{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}{% for m in messages %}{% if loop.first and tools %}[TOOLS]\
{{ tools | tojson }}{% endif %}{% if m.role == 'user' %}[INST]{{ m.content }}{% elif m.tool_calls %}[TOOL_CALLS]\
{% for call in m.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}\
{{ call.function | tojson }}{% endfor %}{% elif m.role == 'assistant' %} {{ m.content }}{% elif m.role == 'tool' %}\
{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[RESULT]{{ m.content }}{% else %}\
{{ raise_exception('Only user and assistant') }}{% endif %}{% endfor %}"""
MISTRAL = "{% set ns = namespace(i=0) %}" + MISTRAL
# As Mistral's of 2024: the system message is written in the last message, if that is the user's.
LAST_USER = MISTRAL.replace(
    "{% for m in messages %}{% if loop.first",
    """{% if messages[0].role == 'system' %}\
{% set system, messages = messages[0].content, messages[1:] %}{% endif %}{% for m in messages %}{% if loop.first""",
)
LAST_USER = LAST_USER.replace(
    "[INST]", "[INST]{% if loop.last and system %}{{ system ~ ': ' }}{% endif %}"
)
TEMPLATES = {
    "gemma2": GEMMA2, "qwen3": QWEN3, "lossy": LOSSY, "items": ITEMS, "text only": TEXT_ONLY, "mistral": MISTRAL,
    "last user": LAST_USER,
    **{name: template for name, (template, _) in chat_cases.CASES.items()},
}  # fmt: skip

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(number, arguments, **fields):
    function = {"name": "weather", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function, **fields}


def result(number, content):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def said(role, content, **fields):
    return {"role": role, "content": content, **fields}


NULLS = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content")
)
CONVERSATIONS = {
    "developer": ([said("developer", "Ada"), said("user", "Bob")], ["Ada", "Bob"]),
    "system and developer": (
        [said("system", "Ada"), said("developer", "Bob"), said("user", "Cid")],
        ["Ada", "Bob", "Cid"],
    ),
    "later system": (
        [said("user", "Ada"), said("system", "Bob"), said("assistant", "Cid"), said("user", "Dan"),
         said("developer", "Eve")],
        ["Ada", "Bob", "Cid", "Dan", "Eve"],
    ),
    "only system": ([said("system", "Ada")], ["Ada"]),
    "system and the assistant's last": (
        [said("system", "Ada"), said("user", "Bob"), said("assistant", "Cid")], ["Ada", "Bob", "Cid"],
    ),
    "system and a result": (
        [said("system", "Ada"), said("user", "Bob"), said("assistant", None, tool_calls=[call(1, '{"city": "Cid"}')]),
         result(1, "Dan")],
        ["Ada", "Bob", "weather", "Cid", "Dan"],
    ),
    "repeated roles": (
        [said("user", "Ada"), said("user", "Bob"), said("assistant", "Cid"), said("assistant", "Dan"),
         said("user", "Eve")],
        ["Ada", "Bob", "Cid", "Dan", "Eve"],
    ),
    "calls": (
        [said("user", "Ada"),
         said("assistant", "Bob", tool_calls=[call(1, '{"city": "Cid"}'), call(2, '{"city": "Dan"}')]),
         result(1, "Eve"), result(2, "Fay"), said("user", "Gus")],
        ["Ada", "Bob", "weather", "Cid", "Dan", "Eve", "Fay", "Gus"],
    ),
    "a call that was cut off": (
        [said("user", "Ada"), said("assistant", None, tool_calls=[call(1, '{"city": "Bob')]), result(1, "Cid")],
        ["Ada", "weather", "Bob", "Cid"],
    ),
    "calls without arguments": (
        [said("user", "Ada"), said("assistant", None, tool_calls=[call(1, ""), call(2, None)]), result(1, "Bob"),
         result(2, "Cid")],
        ["Ada", "weather", "Bob", "Cid"],
    ),
    "functions": (
        [said("user", "Ada"),
         said("assistant", None, function_call={"name": "weather", "arguments": '{"city": "Bob"}'}),
         said("function", "Cid", name="weather")],
        ["Ada", "weather", "Bob", "Cid"],
    ),
    "a function without a result": (
        [said("user", "Ada"), said("assistant", None, function_call={"name": "weather", "arguments": "{}"}),
         said("function", None, name="weather")],
        ["Ada", "weather"],
    ),
    "a dump with nulls": (
        [said("user", "Ada"), said("assistant", "Bob", **NULLS), said("user", "Cid")], ["Ada", "Bob", "Cid"],
    ),
    "a dump of a call": (
        [said("user", "Ada"), said("assistant", None, **(NULLS | {"tool_calls": [call(1, "{}", index=None)]})),
         result(1, "Bob")],
        ["Ada", "weather", "Bob"],
    ),
    "no calls": ([said("user", "Ada"), said("assistant", "Bob", tool_calls=[]), said("user", "Cid")], ["Ada", "Bob"]),
    "refusals": (
        [said("user", "Ada"), said("assistant", None, refusal="Bob"),
         said("user", "Cid"), said("assistant", [{"type": "refusal", "refusal": "Dan"}]), said("user", "Eve")],
        ["Ada", "Bob", "Cid", "Dan", "Eve"],
    ),
    "parts": (
        [said("user", [{"type": "text", "text": "Ada"}, {"type": "text", "text": "Bob"}])], ["Ada", "Bob"],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def large_context(engine):
    engine.info = msgspec.structs.replace(INFO, max_model_len=8192, max_total_tokens=8192)


@pytest.fixture
async def open_with(make_app, tokenizer):
    """Opens a client of a service with a template and a format of calls."""
    clients = []

    async def open_one(template, tool_call_format="hermes"):
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        chat_template = ChatTemplate({"default": template}, tokenizer, tokens)
        app = make_app(chat_template, tool_call_format=tool_call_format)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        client = httpx.AsyncClient(transport=transport, base_url="http://test")
        clients.append(client)
        return client

    yield open_one
    for client in clients:
        await client.aclose()


async def prompt_of(client, tokenizer: Tokenizer, body):
    """Return the prompt that every route makes of a conversation, which must be the same one."""
    chat = await client.post("/v1/chat/completions", json={"max_tokens": 1} | body)
    assert chat.status_code == 200, chat.text
    counted = await client.post("/tokenize", json=body)
    assert counted.status_code == 200, counted.text
    rendered = await client.post("/chat_tokenize", json=body)
    assert rendered.status_code == 200, rendered.text
    tokens = counted.json()["tokens"]
    assert counted.json()["count"] == chat.json()["usage"]["prompt_tokens"] == len(tokens)
    assert [token["id"] for token in rendered.json()["tokenize_response"]] == tokens
    return rendered.json()["templated_text"]


@pytest.mark.parametrize("with_tools", [False, True], ids=["", "tools"])
@pytest.mark.parametrize("template", TEMPLATES)
async def test_no_message_is_dropped_or_refused(open_with, tokenizer, template, with_tools):
    client = await open_with(
        TEMPLATES[template], "mistral" if template in ("mistral", "last user") else "hermes"
    )
    for messages, words in CONVERSATIONS.values():
        body = {"messages": messages, **({"tools": [TOOL]} if with_tools else {})}

        text = await prompt_of(client, tokenizer, body)

        assert [word for word in words if word not in text] == [], messages
        if with_tools and template != "llama3.1":  # which writes only that there are tools
            assert "weather" in text


@pytest.mark.parametrize("format_", FORMATS, ids=lambda row: row.name)
async def test_calls_are_written_in_each_format_where_the_template_has_none(
    open_with, tokenizer, format_
):
    client = await open_with(GEMMA2, format_.name)
    messages, words = CONVERSATIONS["a call that was cut off"]

    text = await prompt_of(client, tokenizer, {"messages": messages, "tools": [TOOL]})

    assert [word for word in words if word not in text] == []
    assert format_.head_of("weather") in text


async def test_a_developers_message_is_the_systems_where_the_template_has_none(
    open_with, tokenizer
):
    client = await open_with(QWEN3)
    messages, _ = CONVERSATIONS["developer"]

    text = await prompt_of(client, tokenizer, {"messages": messages})

    assert text == "<system>Ada\n<user>Bob\n"


async def test_the_systems_text_begins_the_first_message_where_there_is_no_such_role(
    open_with, tokenizer
):
    client = await open_with(GEMMA2)
    messages, _ = CONVERSATIONS["system and developer"]

    text = await prompt_of(client, tokenizer, {"messages": messages})

    assert text.endswith("<user>Ada\n\nBob\n\nCid\n")


async def test_the_system_message_stays_where_the_template_writes_it(open_with, tokenizer):
    client = await open_with(LAST_USER, "mistral")
    messages = [said("system", "Ada"), said("user", "Bob"), said("assistant", "Cid")]

    texts = [
        await prompt_of(client, tokenizer, {"messages": some})
        for some in (messages[:2], [*messages, said("user", "Dan")], messages, messages[:1])
    ]

    assert texts == [
        "[INST]Ada: Bob",
        "[INST]Bob Cid[INST]Ada: Dan",
        "[INST]Ada\n\nBob Cid",
        "[INST]Ada",
    ]


async def test_each_result_follows_its_call_where_a_message_has_one_call_only(open_with, tokenizer):
    client = await open_with(ITEMS)
    messages, _ = CONVERSATIONS["calls"]

    text = await prompt_of(client, tokenizer, {"messages": messages})

    assert text == (
        "user:Ada\nassistant:Bob\n[weathercity=Cid]tool:Eve\n[weathercity=Dan]tool:Fay\nuser:Gus\n"
    )


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (QWEN3, '"arguments": {"city": "Bob}'),
        (TEXT_ONLY, 'weather {"city": "Bob'),
        (ITEMS, "[weathercity=Bob]"),
        (LOSSY, '"arguments": {"city": "Bob"}'),
    ],
)
async def test_arguments_that_were_cut_off_reach_each_template(
    open_with, tokenizer, template, written
):
    client = await open_with(template)
    messages, _ = CONVERSATIONS["a call that was cut off"]

    assert written in await prompt_of(client, tokenizer, {"messages": messages})


async def test_thoughts_reach_the_template_by_either_name(open_with, tokenizer):
    client = await open_with(QWEN3)
    user = said("user", "Ada")

    for name in ("reasoning", "reasoning_content"):
        messages = [user, said("assistant", "Bob", **{name: "Hm. "}), user]
        assert "Hm. Bob" in await prompt_of(client, tokenizer, {"messages": messages})


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "required"},
        {"chat_template_kwargs": {"x": 1}},
        {"add_generation_prompt": False},
        {
            "messages": [said("user", "Ada"), said("assistant", "Bob")],
            "continue_final_message": True,
        },
    ],
)
async def test_every_route_renders_the_same_prompt(open_with, tokenizer, fields):
    template = QWEN3 + "{{ x }}{% if add_generation_prompt %}<assistant>{% endif %}"
    client = await open_with(template)
    body = {"messages": [said("user", "Ada")], "tools": [TOOL], **fields}

    text = await prompt_of(client, tokenizer, body)

    assert ("weather" in text) == (fields.get("tool_choice") != "none")


async def test_several_parts_reach_a_template_that_reads_parts(open_with, tokenizer):
    client = await open_with(chat_cases.PARTS)
    messages, _ = CONVERSATIONS["parts"]

    assert "AdaBob" in await prompt_of(client, tokenizer, {"messages": messages})


@pytest.mark.parametrize(
    ("calls", "problem"),
    [
        ("x", "`messages.1.tool_calls` must be a list"),
        ([3], "`messages.1.tool_calls.0` must be an object"),
        ([{"type": "function"}], "`messages.1.tool_calls.0.function.name` must be a string"),
        ([{"function": {"name": 3}}], "`messages.1.tool_calls.0.function.name` must be a string"),
    ],
)
async def test_a_call_of_the_wrong_form_is_an_error_that_names_it(open_with, calls, problem):
    client = await open_with(QWEN3)
    messages = [said("user", "Ada"), said("assistant", None, tool_calls=calls)]

    response = await client.post("/v1/chat/completions", json={"messages": messages})

    assert response.status_code == 400
    assert problem in response.json()["error"]["message"]


async def test_items_of_a_response_are_accepted_back(open_with, engine, tokenizer):
    client = await open_with(QWEN3)
    text = {"type": "output_text", "text": "Bob", "annotations": [], "logprobs": []}
    called = {"type": "function_call", "call_id": "c", "name": "weather", "namespace": None}
    items = [
        said("user", "Ada"),
        {"type": "reasoning", "id": "r", "summary": [], "content": None, "status": None},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]},
        called | {"id": "f", "status": "incomplete", "arguments": '{"city": "Cid'},
        {"type": "function_call_output", "call_id": "c", "output": "Dan", "id": None, "status": None},
        {"type": "message", "id": "n", "role": "assistant", "status": "incomplete",
         "content": [{"type": "refusal", "refusal": "Eve"}]},
        said("user", "Fay", type=None),
    ]  # fmt: skip

    response = await client.post("/v1/responses", json={"input": items, "max_output_tokens": 1})

    assert response.status_code == 200, response.text
    prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids)
    assert [
        w for w in ("Ada", "Bob", '{"city": "Cid}', "Dan", "Eve", "Fay") if w not in prompt
    ] == []
