"""OpenAI requests that do not set a sampling parameter get the checkpoint's; TGI's never do."""

import pytest

from model.sampling.parameters import SamplingDefaults
from model.text.chat_template import ChatTemplate

pytestmark = pytest.mark.anyio

DEFAULTS = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, typical_p=0.95, repetition_penalty=1.25
)
FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
STATED = (0.6, 20, 0.9, 0.05, 0.95, 1.25)
OWN = {
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.8,
    "min_p": 0.125,
    "typical_p": 0.75,
    "repetition_penalty": 1.0,
}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def sampling_of(open_client, engine, tokenizer):
    """Posts a body to a service with the defaults and returns the fields of its sampling parameters."""

    async def post(path, body, defaults=DEFAULTS):
        template = ChatTemplate({"default": TEMPLATE}, tokenizer)
        client = await open_client(chat_template=template, sampling_defaults=defaults)
        reply = await client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        sampling = engine.requests[-1].sampling
        return tuple(getattr(sampling, name) for name in FIELDS)

    return post


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)]
)
async def test_openai_requests_get_the_defaults_of_the_fields_that_they_leave_out(
    sampling_of, path, body
):
    assert await sampling_of(path, body) == STATED
    assert await sampling_of(path, body | dict.fromkeys(FIELDS)) == STATED
    assert await sampling_of(path, body | OWN) == tuple(OWN.values())
    assert await sampling_of(path, body | {"temperature": 0}) == (0.0, *STATED[1:])
    assert await sampling_of(path, body | {"top_k": 0}) == (0.6, 0, *STATED[2:])
    assert await sampling_of(path, body | {"top_k": -1}) == (0.6, 0, *STATED[2:])


async def test_responses_get_the_defaults_and_report_them(open_client, tokenizer):
    template = ChatTemplate({"default": TEMPLATE}, tokenizer)
    client = await open_client(chat_template=template, sampling_defaults=DEFAULTS)
    reply = (await client.post("/v1/responses", json={"input": "x"})).json()
    assert (reply["temperature"], reply["top_p"]) == (0.6, 0.9)


async def test_tgi_requests_get_no_defaults_of_the_checkpoint(sampling_of):
    for parameters in (
        None,
        {},
        {"do_sample": True},
        {"temperature": 0.3},
        {"do_sample": True} | OWN,
    ):
        body = {"inputs": "x", "parameters": parameters}
        assert await sampling_of("/generate", body) == await sampling_of(
            "/generate", body, SamplingDefaults()
        )


async def test_a_checkpoint_without_defaults_leaves_requests_as_they_were(sampling_of):
    none = SamplingDefaults()
    assert await sampling_of("/v1/completions", {"prompt": "x"}, none) == (
        1.0,
        0,
        1.0,
        0.0,
        1.0,
        1.0,
    )
    body = {"inputs": "x", "parameters": {}}
    assert await sampling_of("/generate", body, none) == (0.0, 0, 1.0, 0.0, 1.0, 1.0)
    assert await sampling_of("/generate", {"inputs": "x"}, none) == (1.0, 0, 1.0, 0.0, 1.0, 1.0)


async def test_a_top_k_of_minus_one_in_the_file_keeps_all_tokens(sampling_of):
    defaults = SamplingDefaults(top_k=-1)
    assert (await sampling_of("/v1/completions", {"prompt": "x"}, defaults))[1] == 0


async def test_info_reports_the_defaults(open_client):
    client = await open_client(sampling_defaults=DEFAULTS)
    reported = (await client.get("/info")).json()["sampling_defaults"]
    assert reported == dict(zip(FIELDS, STATED, strict=True))
