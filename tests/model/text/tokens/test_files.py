"""Facts about tokens, in whichever file a checkpoint states them."""

import json

import pytest
import transformers

from model.errors import ChatTemplateError, TokenizerError
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.text.tokens.files import read_tokenizer_files

END = {
    "content": "<|end|>",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
}


@pytest.fixture
def folder(tmp_path, libraries):
    """A checkpoint with tokenizer.json alone, whose model has eight more tokens than it."""
    library = libraries["byte_level"]
    library.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config", vocab_size=library.get_vocab_size() + 8)
    return tmp_path


def write(folder, name, **content):
    (folder / f"{name}.json").write_text(json.dumps(content))


def size_of(folder):
    return len(Tokenizer.from_folder(folder).library.get_vocab())


@pytest.mark.parametrize(
    "token", ["</s>", {"content": "</s>", "__type": "AddedToken"}], ids=["text", "object"]
)
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_the_tokens_of_roles_are_read_from_either_file(folder, file, token):
    write(folder, file, eos_token=token, bos_token="<s>", pad_token=None)

    tokenizer = Tokenizer.from_folder(folder)

    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 1)
    assert tokenizer.ends == {2: (f"{file}.json",)}


def test_a_role_of_null_in_one_file_is_that_of_the_other(folder):
    write(folder, "tokenizer_config", eos_token=None, added_tokens_decoder={})
    write(folder, "special_tokens_map", eos_token="</s>")

    assert Tokenizer.from_folder(folder).eos_token_id == 2


@pytest.mark.parametrize(("with_decoder", "first"), [(True, "</s>"), (False, "<s>")])
def test_files_that_differ_are_ranked_as_by_transformers_and_both_name_an_end(
    folder, with_decoder, first
):
    decoder = (
        {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}
        if with_decoder
        else {}
    )
    write(
        folder,
        "tokenizer_config",
        eos_token="</s>",
        tokenizer_class="PreTrainedTokenizerFast",
        **decoder,
    )
    write(folder, "special_tokens_map", eos_token="<s>")

    tokenizer = Tokenizer.from_folder(folder)

    assert tokenizer.eos_token == first
    assert tokenizer.ends == {2: ("tokenizer_config.json",), 1: ("special_tokens_map.json",)}
    assert transformers.AutoTokenizer.from_pretrained(folder).eos_token == first


LISTS = {
    "additional": ("tokenizer_config", {"additional_special_tokens": ["The", END]}),
    "extra": ("tokenizer_config", {"extra_special_tokens": ["The", END]}),
    "extra by name": (
        "tokenizer_config",
        {"extra_special_tokens": {"a_token": "The", "b_token": END}},
    ),
    "in the map": ("special_tokens_map", {"additional_special_tokens": ["The", END]}),
    "extra in the map": ("special_tokens_map", {"extra_special_tokens": ["The", "<|end|>"]}),
    "other roles": ("tokenizer_config", {"image_token": "The", "video_token": "<|end|>"}),
}


@pytest.mark.parametrize("where", LISTS)
def test_further_special_tokens_are_special_and_added_if_the_model_has_their_id(folder, where):
    file, content = LISTS[where]
    size = size_of(folder)
    write(folder, file, **content)

    tokenizer = Tokenizer.from_folder(folder)

    the = tokenizer.token_id("The")
    assert the is not None
    assert tokenizer.is_special(the)
    assert tokenizer.token_id("<|end|>") == size
    assert tokenizer.is_special(size)
    assert tokenizer.encode("x<|end|>The")[-2:] == [size, the]
    assert tokenizer.decode([size, the]) == ""


def test_the_lists_of_both_files_are_joined(folder):
    write(folder, "tokenizer_config", additional_special_tokens=["The"], added_tokens_decoder={})
    write(folder, "special_tokens_map", additional_special_tokens=["<|end|>", "The"])

    tokenizer = Tokenizer.from_folder(folder)

    assert all(tokenizer.is_special(tokenizer.token_id(it)) for it in ("The", "<|end|>"))


def test_a_special_token_beyond_the_model_s_vocabulary_is_not_added(folder):
    size = size_of(folder)
    write(folder, "config", vocab_size=size + 1)
    write(
        folder, "tokenizer_config", additional_special_tokens=["<|a|>", "<|b|>"], pad_token="<pad>"
    )

    tokenizer = Tokenizer.from_folder(folder)

    added = [tokenizer.token_id(it) for it in ("<pad>", "<|a|>", "<|b|>")]
    assert added.count(size) == 1
    assert added.count(None) == 2


