"""Tokenizers in GGUF files compared with those that transformers makes, and with SentencePiece's rule."""

import itertools
import json

import gguf
import pytest
import tokenizers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from model.errors import ModelError, TokenizerError
from model.gguf import tokenizer as gguf_tokenizer
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from tests.model.gguf.written import add_bytes

TRAINING = [
    "The quick brown fox jumps over the lazy dog, doesn't it? It's 12345 times, they'll say.",
    "def f(x):\n    return x ** 2  # größer als 1000000\n\n\n\tclass Stack:\n",
    "Ünïcödé, 你好\uff0c世界\uff01 こんにちは 안녕하세요 Привет мир. HTTPServer2 camelCase",
] * 3
TEXTS = [
    "Hello world",
    "it's  what THEY'LL say'S\r\n\r\n  indented   text\t\n",
    "1234567890 12 3.14159 ٣٤٥ ²³ x1y22z333",
    "naïve Ünïcödé e\u0301 \u00a0 \u3000你好\uff0c世界\uff01ラーメン 안녕 мир🙂👩‍👩‍👧",
    "HTTPServer2 camelCase snake_case <|im_start|>user\nquoted<|im_end|>\n",
    "((a+b)*[c]) != {d};// -- ... \\n 'single' \"double\"",
    "\n\n\n",
    " ",
    "",
]
BYTE_LEVEL = ["llama-bpe", "qwen2", "tekken", "gpt-4o", "qwen35", "smaug-bpe", "llama4", "gpt-2"]
SPACE = "\u2581"


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def trained():
    """The tokens and merges of a small byte-level BPE that was trained with GPT-2's words."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TRAINING, trainer)
    vocabulary = library.get_vocab()
    merges = json.loads(library.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.get), [" ".join(it) for it in merges]


def byte_level(path, trained, pre, **flags):
    tokens, merges = trained
    control = ["<|im_start|>", "<|im_end|>", "<|bos|>"]
    writer = gguf.GGUFWriter(path, "qwen2" if pre == "qwen2" else "llama")
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *control, "<tool_call>", "[PAD1]", "[PAD2]"])
    writer.add_token_types([1] * len(tokens) + [3] * 3 + [4, 5, 5])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) + 2)
    writer.add_eos_token_id(len(tokens) + 1)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    finish(writer)
    return path


def of_transformers(path):
    architecture, found, _ = get_gguf_tokenizer(str(path))
    return convert_gguf_tokenizer(architecture, found)[0]


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_a_byte_level_tokenizer_gives_the_tokens_of_transformers(tmp_path, trained, pre):
    path = byte_level(tmp_path / "x.gguf", trained, pre, add_bos_token=False)

    ours, theirs = Tokenizer.from_folder(path), of_transformers(path)

    # transformers reads no normalizer from these files; Qwen's tokenizers have NFC.
    texts = [text for text in TEXTS if not (pre.startswith("qwen") and "\u0301" in text)]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "steps"),
    [
        ("smollm", [("Digits", {"individual_digits": True}), ("ByteLevel", {"add_prefix_space": False})]),
        ("starcoder", [("Digits", {"individual_digits": True}), ("ByteLevel", {"add_prefix_space": False})]),
        ("phi-2", [("ByteLevel", {"add_prefix_space": False})]),
    ],
)  # fmt: skip
def test_a_tokenizer_with_gpt2s_words_has_the_steps_of_its_tokenizer_json(
    tmp_path, trained, pre, steps
):
    path = byte_level(tmp_path / "x.gguf", trained, pre)
    theirs = tokenizers.Tokenizer.from_str(Tokenizer.from_folder(path).library.to_str())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [getattr(tokenizers.pre_tokenizers, name)(**options) for name, options in steps]
    )

    ours = Tokenizer.from_folder(path)

    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", sorted(gguf_tokenizer.PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_no_text_and_takes_a_bounded_time(tmp_path, trained, pre):
    ours = Tokenizer.from_folder(byte_level(tmp_path / "x.gguf", trained, pre, add_bos_token=False))

    assert ours.is_linear == (pre != "tekken")  # whose pattern may go back: processes tokenize
    for text in TEXTS:
        if not (gguf_tokenizer.PRE_TOKENIZERS[pre].nfc and "\u0301" in text):
            assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_qwens_texts_are_normalized(tmp_path, trained):
    ours = Tokenizer.from_folder(byte_level(tmp_path / "x.gguf", trained, "qwen2"))

    assert ours.encode("e\u0301") == ours.encode("\u00e9")


@pytest.mark.parametrize(
    ("pre", "flags", "begins"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_as_the_file_says_or_as_llama_cpp_does(tmp_path, trained, pre, flags, begins):
    ours = Tokenizer.from_folder(byte_level(tmp_path / "x.gguf", trained, pre, **flags))

    assert (ours.encode("x")[0] == ours.bos_token_id) == begins
    assert ours.encode("x", add_special_tokens=False)[0] != ours.bos_token_id


def test_tokens_are_special_as_their_types_say_and_padding_is_no_token(tmp_path, trained):
    ours = Tokenizer.from_folder(byte_level(tmp_path / "x.gguf", trained, "qwen2"))
    count = len(trained[0])

    assert ours.encode("a<|im_start|><tool_call>")[-2:] == [count, count + 3]
    assert ours.is_special(count)
    assert not ours.is_special(count + 3)
    assert ours.eos_token_id == count + 1
    assert ours.vocab_size == count + 4
    assert ours.decode([count + 4]) == ""


def test_a_file_that_does_not_say_how_texts_are_divided_is_read_with_a_warning(
    tmp_path, trained, caplog
):
    Tokenizer.from_folder(byte_level(tmp_path / "x.gguf", trained, None))

    assert "does not say how its tokenizer divides texts into words" in caplog.text


# SentencePiece


@pytest.fixture(scope="module")
def pieces():
    """Pieces with scores: those of a trained BPE, of which later merges have lower scores; then bytes and others."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.normalizer = tokenizers.normalizers.Replace(" ", SPACE)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False)
    library.train_from_iterator(
        [word for text in TRAINING for word in (f" {text}", text.replace(" ", "  "))], trainer
    )
    vocabulary = library.get_vocab()
    learned = sorted(vocabulary, key=vocabulary.get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    types = [2, 3, 3] + [6] * 256 + [1] * len(learned)
    scores = [0.0] * 259 + [-float(i) for i in range(len(learned))]
    tokens += ["<|user|>", "<start_of_image>"]
    types += [3, 4]
    scores += [-1000.0] * 2
    return tokens, types, scores


def sentence_piece(path, pieces, arch="llama", **flags):
    tokens, types, scores = pieces
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
    finish(writer)
    return path


def joined_by_score(text, pieces, *, has_prefix=True):
    """Return SentencePiece's BPE by its rule: join the two neighbours whose joined piece has the highest score."""
    tokens, types, scores = pieces
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    symbols = list((" " * has_prefix + text).replace(" ", SPACE)) if text else []
    while True:
        best = max(
            (
                (scores[ids[first + second]], -place)
                for place, (first, second) in enumerate(itertools.pairwise(symbols))
                if first + second in ids
            ),
            default=None,
        )
        if best is None:
            break
        place = -best[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    return [
        i
        for symbol in symbols
        for i in ([ids[symbol]] if symbol in ids else [byte + 3 for byte in symbol.encode()])
    ]


PLAIN = [it for it in TEXTS if "<|" not in it]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_are_joined_in_the_order_of_their_scores(tmp_path, pieces, has_prefix):
    path = sentence_piece(tmp_path / "x.gguf", pieces, add_space_prefix=has_prefix)

    ours = Tokenizer.from_folder(path)

    for text in [*PLAIN, *TRAINING[:3], "  two before", "aaaa    bbbb"]:
        expected = joined_by_score(text, pieces, has_prefix=has_prefix)
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.decode(expected) == text
    assert ours.encode("x")[0] == 1


@pytest.mark.parametrize("arch", ["llama", "phi3"])
def test_a_sentence_piece_tokenizer_gives_the_tokens_of_transformers(tmp_path, pieces, arch):
    path = sentence_piece(tmp_path / "x.gguf", pieces, arch)

    ours, theirs = Tokenizer.from_folder(path), of_transformers(path)

    for text in PLAIN:
        if text.strip() == text and text:
            found = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, add_special_tokens=False) == found, text


def test_gemmas_runs_of_spaces_are_tokens_whatever_their_scores_say(tmp_path, pieces):
    tokens, types, scores = pieces
    runs = [[*tokens, "  ", "   "], [*types, 4, 4], [*[0.0] * len(scores), -9.0, -9.0]]

    ours = Tokenizer.from_folder(
        sentence_piece(tmp_path / "x.gguf", runs, "gemma3", add_space_prefix=False)
    )

    assert ours.encode("  ", add_special_tokens=False) == [len(tokens)]
    assert ours.encode("a   b", add_special_tokens=False)[1:-1] == [len(tokens) + 1]
    assert ours.decode(ours.encode("a   b c")) == "a   b c"
    expected = joined_by_score("The quick brown fox", pieces, has_prefix=False)
    assert ours.encode("The quick brown fox", add_special_tokens=False) == expected


def test_the_special_tokens_of_phi3_take_the_space_after_them(tmp_path, pieces):
    user = pieces[0].index("<|user|>")
    llama = Tokenizer.from_folder(sentence_piece(tmp_path / "a.gguf", pieces))
    phi3 = Tokenizer.from_folder(sentence_piece(tmp_path / "b.gguf", pieces, "phi3"))

    assert phi3.encode("<|user|>\n x") == phi3.encode("<|user|>x")
    assert llama.encode("<|user|>\n x") != llama.encode("<|user|>x")
    assert llama.encode("<|user|>")[-1] == phi3.encode("<|user|>")[-1] == user


# What is refused


TWO = {"tokens": ["a", "b"], "pre": "qwen2"}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "has no tokenizer.ggml.model"),
        ({"model": "t5"}, "model = 't5', whose tokenizer is not read; read are gpt2, llama"),
        ({"model": "gpt2"}, "tokenizer.ggml.tokens must be a list of texts"),
        ({"model": "gpt2", **TWO, "pre": "kimi-k2"}, "pre = 'kimi-k2' is not supported; supported are llama-bpe"),
        ({"model": "gpt2", **TWO, "token_type": [1]}, "token_type must have 2 elements"),
        ({"model": "gpt2", **TWO, "merges": ["ab"]}, "must be pairs of tokens"),
        ({"model": "gpt2", **TWO, "merges": ["a b"]}, "has or makes a token that is not"),
        ({"model": "gpt2", **TWO, "merges": [1]}, "must be pairs of tokens"),
        ({"model": "llama", **TWO, "scores": [1.0]}, "scores must have 2 elements"),
        ({"model": "llama", **TWO, "scores": ["x", "y"]}, "scores must be numbers"),
        ({"model": "llama", **TWO, "scores": [1.0, 2.0], "bos_token_id": 7}, "bos_token_id = 7 is none of the 2"),
        ({"model": "llama", **TWO, "scores": [1.0, 2.0], "add_bos_token": 1}, "add_bos_token must be true or false"),
    ],
)  # fmt: skip
def test_what_is_missing_or_not_read_is_named(tmp_path, keys, says):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for key, value in keys.items():
        add = writer.add_array if isinstance(value, list) else writer.add_string
        if isinstance(value, int):
            add = writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    finish(writer)

    with pytest.raises(ModelError) as raised:
        Tokenizer.from_folder(tmp_path / "x.gguf")

    assert says in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_tokens_that_would_make_endless_merges_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_tokenizer, "MAX_MERGE_CHARACTERS", 1000)
    tokens = ["a" * count for count in range(1, 60)]
    path = sentence_piece(tmp_path / "x.gguf", (tokens, [1] * 59, [0.0] * 59))

    with pytest.raises(TokenizerError, match="more than 2000000 ways of together 1000 characters"):
        Tokenizer.from_folder(path)


# Chat templates

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("named", [False, True])
def test_the_chat_templates_of_a_file_are_found(tmp_path, named):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_bytes(writer)
    templates = [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "{{ tools }}" + TEMPLATE},
    ]
    writer.add_chat_template(templates if named else TEMPLATE)
    finish(writer)

    tokenizer = Tokenizer.from_folder(tmp_path / "x.gguf")
    config = gguf_tokenizer.to_tokenizer_config(gguf_tokenizer.Source(tmp_path / "x.gguf"))

    assert ChatTemplate.from_folder(tmp_path / "x.gguf", tokenizer, None) is not None
    assert config["chat_template"] == (templates if named else TEMPLATE)
    assert tokenizer.token_id(config["eos_token"]) == 257
