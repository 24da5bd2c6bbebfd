"""Files of a checkpoint that are nested deeply are errors that name the file."""

import json

import pytest

from model.checkpoint.config import ModelConfig
from model.errors import ChatTemplateError, ModelError
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from tests.http.fakes import save_tokenizer

DEPTHS = (600, 960, 985, 100_000)


def nested(depth, shape):
    return "[" * depth + "]" * depth if shape == "list" else '{"a":' * depth + "1" + "}" * depth


def read(folder):
    """Read a checkpoint's files as the start of a service does."""
    tokenizer = Tokenizer.from_folder(folder)
    ChatTemplate.from_folder(folder, tokenizer)
    ModelConfig.from_folder(folder)


@pytest.mark.parametrize("shape", ["list", "object"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("tokenizer.json", "model"),
        ("tokenizer_config.json", "bos_token"),
        ("tokenizer_config.json", "chat_template"),
        ("tokenizer_config.json", "added_tokens_decoder"),
        ("chat_template.json", "chat_template"),
        ("config.json", "rope_scaling"),
        ("config.json", "anything"),
        ("generation_config.json", "eos_token_id"),
    ],
)
def test_a_file_that_is_nested_deeply_is_an_error_of_the_model(tmp_path, file, key, depth, shape):
    save_tokenizer(tmp_path)
    values = {}
    if (tmp_path / file).exists():
        values = json.loads((tmp_path / file).read_text())
        values.pop(key, None)
    head = json.dumps(values).removesuffix("}") + (", " if values else "")
    (tmp_path / file).write_text(f'{head}"{key}": {nested(depth, shape)}}}')

    with pytest.raises(ModelError) as caught:
        read(tmp_path)

    assert len(str(caught.value)) < 6000


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "not " * 5000 + "1 }}",
        "{{ a" + "|trim" * 5000 + " }}",
        "{% for a in b %}" * 60 + "{% endfor %}" * 60,
    ],
    ids=["parentheses", "if", "not", "filters", "for"],
)
def test_a_template_that_is_nested_deeply_is_an_error(tmp_path, source):
    save_tokenizer(tmp_path)

    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate({"default": source}, Tokenizer.from_folder(tmp_path))