@pytest.mark.parametrize(
    "config", [None, {"text_config": {"vocab_size": 10**6}}, {"vocab_size": "x"}]
)
def test_the_size_of_the_vocabulary_may_be_anywhere_or_nowhere(folder, config):
    (folder / "config.json").unlink()
    if config is not None:
        write(folder, "config", **config)
    size = size_of(folder)
    write(folder, "tokenizer_config", additional_special_tokens=["<|a|>"])

    expected = size if config and "text_config" in config else None
    assert Tokenizer.from_folder(folder).token_id("<|a|>") == expected


def test_one_character_does_not_become_special(folder):
    write(folder, "tokenizer_config", pad_token="!")

    tokenizer = Tokenizer.from_folder(folder)

    assert tokenizer.decode(tokenizer.encode("Hey!", add_special_tokens=False)) == "Hey!"


def test_tokens_of_added_tokens_json_are_added_with_their_ids(folder):
    size = size_of(folder)
    write(folder, "added_tokens", **{"<|tool|>": size + 1, "<|end|>": size})
    write(folder, "special_tokens_map", eos_token="<|end|>")

    tokenizer = Tokenizer.from_folder(folder)

    assert tokenizer.encode("<|tool|><|end|>")[-2:] == [size + 1, size]
    assert [tokenizer.is_special(i) for i in (size, size + 1)] == [True, False]
    assert tokenizer.ends == {size: ("special_tokens_map.json",)}


def test_the_ids_are_those_of_transformers(folder):
    size = size_of(folder)
    write(folder, "tokenizer_config", tokenizer_class="PreTrainedTokenizerFast", additional_special_tokens=["<|x|>"],
          bos_token="<s>", pad_token="<pad>")  # fmt: skip
    write(folder, "special_tokens_map", eos_token="<|end|>")
    write(folder, "added_tokens", **{"<|end|>": size})
    text = "The fox<|x|><pad><|end|> The"

    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    assert Tokenizer.from_folder(folder).encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"<|end|>": 5}, "should have id 5"),
        ({"<|end|>": "5"}, "has the id '5'"),
        ({"<|end|>": -1}, "has the id -1"),
    ],
)
def test_a_damaged_added_tokens_json_is_an_error_that_names_it(folder, content, problem):
    write(folder, "added_tokens", **content)

    with pytest.raises(TokenizerError, match=f"added_tokens.json: .*{problem}"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["special_tokens_map", "added_tokens"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_file_that_is_no_object_is_an_error_that_names_it(folder, name, content):
    (folder / f"{name}.json").write_bytes(content)

    with pytest.raises(TokenizerError, match=f"{name}.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "content", [{"eos_token": 3}, {"additional_special_tokens": 7}, {"extra_special_tokens": "x"}]
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_the_key(folder, content):
    write(folder, "special_tokens_map", **content)

    with pytest.raises(TokenizerError, match=f"special_tokens_map.json: {next(iter(content))} is"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_a_link_out_of_the_folder_is_refused(folder, tmp_path_factory, name):
    secret = tmp_path_factory.mktemp("secrets") / "secret.json"
    secret.write_text("{}")
    (folder / name).symlink_to(secret)

    with pytest.raises(TokenizerError, match=f"{name} is a link to"):
        Tokenizer.from_folder(folder)


def test_templates_see_the_tokens_of_every_file(folder):
    write(folder, "special_tokens_map", eos_token="</s>", additional_special_tokens=["<|x|>"])
    (folder / "chat_template.jinja").write_text(
        "{{ eos_token }}{{ additional_special_tokens[0] }}{{ messages[0].content }}"
    )

    template = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))

    assert template.render([{"role": "user", "content": "hi"}]).text == "</s><|x|>hi"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config", "{{ messages[0].content }}"),
        ("tokenizer_config", [{"name": "default", "template": "{{ messages[0].content }}"}]),
        ("tokenizer_config", {"default": "{{ messages[0].content }}", "rag": "x"}),
        ("chat_template", "{{ messages[0].content }}"),
    ],
)
def test_a_template_is_read_in_every_form(folder, file, content):
    write(folder, file, chat_template=content)

    template = ChatTemplate.from_folder(folder, Tokenizer.from_folder(folder))

    assert template.render([{"role": "user", "content": "hi"}]).text == "hi"


def test_the_type_of_the_error_is_that_of_the_reader(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text("[]")

    with pytest.raises(ChatTemplateError):
        read_tokenizer_files(tmp_path, ChatTemplateError)
