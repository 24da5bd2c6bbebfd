"""The bound on the text that one token stands for: never too small, and none where it would not be certain."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from model.hub.resolve import BUNDLED, resolve
from model.text import tokenizer as of_checkpoint
from model.text.token_length import longest_token

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(extra=(), merges=(), normalizer=None, added=()):
    vocab = {token: i for i, token in enumerate([*ALPHABET, *extra])}
    library = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        library.normalizer = normalizer
    library.add_tokens(list(added))
    return library


def byte_fallback(normalizer=None, missing=None):
    names = [f"<0x{byte:02X}>" for byte in range(256) if byte != missing]
    vocab = {name: i for i, name in enumerate([*names, "a", "\u2581", "\u2581a", "<unk>"])}
    library = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("\u2581", "a")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    library.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return library


def test_a_token_of_bytes_counts_one_for_each():
    assert longest_token(byte_level()) == 1
    # U+0120 stands for a space, one byte.
    assert longest_token(byte_level(["\u0120\u0120"], [("\u0120", "\u0120")])) == 2


def test_an_added_token_counts_its_own_text():
    assert longest_token(byte_level(added=[AddedToken("<\u00e9nd>")])) == 6


def test_with_byte_fallback_tokens_count_their_text():
    assert longest_token(byte_fallback()) == 6  # "<0x00>"


@pytest.mark.parametrize(
    "library",
    [
        byte_level(added=[AddedToken("<s>", lstrip=True)]),
        byte_level(added=[AddedToken("<s>", rstrip=True)]),
        byte_level(normalizer=normalizers.NFKC()),
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.Lowercase()),
        byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
        byte_level(normalizer=normalizers.Replace("  ", " ")),
        byte_fallback(missing=7),
        Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
        Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
    ],
    ids=range(10),
)  # fmt: skip
def test_there_is_no_bound_where_text_may_vanish(library):
    assert longest_token(library) is None


def test_a_pre_tokenizer_that_drops_text_has_no_bound():
    library = byte_level()
    for split in (
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Split(" ", "removed"),
    ):
        library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel()])
        assert longest_token(library) is None
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel()]
    )
    assert longest_token(library) == 1


def test_canonical_composition_shortens_by_less_than_the_factor():
    """Over all characters: the longest text with the same canonical decomposition, against the composed character."""
    decomposed = [c for c in map(chr, range(0x110000)) if unicodedata.decomposition(c)]
    decomposed += [chr(code) for code in range(0xAC00, 0xD7A4)]  # Hangul is composed by rule
    longest = {}
    for character in decomposed:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(character.encode()))
    worst = 0.0
    for character in decomposed:
        composed = unicodedata.normalize("NFC", character)
        parts = unicodedata.normalize("NFD", character)
        apart = sum(max(longest.get(part, 0), len(part.encode())) for part in parts)
        worst = max(worst, apart / len(composed.encode()))

    assert 3 < worst <= 4
    assert longest_token(byte_level(normalizer=normalizers.NFC())) == 4


@pytest.mark.parametrize(
    "library",
    [
        byte_level(["\u0120\u0120", "ab"], [("\u0120", "\u0120"), ("a", "b")]),
        byte_level(["ab"], [("a", "b")], normalizers.NFC(), [AddedToken("<end>")]),
        byte_fallback(),
    ],
    ids=["byte-level", "composed", "byte-fallback"],
)
@given(
    text=st.text(
        st.sampled_from(
            "ab <end>\u00e9\u1fbe\u0308\u0301\u0345\u1100\u1161\u11a8\u212a\U0001f98a\u2581"
        )
        | st.characters(codec="utf-8"),
        max_size=60,
    )
)
@settings(max_examples=100)
def test_no_text_has_fewer_tokens_than_the_bound_says(library, text):
    longest = longest_token(library)

    assert len(library.encode(text).ids) * longest >= len(text.encode())


def test_the_bundled_tokenizer_has_a_bound():
    library = of_checkpoint.Tokenizer.from_folder(resolve(BUNDLED)).library

    assert 1 < longest_token(library) < 200
