"""POST /chat_tokenize: conversations as the chat template renders them."""

import asyncio

import pytest

from model.errors import ChatTemplateError
from model.text.chat_template import ChatTemplate
from model.text.rendering import renderer
from model.text.rendering.renderer import RENDERERS
from server.http.config import HTTPConfig
from server.http.text.chat import load_chat_template
from tests.http.fakes import IM_END_ID, save_tokenizer

pytestmark = pytest.mark.anyio

TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}\
{% if tools %}[{{ tools | length }}]{% endif %}{{ guideline }}{% if add_generation_prompt %}assistant:{% endif %}"""
USER = {"role": "user", "content": "hi <|im_end|> é"}


@pytest.fixture
def open_chat(open_client, tokenizer):
    async def open_one(template=TEMPLATE):
        return await open_client(chat_template=ChatTemplate({"default": template}, tokenizer))

    return open_one


@pytest.fixture
async def client(open_chat):
    return await open_chat()


async def chat(client, messages=(USER,), **fields):
    return await client.post("/chat_tokenize", json={"messages": list(messages), **fields})


async def test_the_reply_has_the_text_and_its_tokens(client):
    response = await chat(client)
    reply = response.json()
    tokens = reply["tokenize_response"]

    assert response.status_code == 200
    assert reply["templated_text"] == "user:hi <|im_end|> é<|im_end|>assistant:"
    assert [t["text"] for t in tokens if t["id"] == IM_END_ID] == ["<|im_end|>"]
    for token in tokens:
        assert token["text"] == reply["templated_text"][token["start"] : token["stop"]]
    assert tokens[-1]["stop"] == len(reply["templated_text"])


async def test_tools_guideline_and_variables_reach_the_template(client):
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def text(**fields):
        return (await chat(client, [{"role": "u", "content": "x"}], **fields)).json()[
            "templated_text"
        ]

    assert await text(tools=tools) == "u:x<|im_end|>[1]assistant:"
    assert await text(tools=tools, tool_choice="none") == "u:x<|im_end|>assistant:"
    assert await text(guideline="G") == "u:x<|im_end|>Gassistant:"
    assert await text(chat_template_kwargs={"guideline": "K"}) == "u:x<|im_end|>Kassistant:"
    assert await text(add_generation_prompt=False) == "u:x<|im_end|>"
    assert await text(continue_final_message=True) == "u:x"


async def test_fields_of_a_chat_completion_are_accepted(client):
    fields = {
        "model": "tgi",
        "max_tokens": 5,
        "temperature": 0.1,
        "stream": True,
        "stop": ["a"],
        "seed": 1,
        "n": 1,
    }

    assert (await chat(client, **fields)).status_code == 200


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "`messages` is required"),
        ({"messages": "x"}, "`messages` must be a list"),
        ({"messages": []}, "`messages`"),
        ({"messages": [3]}, "`messages.0` must be an object"),
        ({"messages": [{"content": "x"}]}, "`messages.0.role` is required"),
        ({"messages": [USER], "mesages": []}, "unknown field `mesages`; did you mean `messages`?"),
        ({"messages": [USER], "tool_prompt": "x"}, "`tool_prompt` is not supported"),
        (
            {"messages": [USER], "chat_template_kwargs": {"tools": 1}},
            "`tools` cannot be a variable",
        ),
        (
            {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
            "`add_generation_prompt` and `continue_final_message` exclude each other",
        ),
    ],
)
async def test_a_bad_body_is_an_error_that_names_the_field(client, body, problem):
    response = await client.post("/chat_tokenize", json=body)

    assert response.status_code == 422
    assert response.json()["error_type"] == "validation"
    assert problem in response.json()["error"]


async def test_a_model_without_a_template_says_how_to_give_one(open_client):
    response = await chat(await open_client())

    assert response.status_code == 422
    assert "`messages`" in response.json()["error"]
    assert "--chat-template" in response.json()["error"]


async def test_the_template_s_refusal_is_passed_on(open_chat):
    response = await chat(await open_chat("{{ raise_exception('roles must\\nalternate') }}"))

    assert response.status_code == 422
    assert response.json()["error"].endswith("rejects the conversation: roles must alternate")


async def test_a_template_that_computes_for_ever_ends_and_delays_nobody_else(open_chat, caplog):
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    client = await open_chat(
        "{% if messages[0].content == 'slow' %}" + endless + "{% endif %}{{ messages[0].content }}"
    )
    for _ in range(2):
        slow = asyncio.ensure_future(chat(client, [{"role": "user", "content": "slow"}]))
        answered = 0
        while not slow.done():
            response = await chat(client, [{"role": "user", "content": "x"}])
            assert response.json()["templated_text"] == "x"
            answered += not slow.done()

        assert answered > 1
        assert (await slow).status_code == 422
        assert "it takes more than 1 s of processor time" in (await slow).json()["error"]
    assert caplog.text.count("reached a limit") == 1


async def test_processes_that_cannot_render_are_no_verdict(open_chat, monkeypatch):
    client = await open_chat("{{ messages[0].content }}")
    RENDERERS.end()
    monkeypatch.setattr(renderer, "_COMMAND", ("/no/such/program",))
    response = await chat(client)
    monkeypatch.undo()

    assert response.status_code == 503
    assert "cannot be started" in response.json()["error"]
    assert (await chat(client)).status_code == 200


async def test_the_route_works_while_the_engine_starts(client, engine):
    engine.info = None

    assert (await chat(client)).status_code == 200


def test_a_broken_template_of_a_checkpoint_only_disables_chat(tmp_path, tokenizer, caplog):
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for %}")

    assert load_chat_template(tmp_path, tokenizer, HTTPConfig(model_id="m")) is None
    assert "chat is not available" in caplog.text


def test_a_broken_template_that_was_asked_for_is_an_error(tmp_path, tokenizer):
    save_tokenizer(tmp_path)
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        load_chat_template(tmp_path, tokenizer, HTTPConfig(model_id="m", chat_template="{% for %}"))
