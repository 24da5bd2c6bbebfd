"""The requests of the attack list, on the three APIs, in process and with a scripted engine."""

import json

import pytest

from model.text.chat_template import ChatTemplate
from tests.attacks.parameter_cases import CASES

pytestmark = pytest.mark.anyio

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# Each of its grammars takes a process up to two seconds; tests/attacks/test_attacks.py has it.
CHEAP = [name for name in CASES if name != "B16"]


@pytest.mark.parametrize("name", CHEAP)
async def test_every_value_gets_its_status_and_the_next_request_is_served(
    open_client, tokenizer, engine, name
):
    client = await open_client(chat_template=ChatTemplate({"default": TEMPLATE}, tokenizer))
    wrong = []
    for case in CASES[name]():
        content = case.body if isinstance(case.body, bytes) else json.dumps(case.body)
        reply = await client.post(
            case.path, content=content, headers={"content-type": "application/json"}
        )
        if reply.status_code != case.status:
            wrong.append((case.path, content[:100], reply.status_code, case.status))
        assert "Traceback" not in reply.text

    assert wrong == []
    assert (await client.post("/generate", json={"inputs": "x"})).status_code == 200
    assert engine.running == set()
