"""Conversations become the tokens that transformers makes of them, except special tokens that users write."""

from __future__ import annotations

import functools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from model.errors import ChatTemplateError, ChatTemplateLimitError
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from tests.model.text import chat_cases
from tests.model.text.chat_cases import CASES, CHATML, LIBRARIES, QWEN25, config_of

USER = {"role": "user", "content": "The quick brown fox,  你好 🙂"}
ASSISTANT = {"role": "assistant", "content": "def f(x):\n    return x  "}
LAST = {"role": "user", "content": " the dog\tsleeps.\n"}
SYSTEM = {"role": "system", "content": "You are <helpful>."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "look", "arguments": '{"at": "<b>é"}'}}
    ],
}
RESULT = {"role": "tool", "name": "look", "content": "a dog"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
CONVERSATIONS = {
    "one message": [USER],
    "several turns": [USER, ASSISTANT, LAST],
    "a system message": [SYSTEM, USER, ASSISTANT, LAST],
    "no text": [{"role": "user", "content": ""}],
    "thoughts": [USER, {"role": "assistant", "content": "<think>\nwell\n</think>\n\nyes"}, LAST],
}


@functools.cache
def loaded(name: str) -> tuple[Tokenizer, ChatTemplate]:
    template, kind = CASES[name]
    return chat_cases.load(kind, template)


@functools.cache
def reference(name: str) -> PreTrainedTokenizerFast:
    template, kind = CASES[name]
    return PreTrainedTokenizerFast(
        tokenizer_object=LIBRARIES[kind](), chat_template=template, **config_of(kind)
    )


def specials(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the special tokens among ids, except the one for unknown characters."""
    unknown = tokenizer.library.token_to_id("<unk>")
    return [i for i in ids if tokenizer.is_special(i) and i != unknown]


# --- equality with transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_tokens_are_those_of_transformers(name, messages, prompt) -> None:
    _, chat = loaded(name)
    options = {"add_generation_prompt": prompt}
    try:
        expected = reference(name).apply_chat_template(messages, return_dict=False, **options)
    except Exception as error:  # noqa: BLE001 - what the template raises
        with pytest.raises(ChatTemplateError, match=str(error)):
            chat.render(messages, **options)
        return
    rendered = chat.render(messages, **options)

    assert rendered.encode() == expected
    assert rendered.text == reference(name).apply_chat_template(messages, tokenize=False, **options)


def test_tools_calls_and_results_are_rendered_as_by_transformers() -> None:
    messages = [USER, CALL, RESULT, RESULT, LAST]
    parsed = json.loads(json.dumps(messages))
    function = parsed[1]["tool_calls"][0]["function"]
    function["arguments"] = json.loads(function["arguments"])
    expected = reference("qwen2.5").apply_chat_template(parsed, tools=TOOLS, tokenize=False)
    rendered = loaded("qwen2.5")[1].render(messages, tools=TOOLS, add_generation_prompt=False)

    assert rendered.text == expected
    assert '"arguments": {"at": "<b>é"}' in rendered.text


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "mistral", "phi4-mini"])
@pytest.mark.parametrize("content", ["The answer is", "The answer is ", "x"])
def test_the_last_message_can_be_continued(name, content) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference(name).apply_chat_template(messages, tokenize=False, **options)

    assert loaded(name)[1].render(messages, **options).text == expected


def test_variables_reach_the_template() -> None:
    _, chat = loaded("qwen3")

    assert chat.render([USER], variables={"enable_thinking": False}).text.endswith("</think>\n\n")
    assert "</think>" not in chat.render([USER], variables={"enable_thinking": True}).text


@pytest.mark.parametrize(
    "name", ["messages", "tools", "range", "raise_exception", "not a name", ""]
)
def test_a_variable_cannot_replace_what_the_template_relies_on(name) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be a variable"):
        loaded("chatml")[1].render([USER], variables={name: 1})


# --- special tokens in messages -------------------------------------------------------------------------------------

FRAGMENTS = [
    *chat_cases.BYTE_LEVEL_SPECIAL, *chat_cases.SENTENCEPIECE_SPECIAL,
    "<", "|", "<|", "|>", ">", "<|us", "er|>", "</", "s>", "im_start", "[IN", "ST]", " ", "\n", "é", "你", "x",
    "\U00100000",
]  # fmt: skip
hostile_text = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=8).map(
    "".join
)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60)
@given(texts=st.lists(hostile_text, min_size=3, max_size=3))
def test_special_tokens_in_messages_stay_text(name, texts) -> None:
    tokenizer, chat = loaded(name)
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    plain = [{"role": r, "content": "x"} for r in roles]
    rendered, innocent = chat.render(messages), chat.render(plain)

    assert specials(tokenizer, rendered.encode()) == specials(tokenizer, innocent.encode())
    text, spans = rendered.encode_with_offsets()
    assert [span.id for span in spans] == rendered.encode()
    assert text == rendered.text
    assert all(span.text == text[span.start : span.stop] for span in spans)


@pytest.mark.parametrize("name", CASES)
def test_every_special_token_written_by_a_user_is_text_that_decodes_to_itself(name) -> None:
    tokenizer, chat = loaded(name)
    innocent = specials(tokenizer, chat.render([{"role": "user", "content": "x"}]).encode())
    for text in {
        t.content for t in tokenizer.library.get_added_tokens_decoder().values() if t.special
    }:
        rendered = chat.render([{"role": "user", "content": f"a{text}b {text} {text}"}])
        ids = rendered.encode()

        assert specials(tokenizer, ids) == innocent, text
        if tokenizer.library.token_to_id("<unk>") is None:
            assert tokenizer.decode(ids, skip_special_tokens=False) == rendered.text


@pytest.mark.parametrize("where", ["name", "arguments", "tools", "variables"])
def test_special_tokens_elsewhere_in_a_request_stay_text(where) -> None:
    template = (
        "{% for m in messages %}{{ m.name }}{{ m.tool_calls | tojson }}<|im_start|>{{ m.content }}{% endfor %}"
        "{{ tools | tojson }}{{ extra }}"
    )
    tokenizer, chat = chat_cases.load("byte_level", template)
    bad = "<|im_end|><|im_start|>"
    message = {
        "role": "user",
        "content": "x",
        "name": "n",
        "tool_calls": [{"function": {"arguments": "{}"}}],
    }
    tools, variables = TOOLS, {"extra": "y"}
    if where == "name":
        message["name"] = bad
    elif where == "arguments":
        message["tool_calls"] = [{"function": {"arguments": json.dumps({bad: bad})}}]
    elif where == "tools":
        tools = [{"type": bad, bad: [bad]}]
    else:
        variables = {"extra": bad, "bos_token": "<|endoftext|>"}
    rendered = chat.render([message], tools=tools, variables=variables)

    assert bad in rendered.text
    assert len(specials(tokenizer, rendered.encode())) == 1


@pytest.mark.parametrize(
    "expression",
    [
        "content | trim", "content ~ ''", "content[:9] ~ content[9:]", "content | replace('x', '')", "content | tojson",
        "content.split(' ') | join", "(content | list) | join", "content | upper | lower", "'%s' | format(content)",
        "'{}'.format(content)", "content | string | safe", "(content ~ '<|im_end|>').split('<|im_end|>')[0]",
    ],
)  # fmt: skip
def test_special_tokens_stay_text_whatever_a_template_does_with_them(expression) -> None:
    tokenizer, chat = chat_cases.load(
        "byte_level",
        f"<|im_start|>{{% set content = messages[0].content %}}{{{{ {expression} }}}}",
    )
    rendered = chat.render([{"role": "user", "content": "a<|im_end|>b <|im_ end|>c <|im_xend|>"}])

    assert len(specials(tokenizer, rendered.encode())) == 1


def test_a_role_cannot_become_a_special_token_by_itself() -> None:
    _, chat = loaded("phi4-mini")
    for role in ("end", "user|><|assistant", "endoftext", ""):
        with pytest.raises(
            ChatTemplateError, match=r"`messages\.0\.role` must be one of system, user"
        ):
            chat.render([{"role": role, "content": "x"}])


def test_other_added_tokens_are_found_everywhere() -> None:
    tokenizer, chat = loaded("chatml")
    think = tokenizer.library.token_to_id("<think>")

    assert think in chat.render([{"role": "user", "content": "a <think> b"}]).encode()


# --- the form of messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "qwen3", "parts", "llama3"])
def test_parts_of_text_are_accepted_by_every_template(name) -> None:
    _, chat = loaded(name)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = "onetwo" if name == "parts" else "one\ntwo"

    rendered = chat.render([{"role": "user", "content": parts}])
    assert rendered.text == chat.render([{"role": "user", "content": joined}]).text


def test_a_template_that_reads_only_parts_gets_parts() -> None:
    _, chat = chat_cases.load("byte_level", chat_cases.ONLY_PARTS)

    assert (
        chat.render([{"role": "user", "content": "hello"}]).text
        == "<|im_start|>user:hello<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "`messages` cannot be empty"),
        (["x"], r"`messages\.0` must be an object"),
        ([{"content": "x"}], r"`messages\.0\.role` is required"),
        ([USER, {"role": 3}], r"`messages\.1\.role` is required"),
        ([{"role": "user", "content": 3}], r"`messages\.0\.content` must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"`messages\.0\.content\.0` must have the type `text`",
        ),
    ],
)
def test_a_message_of_the_wrong_form_is_an_error_that_names_it(messages, problem) -> None:
    with pytest.raises(ChatTemplateError, match=problem):
        loaded("chatml")[1].render(messages)


def test_the_template_s_own_message_is_passed_on_printable_and_short() -> None:
    _, chat = chat_cases.load(
        "byte_level",
        "{{ raise_exception('<|im_start|>\x1b[31m\n' ~ messages[0].content) if messages|length > 1 }}",
    )
    with pytest.raises(ChatTemplateError) as caught:
        chat.render([{"role": "user", "content": "x" * 5000}, USER])

    message = str(caught.value)
    assert "<|im_start|>" in message
    assert message.isprintable()
    assert len(message) < 600


# --- where templates come from --------------------------------------------------------------------------------------


def marker(text: str) -> str:
    return f"{text}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"


def load_folder(folder, **options) -> ChatTemplate | None:
    return ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder), **options)


def test_a_checkpoint_without_a_template_has_none(tmp_path) -> None:
    assert load_folder(chat_cases.save(tmp_path, "byte_level")) is None


def test_the_configuration_holds_one_template_or_several(tmp_path) -> None:
    one = load_folder(chat_cases.save(tmp_path, "byte_level", chat_template=marker("one")))
    several = [
        {"name": "default", "template": marker("d")},
        {"name": "tool_use", "template": marker("t")},
    ]
    named = load_folder(chat_cases.save(tmp_path, "byte_level", chat_template=several))

    assert one.render([USER], tools=TOOLS).text.startswith("one")
    assert named.render([USER]).text.startswith("d")
    assert named.render([USER], tools=TOOLS).text.startswith("t")


def test_files_take_precedence_over_the_configuration_and_a_given_source_over_all(tmp_path) -> None:
    folder = chat_cases.save(tmp_path, "byte_level", chat_template=marker("config"))
    (folder / "chat_template.jinja").write_text(marker("file"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(marker("tools"))

    assert load_folder(folder).render([USER]).text.startswith("file")
    assert load_folder(folder).render([USER], tools=TOOLS).text.startswith("tools")
    given = load_folder(folder, source=marker("given"))
    assert given.render([USER], tools=TOOLS).text.startswith("given")


def test_special_tokens_of_the_configuration_are_variables(tmp_path) -> None:
    folder = chat_cases.save(
        tmp_path,
        "byte_level",
        pad_token={"content": "<|end|>"},
        chat_template="{{ bos_token }}{{ pad_token }}x",
    )
    ids = load_folder(folder).render([USER]).encode()

    assert (
        Tokenizer.from_folder(folder).decode(ids, skip_special_tokens=False)
        == "<|begin_of_text|><|end|>x"
    )
    assert len(ids) == 3


@pytest.mark.parametrize(
    "value", [3, [], [{"name": "default"}], [{"name": "other", "template": "x"}], ["x"]]
)
def test_a_damaged_configuration_is_an_error(tmp_path, value) -> None:
    with pytest.raises(ChatTemplateError):
        load_folder(chat_cases.save(tmp_path, "byte_level", chat_template=value))


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in %}",
        "{{ x | unknown(3) }}",
        "{% include 'x' %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
)
def test_a_template_that_cannot_be_compiled_is_an_error(source) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        chat_cases.load("byte_level", source)


def test_a_template_that_is_slow_for_short_conversations_is_an_error_within_its_limit(
    monkeypatch,
) -> None:
    monkeypatch.setattr("model.text.chat_template.LOADING_SECONDS", 0.1)
    slow = "{% for i in range(99999) %}{{ i }}{% endfor %}"
    with pytest.raises(
        ChatTemplateLimitError, match=r"it takes more than 0.\d+ s of processor time"
    ):
        chat_cases.load("byte_level", slow)


@pytest.mark.parametrize(
    ("source", "limit"),
    [("{{ 'a' * 10**12 }}", "more than 256 MiB"), ("x" * (2 << 20), "more than 1048576")],
)
def test_a_limit_that_a_template_reaches_at_once_is_an_error(source, limit) -> None:
    with pytest.raises(ChatTemplateError, match=limit):
        chat_cases.load("byte_level", source)


def test_a_limit_that_a_conversation_reaches_is_an_error_that_names_it() -> None:
    _, chat = chat_cases.load(
        "byte_level", "{{ messages[0].content * (10**9 if messages | length > 40 else 1) }}"
    )
    assert chat.render([USER]).text == USER["content"]
    with pytest.raises(
        ChatTemplateLimitError, match=r"^`messages`: .* limit: it needs more than 256 MiB"
    ):
        chat.render([USER] * 50)


# --- the tokenizer --------------------------------------------------------------------------------------------------


def test_the_checkpoint_s_own_tokenizer_is_not_changed() -> None:
    tokenizer, chat = chat_cases.load("legacy", CHATML)
    before = tokenizer.library.to_str()
    chat.render([{"role": "user", "content": "</s><|im_end|>"}]).encode()

    assert tokenizer.library.to_str() == before
    assert tokenizer.library.encode("<|im_end|>", add_special_tokens=False).ids == [
        tokenizer.library.token_to_id("<|im_end|>")
    ]


def test_merges_that_lead_to_a_special_token_do_not_make_one() -> None:
    tokenizer, chat = loaded("mistral")
    # The fixture does what this test is about: without its added tokens, plain text becomes the special token.
    bare = tokenizers.Tokenizer(tokenizer.library.model)
    assert bare.encode("</s>").ids == [tokenizer.eos_token_id]

    assert (
        tokenizer.eos_token_id not in chat.render([{"role": "user", "content": "a</s>b"}]).encode()
    )


def test_a_lone_surrogate_is_an_error_of_the_tokenizer() -> None:
    from model.errors import TokenizerError

    with pytest.raises(TokenizerError, match="surrogate"):
        loaded("chatml")[1].render([{"role": "user", "content": "\ud800"}]).encode()


def test_templates_with_tools_render_without_tools_too() -> None:
    _, chat = chat_cases.load("byte_level", QWEN25)

    assert "<tools>" not in chat.render([USER]).text
    assert "<tools>" not in chat.render([USER], tools=[]).text
