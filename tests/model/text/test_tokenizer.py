from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from tokenizers import processors

from model.errors import ModelError, TokenizerError
from model.text.library_errors import library_error
from model.text.tokenizer import Tokenizer, TokenSpan


def copy_of(library: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(library.to_str())


@pytest.fixture
def folder(tmp_path, libraries):
    """A checkpoint's tokenizer files; the test may overwrite them."""
    libraries["byte_level"].save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def write_config(folder, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_folder_provides_tokens_and_their_roles(folder) -> None:
    tokenizer = Tokenizer.from_folder(folder)

    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert tokenizer.vocab_size == len(tokenizer.library.get_vocab())
    assert [tokenizer.is_special(i) for i in (0, 1, 2, 3, 4)] == [True] * 4 + [False]
    assert not tokenizer.is_special(10**9)


def test_the_configuration_file_is_optional(folder) -> None:
    (folder / "tokenizer_config.json").unlink()

    tokenizer = Tokenizer.from_folder(str(folder))

    assert tokenizer.bos_token is None
    assert tokenizer.eos_token_id is None
    assert tokenizer.decode(tokenizer.encode("The fox")) == "The fox"


def test_a_missing_tokenizer_is_an_error_that_names_the_file(tmp_path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist$") as caught:
        Tokenizer.from_folder(tmp_path)

    assert isinstance(caught.value, ModelError)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_an_older_format_is_an_error_that_says_how_to_convert_it(tmp_path, name) -> None:
    (tmp_path / name).write_text("{}")

    with pytest.raises(TokenizerError, match="save the tokenizer once with transformers"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 3}', b"\xff\xfe\x00", b"null"])
def test_a_damaged_tokenizer_is_an_error_that_names_the_file(folder, content) -> None:
    (folder / "tokenizer.json").write_bytes(content)

    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json (is not a tokenizer|cannot be read)"
    ):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"bos_token": 3}', b"7"])
def test_a_damaged_configuration_is_an_error_that_names_the_file(folder, content) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)

    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_a_file_that_is_too_large_is_rejected_unread(folder) -> None:
    with (folder / "tokenizer.json").open("r+b") as file:
        file.truncate(200 << 20)  # sparse

    with pytest.raises(TokenizerError, match="has 209715200 bytes; at most 134217728 are read"):
        Tokenizer.from_folder(folder)


def test_added_tokens_of_the_configuration_become_tokens(folder) -> None:
    size = Tokenizer.from_folder(folder).vocab_size
    added = {
        str(size): {"content": "<|end|>", "special": True, "lstrip": False, "normalized": False},
        str(size + 1): {"content": "<pad it>", "special": False},
        "4": {"content": "!", "special": True},
        "1": {"content": "<s>", "special": False},
    }
    write_config(folder, added_tokens_decoder=added, eos_token={"content": "<|end|>"})

    tokenizer = Tokenizer.from_folder(folder)

    assert tokenizer.encode("a<|end|><pad it>!")[1:] == [size, size + 1, 4]
    assert tokenizer.eos_token_id == size
    assert [tokenizer.is_special(i) for i in (size, size + 1, 4, 1)] == [True, False, True, True]
    assert tokenizer.decode([size, size + 1, 4]) == "<pad it>"


def test_an_added_token_whose_id_is_taken_is_an_error(folder) -> None:
    write_config(folder, added_tokens_decoder={"9999": {"content": "<|end|>", "special": True}})

    with pytest.raises(TokenizerError, match=r"'<\|end\|>' should have id 9999, but .* gives it"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "added",
    [[1], "x", {"a": {"content": "b"}}, {"400": {}}, {"400": 3}, {"400": {"content": 3}}],
    ids=str,
)
def test_damaged_added_tokens_are_an_error(folder, added) -> None:
    write_config(folder, added_tokens_decoder=added)

    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        Tokenizer.from_folder(folder)


# --- encoding ---------------------------------------------------------------------------------------------------


def test_the_bos_token_is_added_if_the_tokenizer_adds_it(libraries) -> None:
    tokenizer = Tokenizer(libraries["byte_fallback"], "<s>", "</s>")

    assert tokenizer.encode("the fox")[0] == tokenizer.bos_token_id
    assert tokenizer.encode("the fox", add_special_tokens=False) == tokenizer.encode("the fox")[1:]
    assert tokenizer.encode("") == [tokenizer.bos_token_id]


def test_a_prompt_is_never_shortened_or_padded(libraries) -> None:
    library = copy_of(libraries["byte_level"])
    library.enable_truncation(4)
    library.enable_padding(length=300)

    tokenizer = Tokenizer(library)

    assert len(tokenizer.encode("x") or []) == 1
    assert tokenizer.decode(tokenizer.encode("dog " * 100)) == "dog " * 100


def test_special_tokens_in_a_text_become_these_tokens(folder) -> None:
    assert Tokenizer.from_folder(folder).encode("</s><|im_start|>") == [2, 3]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\U0001f642\ud83d"])
def test_a_lone_surrogate_is_an_error(folder, text) -> None:
    tokenizer = Tokenizer.from_folder(folder)

    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.encode(text)
    with pytest.raises(TokenizerError, match="lone surrogate"):
        tokenizer.encode_with_offsets(text)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a", "b"], ("a", "b"), {"a": 1}], ids=str)
def test_input_other_than_a_string_is_an_error(folder, text) -> None:
    with pytest.raises(TokenizerError, match="expected a text, got"):
        Tokenizer.from_folder(folder).encode(text)


