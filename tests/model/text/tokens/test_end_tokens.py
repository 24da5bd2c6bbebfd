"""The tokens that end a generation are the union of what the files and the chat template name."""

import json

import pytest
from tokenizers import AddedToken, processors

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.text.tokens.end_token import EndToken, stated_ends
from model.text.tokens.end_tokens import find_end_tokens
from model.text.tokens.turn import Turn
from tests.model.text import chat_cases

VOCAB = 1000


def ends_of(*given):
    return find_end_tokens(*given)[0]


def problems_of(*given):
    return find_end_tokens(*given)[1]


HARMONY = """{%- for message in messages %}{%- if message.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if message.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}\
{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
OPEN_LAST = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}\
{% if not loop.last or add_generation_prompt %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ALPACA = """{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"""
STEPS = """{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' + m.content + '<|end|>' }}{% else %}\
{{ '<|assistant|>' }}{% if m.reasoning_content %}{{ m.reasoning_content + '<|endoftext|>' }}{% endif %}\
{{ m.content + '<|endoftext|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
BEGUN = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|endoftext|><|assistant|>' }}{% endif %}"""
REFUSES = """{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('only users') }}{% endif %}\
{{ m.content }}{% endfor %}"""

ENDS = {
    "chatml": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>",
    "smollm2": "<|im_end|>",
    "phi4-mini": "<|end|>",
    "parts": "<|im_end|>",
    "mistral": "</s>",
    "mistral, newer tokenizer": "</s>",
    "gemma": "<end_of_turn>",
    "phi3": "<|end|>",
    "phi3, no strip": "<|end|>",
    "zephyr": "</s>",
    "glm": "<|user|>",
    "chatml, unigram": "<|im_end|>",
}


@pytest.mark.parametrize("name", chat_cases.CASES)
def test_the_token_behind_the_assistant_s_text_ends_a_turn(name):
    template, kind = chat_cases.CASES[name]

    _, chat = chat_cases.load(kind, template)

    assert chat.turn.end == ENDS[name]


def with_tokens(kind, *texts, special=True, template=None, **config):
    """Return a tokenizer with further tokens, and a template for it."""
    library = chat_cases.LIBRARIES[kind]()
    library.add_tokens([AddedToken(it, special=special, normalized=False) for it in texts])
    tokenizer = Tokenizer(library, **chat_cases.config_of(kind) | config)
    return tokenizer, None if template is None else ChatTemplate({"default": template}, tokenizer)


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>")


def test_what_ends_a_thought_as_well_as_earlier_turns_ends_no_generation():
    tokenizer, chat = with_tokens(
        "byte_level", *HARMONY_TOKENS, template=HARMONY, eos_token="<|return|>"
    )

    assert chat.turn == Turn(
        "<|return|>", frozenset(("<|start|>", "<|channel|>", "<|message|>", "<|end|>"))
    )
    found = ends_of((), tokenizer, chat, VOCAB)
    assert [(it.text, it.sources) for it in found] == [
        ("<|return|>", ("eos_token", "chat template"))
    ]


@pytest.mark.parametrize("template", [STEPS, BEGUN, HARMONY], ids=["thought", "prompt", "gpt-oss"])
def test_an_eos_that_the_template_writes_inside_turns_is_no_end_unless_the_configuration_says_so(
    template,
):
    eos = "<|end|>" if template is HARMONY else "<|endoftext|>"
    tokenizer, chat = with_tokens("byte_level", *HARMONY_TOKENS, template=template, eos_token=eos)

    found = ends_of((), tokenizer, chat, VOCAB)

    assert eos not in [it.text for it in found]
    (problem,) = problems_of((), tokenizer, chat, VOCAB)
    assert "inside of the assistant's turns" in problem
    stated = stated_ends({"config.json": [tokenizer.eos_token_id]})
    assert eos in [it.text for it in ends_of(stated, tokenizer, chat, VOCAB)]


def test_a_template_that_leaves_the_last_turn_open_is_read_by_an_earlier_one():
    assert with_tokens("byte_level", template=OPEN_LAST)[1].turn.end == "<|im_end|>"


@pytest.mark.parametrize(
    "template", [ALPACA, REFUSES, "{{ messages[-1].content.upper() }}", "nothing"]
)
def test_a_template_without_tokens_behind_the_text_ends_nothing(template):
    assert with_tokens("byte_level", template=template)[1].turn == Turn()


def test_a_token_that_is_not_special_ends_a_turn_too():
    template = chat_cases.CHATML.replace("im_end", "stop")
    tokenizer, chat = with_tokens(
        "byte_level", "<|stop|>", "\n\n", "!", special=False, template=template
    )

    (_, end) = ends_of((), tokenizer, chat, VOCAB)
    assert (end.text, end.sources) == ("<|stop|>", ("chat template",))


def test_chatml_on_a_llama_tokenizer_without_its_tokens_adds_only_the_tokenizer_s_own():
    template = chat_cases.CHATML.replace("im_end", "finis")
    tokenizer, chat = with_tokens("legacy", template=template)

    assert [it.text for it in ends_of((), tokenizer, chat, VOCAB)] == ["</s>"]


def test_every_source_of_an_end_is_named_in_order():
    tokenizer, chat = chat_cases.load("byte_level", chat_cases.QWEN25)
    end, text_end = (tokenizer.token_id(it) for it in ("<|im_end|>", "<|endoftext|>"))
    stated = stated_ends(
        {"config.json": (text_end, text_end), "generation_config.json": (end, text_end)}
    )

    assert ends_of(stated, tokenizer, chat, VOCAB) == (
        EndToken(text_end, "<|endoftext|>", ("config.json", "generation_config.json", "eos_token")),
        EndToken(end, "<|im_end|>", ("generation_config.json", "chat template")),
    )


def test_a_chat_ends_although_the_configuration_names_another_token(tmp_path):
    """The issue's example: config.json says 0, the tokenizer `<|im_end|>`."""
    folder = chat_cases.save(tmp_path, "byte_level", eos_token={"content": "<|im_end|>"})
    tokenizer = Tokenizer.from_folder(folder)

    found = ends_of(stated_ends({"config.json": (0,)}), tokenizer, None, VOCAB)

    assert [it.id for it in found] == [0, tokenizer.token_id("<|im_end|>")]
    assert found[1].sources == ("tokenizer_config.json",)


def test_a_base_model_has_its_one_end(tmp_path):
    folder = chat_cases.save(tmp_path, "byte_level")
    tokenizer = Tokenizer.from_folder(folder)
    (own,) = tokenizer.ends

    (found,) = ends_of(stated_ends({"config.json": (own,)}), tokenizer, None, VOCAB)

    assert found.sources == ("config.json", "tokenizer_config.json")


def test_an_end_beyond_the_model_s_vocabulary_is_dropped_which_is_said():
    tokenizer, _ = with_tokens("byte_level")

    assert ends_of((), tokenizer, None, tokenizer.eos_token_id) == ()
    assert "cannot occur" in problems_of((), tokenizer, None, tokenizer.eos_token_id)[0]


def test_an_eos_that_is_no_token_is_said():
    tokenizer, _ = with_tokens("byte_level", eos_token="<|nowhere|>")

    assert ends_of((), tokenizer, None, VOCAB) == ()
    assert "'<|nowhere|>'" in problems_of((), tokenizer, None, VOCAB)[0]


def test_an_id_without_a_token_has_no_text():
    tokenizer, _ = with_tokens("byte_level")

    assert ends_of((EndToken(999, "", ("config.json",)),), tokenizer, None, VOCAB)[0].text == ""


def save_tokenizer(folder, special, plain=(), processor=None):
    library = chat_cases.byte_level()
    library.add_special_tokens([AddedToken(it, special=True, normalized=False) for it in special])
    library.add_tokens([AddedToken(it, normalized=False) for it in plain])
    if processor is not None:
        library.post_processor = processor(library)
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


def test_without_a_named_eos_well_known_special_tokens_are_the_ends(tmp_path):
    tokenizer = save_tokenizer(tmp_path, ["</s>", "<|other|>"], plain=["<eos>"])

    names = {tokenizer.token_name(i) for i in tokenizer.ends}
    assert names == {"</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>"}
    assert set(tokenizer.ends.values()) == {("tokenizer.json",)}


def test_with_a_named_eos_well_known_names_mean_nothing(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))

    tokenizer = save_tokenizer(tmp_path, ["</s>"])

    assert [tokenizer.token_name(i) for i in tokenizer.ends] == ["<|endoftext|>"]


def appended(library):
    ids = [(it, library.token_to_id(it)) for it in ("<s>", "<|stop|>")]
    return processors.TemplateProcessing(single="<s> $A <|stop|>", special_tokens=ids)


def in_sequence(library):
    return processors.Sequence([processors.ByteLevel(), appended(library)])


def roberta(library):
    return processors.RobertaProcessing(
        ("<|stop|>", library.token_to_id("<|stop|>")), ("<s>", library.token_to_id("<s>"))
    )


@pytest.mark.parametrize("processor", [appended, in_sequence, roberta])
def test_the_token_that_the_tokenizer_puts_behind_texts_is_an_end(tmp_path, processor):
    tokenizer = save_tokenizer(tmp_path, ["<s>", "<|stop|>"], processor=processor)

    assert tokenizer.ends == {tokenizer.token_id("<|stop|>"): ("tokenizer.json",)}


def test_what_the_tokenizer_puts_before_texts_is_no_end(tmp_path):
    tokenizer = save_tokenizer(tmp_path, [])

    assert tokenizer.token_id("<|begin_of_text|>") not in tokenizer.ends


def test_nothing_is_said_of_a_usual_model():
    tokenizer, chat = chat_cases.load("byte_level", chat_cases.QWEN3)

    assert problems_of((), tokenizer, chat, VOCAB) == []
