"""Conversations with tools are written as plain messages as the models' own templates would write them."""

import typing

import pytest

from model.text.template_form import TemplateForm
from model.text.tools.conversation import fit_conversation
from model.text.tools.formats import BY_NAME, FORMATS
from server.cli.settings import Settings
from tests.model.text.tools.tool_cases import CALLS, TEXTS

NO_TOOLS = TemplateForm()


def as_plain_messages(messages, tools, format_):
    fitted, definitions = fit_conversation(messages, tools, (NO_TOOLS, NO_TOOLS), format_)
    assert definitions is None
    return fitted


@pytest.mark.parametrize("format_", FORMATS, ids=lambda row: row.name)
def test_calls_are_written_as_the_model_writes_them(format_):
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in CALLS]

    (message,) = as_plain_messages(
        [{"role": "assistant", "content": "Hm.", "tool_calls": calls}], [], format_
    )

    expected = TEXTS[format_.name].removeprefix("<|python_tag|>")
    assert message == {"role": "assistant", "content": "Hm." + expected}


def test_definitions_follow_the_system_message_or_are_one():
    user = {"role": "user", "content": "hi"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    hermes = BY_NAME["hermes"]

    first, second = as_plain_messages([user], tools, hermes)
    extended, _ = as_plain_messages([{"role": "system", "content": "x"}, user], tools, hermes)

    assert second == user
    assert first["role"] == "system"
    assert '"name": "f"' in first["content"]
    assert (
        '<tool_call>\n{"name": "NAME", "arguments": {"KEY": "VALUE"}}\n</tool_call>'
        in first["content"]
    )
    assert extended["content"] == "x\n\n" + first["content"]
    assert as_plain_messages([user], [], hermes) == [user]


def test_the_setting_lists_every_format():
    names = typing.get_args(Settings.model_fields["tool_call_format"].annotation)

    assert names == ("auto", *(row.name for row in FORMATS))