@pytest.mark.parametrize("text", ["\x00", "\ufeffa", "\u0301" * 50, "\U0010ffff", "\r\n\t "])
def test_unusual_but_valid_text_round_trips(folder, text) -> None:
    tokenizer = Tokenizer.from_folder(folder)

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_offsets_count_characters_and_tokens_of_one_character_share_it(folder) -> None:
    tokenizer = Tokenizer.from_folder(folder)

    spans = tokenizer.encode_with_offsets("é\U0001f98ax")

    assert [s.id for s in spans] == tokenizer.encode("é\U0001f98ax")
    assert {(s.text, s.start, s.stop) for s in spans} == {
        ("é", 0, 1),
        ("\U0001f98a", 1, 2),
        ("x", 2, 3),
    }
    assert len(spans) > 3


def test_spans_cover_the_text(folder) -> None:
    text = "The dog sleeps, naïve 你好."

    spans = Tokenizer.from_folder(folder).encode_with_offsets(text)

    assert all(text[s.start : s.stop] == s.text for s in spans)
    assert {i for s in spans for i in range(s.start, s.stop)} == set(range(len(text)))


def test_added_tokens_have_empty_spans(libraries) -> None:
    tokenizer = Tokenizer(libraries["byte_fallback"], "<s>")

    assert tokenizer.encode_with_offsets("the")[0] == TokenSpan(1, "", 0, 0)


def test_a_pair_template_does_not_matter(libraries) -> None:
    library = copy_of(libraries["byte_level"])
    library.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )

    assert Tokenizer(library).encode("The")[-1] == 2


# --- texts of tokens --------------------------------------------------------------------------------------------


def test_a_tokens_text_keeps_its_space_and_includes_special_tokens(libraries) -> None:
    for kind, name, text in (
        ("byte_level", "ĠThe", " The"),
        ("byte_level", "</s>", "</s>"),
        ("byte_level", "日本", "日本"),
        ("byte_fallback_strip", "<user>", "<user>"),
        ("byte_fallback_strip", "▁", " "),
        ("byte_fallback_strip", "<0x41>", "A"),
        ("byte_fallback_strip", "<0xE4>", "\ufffd"),
        ("metaspace_always", "▁the", " the"),
        ("word_piece", "dog", "dog"),
        ("word_piece", "</s>", "</s>"),
    ):
        tokenizer = Tokenizer(libraries[kind])
        token_id = tokenizer.library.token_to_id(name)
        assert token_id is not None
        assert tokenizer.token_text(token_id) == text, kind


def test_an_id_without_a_token_has_no_text_and_an_invalid_id_is_an_error(libraries) -> None:
    for library in libraries.values():
        tokenizer = Tokenizer(library)

        assert tokenizer.token_text(10**6) == ""
        with pytest.raises(TokenizerError, match="-1 is not a token id"):
            tokenizer.token_text(-1)


# --- threads ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_thread_safe(folder) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    texts = [f"The quick {i} brown 🙂 fox" * (i % 7 + 1) for i in range(200)]
    expected = [tokenizer.library.encode(t).ids for t in texts]

    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(tokenizer.encode, texts))
        back = list(pool.map(tokenizer.decode, ids))

    assert ids == expected
    assert back == texts


def test_encoding_a_long_text_does_not_hold_the_interpreter_lock(folder) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    text = "the lazy dog sleeps over there " * 20_000
    done = threading.Event()

    def work() -> None:
        tokenizer.encode(text)
        done.set()

    ticks, started = 0, time.perf_counter()
    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.002):
        ticks += 1
    seconds = time.perf_counter() - started
    thread.join()

    # With the lock held there would be one or two ticks; building the list of ids at the end does hold it.
    assert ticks >= min(seconds / 0.002 * 0.1, 20)


def test_the_tokenizer_does_not_import_torch() -> None:
    import subprocess

    code = "import model.text.tokenizer, sys; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- found by fuzzing ---------------------------------------------------------------------------------------------


def edit(folder, change) -> None:
    """Apply `change` to the content of tokenizer.json."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_merge_without_the_prefix_of_continuing_tokens_is_an_error(folder) -> None:
    """The library ends the process with such a file."""
    edit(folder, lambda it: it["model"].update(continuing_subword_prefix="\x00"))

    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the merge .* does not continue"):
        Tokenizer.from_folder(folder)


def test_a_template_with_an_unknown_token_is_an_error_of_the_file_not_of_the_first_text(
    folder,
) -> None:
    def change(content) -> None:
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
            "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
            "special_tokens": {},
        }

    edit(folder, change)

    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.from_folder(folder)


def test_a_vocabulary_without_its_unknown_token_is_an_error_of_the_file(folder) -> None:
    model = {"type": "WordPiece", "unk_token": "?", "continuing_subword_prefix": "##"}
    model |= {"max_input_chars_per_word": 100, "vocab": {"a": 0}}
    edit(folder, lambda it: it.update(model=model, added_tokens=[], decoder=None))
    write_config(folder)

    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_a_special_token_with_a_lone_surrogate_is_an_error(folder, name) -> None:
    write_config(folder, **{name: "\ud800"})

    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("depth", [101, 500, 950, 100_000])
def test_a_nested_configuration_is_an_error(folder, depth) -> None:
    nested = '{"bos_token": ' * depth + "1" + "}" * depth
    (folder / "tokenizer_config.json").write_text(nested)

    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_says_nothing_about_the_input_is_raised_again(error) -> None:
    with pytest.raises(error):
        library_error(error(), "loading")
