"""Frameworks that call a text-generation server work with the bundled model unchanged.

`pip install -e '.[clients]'` installs them; what is absent is skipped.
"""

import asyncio
import json
import logging
import re

import openai
import pytest
from huggingface_hub import InferenceClient

# Frameworks leave connections to the garbage collector and use their dependencies' deprecated names.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.filterwarnings("default")]

PROMPT = "def fibonacci(n):\n"
MESSAGES = [{"role": "user", "content": "Return the sum of two numbers."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def url(bundled_service):
    return f"{bundled_service.url}/v1"


@pytest.fixture
def litellm(monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it is fetched otherwise
    yield pytest.importorskip("litellm")
    logging.getLogger("LiteLLM").handlers.clear()


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm_chats(litellm, url, provider):
    fields = {
        "model": f"{provider}/bundled", "messages": MESSAGES, "api_base": url, "api_key": "none", "max_tokens": 16,
        "temperature": 0,
    }  # fmt: skip
    plain = litellm.completion(**fields)
    chunks = list(litellm.completion(**fields, stream=True))

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == plain.choices[0].message.content
    assert streamed
    assert plain.usage.completion_tokens <= 16


def test_litellm_completes_text(litellm, url):
    fields = {
        "model": "text-completion-openai/bundled", "prompt": PROMPT, "api_base": url, "api_key": "none",
        "max_tokens": 16, "temperature": 0,
    }  # fmt: skip
    plain = litellm.text_completion(**fields)
    chunks = list(litellm.text_completion(**fields, stream=True))

    assert "".join(c.choices[0].text or "" for c in chunks) == plain.choices[0].text
    assert plain.choices[0].text


def test_litellm_calls_the_hugging_face_provider(litellm, url):
    fields = {
        "model": "huggingface/tgi", "messages": MESSAGES, "api_base": url, "api_key": "none", "max_tokens": 8,
    }  # fmt: skip
    reply = litellm.completion(**fields, temperature=0)
    chunks = list(litellm.completion(**fields, temperature=0, stream=True))

    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == reply.choices[0].message.content


def test_langchain_invokes_streams_and_follows_a_schema(url):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=url, api_key="none", model="bundled", max_tokens=64, temperature=0
    )
    text = langchain.OpenAI(
        base_url=url, api_key="none", model="bundled", max_tokens=12, temperature=0
    )

    async def stream():
        return "".join([chunk.content async for chunk in chat.astream("Sort a list.")])

    plain = chat.invoke("Sort a list.").content
    assert "".join(chunk.content for chunk in chat.stream("Sort a list.")) == plain
    assert asyncio.run(stream()) == plain
    assert "".join(text.stream(PROMPT)) == text.invoke(PROMPT)
    structured = chat.with_structured_output(
        {"title": "person", **SCHEMA}, method="json_schema", strict=True
    )
    assert structured.invoke("A person.").keys() == {"name", "age"}


def test_langchain_uses_the_responses_api(url):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=url, api_key="none", model="bundled", max_tokens=16, temperature=0,
        use_responses_api=True,
    )  # fmt: skip

    def text(message):
        content = message.content
        return content if isinstance(content, str) else "".join(b.get("text", "") for b in content)

    plain = text(chat.invoke("Sort a list."))
    assert plain
    assert "".join(text(chunk) for chunk in chat.stream("Sort a list.")) == plain


@pytest.mark.parametrize("api", ["tgi", "openai", "vllm"])
def test_outlines_constrains_the_text(bundled_service, url, api):
    outlines = pytest.importorskip("outlines")
    json_type = outlines.json_schema(SCHEMA)
    if api == "tgi":
        model = outlines.from_tgi(InferenceClient(bundled_service.url))
        # At `POST /`, where this client sends it, a plain reply begins with the prompt by default, as in TGI.
        options = {"max_new_tokens": 80, "return_full_text": False}
    else:
        make = outlines.from_openai if api == "openai" else outlines.from_vllm
        model = make(openai.OpenAI(base_url=url, api_key="none"), "bundled")
        options = {"max_tokens": 80}

    person = json.loads(model("A person as JSON: ", json_type, **options))
    streamed = "".join(model.stream("Any text: ", **options))

    assert person.keys() == {"name", "age"}
    assert streamed
    if api != "openai":  # it has no regular expressions
        year = outlines.regex("[0-9]{4}")
        assert re.fullmatch("[0-9]{4}", model("Year: ", year, **options))
        assert re.fullmatch("[0-9]{4}", "".join(model.stream("Year: ", year, **options)))
