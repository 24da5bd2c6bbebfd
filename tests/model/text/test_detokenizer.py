from __future__ import annotations

import json
import re
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from model.errors import TokenizerError
from model.text.detokenizer import IncrementalDetokenizer
from model.text.pieces import DecoderRules, _byte_alphabet, recognize
from model.text.streams import _WindowStream
from model.text.tokenizer import Tokenizer
from tests.model import conftest as libraries_of

KINDS = (
    "byte_level",
    "byte_fallback",
    "byte_fallback_strip",
    "metaspace_always",
    "metaspace_never",
    "word_piece",
    "no_decoder",
)
TEXTS = (
    "The quick 你好世界 fox 🙂🙃 café",
    "  two spaces",
    "def f(x):\n\treturn",
    "é",
    "",
    " ",
    "🙂",
)


@pytest.fixture(scope="module")
def tokenizers_by_kind(libraries) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(libraries[kind], "<s>", "</s>") for kind in KINDS}


@pytest.fixture(params=KINDS)
def tokenizer(request, tokenizers_by_kind) -> Tokenizer:
    return tokenizers_by_kind[request.param]


def push_all(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True, prompt=()) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip, prompt)
    return [*[detokenizer.push(i) for i in ids], detokenizer.flush()]


def sequences(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size + 3), max_size=30)


def text_with_a_replacement_for_each_invalid_byte(data: bytes) -> str:
    """Decode UTF-8; every byte that belongs to no whole character becomes U+FFFD."""
    text, at = "", 0
    while at < len(data):
        for length in (1, 2, 3, 4):
            try:
                text += data[at : at + length].decode()
            except UnicodeDecodeError:
                continue
            at += length
            break
        else:
            text += "\ufffd"
            at += 1
    return text


def expected_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """Return the text of tokens: the library's, and for byte tokens the definition, since the library drops characters.

    It replaces all bytes of a run of which one is invalid.
    """
    decoder = tokenizer.library.decoder
    if not isinstance(decoder, decoders.Sequence):
        return tokenizer.library.decode(ids, skip)
    special = {i for i, t in tokenizer.library.get_added_tokens_decoder().items() if t.special}
    text, run = "", b""
    for token_id in ids:
        name = tokenizer.library.id_to_token(token_id)
        if name is None or (skip and token_id in special):
            continue
        if re.fullmatch("<0x[0-9A-F]{2}>", name):
            run += bytes.fromhex(name[3:5])
            continue
        text += text_with_a_replacement_for_each_invalid_byte(run) + name.replace("▁", " ")
        run = b""
    text += text_with_a_replacement_for_each_invalid_byte(run)
    return text.removeprefix(" ") if b"Strip" in decoder.__getstate__() else text


@settings(max_examples=400)
@given(st.data(), st.sampled_from(KINDS), st.booleans())
def test_a_stream_and_a_whole_text_are_the_text_of_the_tokens(
    tokenizers_by_kind, data, kind, skip
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(sequences(tokenizer.vocab_size))

    expected = expected_text(tokenizer, ids, skip)

    assert "".join(push_all(tokenizer, ids, skip=skip)) == expected
    assert tokenizer.decode(ids, skip) == expected


# Every kind of a broken run: characters cut short at each length, lone and surplus continuation bytes, overlong forms,
# surrogates, code points beyond the last, bytes that are in no character; with whole characters between and behind.
BROKEN_RUNS = (
    "c3", "c3 41", "e4 bd", "e4 bd 41", "e4 bd e4 bd", "e4 41 bd", "f0", "f0 9f", "f0 9f a6", "f0 9f a6 41",
    "f0 9f a6 f0 9f a6 8a", "f0 9f a6 8a 8a", "80", "bf bf", "41 80 41", "c3 a9 a9", "c0 80", "c1 bf", "e0 80 80",
    "f0 80 80 80", "ed a0 80", "ed a0 80 ed b0 80", "f4 90 80 80", "f5 80 80 80", "fe", "ff", "ff fe fd",
    "e4 bd a0 ff 41", "ff e4 bd a0", "e4 bd a0 e5 a5 bd e4", "e4 e4 bd a0", "f0 c3 a9", "f0 9f c3 a9", "00 e4 00",
)  # fmt: skip


def ids_of_bytes(tokenizer: Tokenizer, kind: str, data: bytes) -> list[int]:
    """Return a token for each byte."""
    names = {byte: name for name, byte in _byte_alphabet().items()}
    byte_level = kind == "byte_level"
    return [tokenizer.library.token_to_id(names[b] if byte_level else f"<0x{b:02X}>") for b in data]


@pytest.mark.parametrize("run", BROKEN_RUNS)
@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_strip", "byte_level"])
def test_broken_utf_8_costs_no_whole_character(tokenizers_by_kind, kind, run) -> None:
    tokenizer, data = tokenizers_by_kind[kind], bytes.fromhex(run)
    ids = ids_of_bytes(tokenizer, kind, data)
    # At the byte level one replacement for each maximal part of a character, as Unicode recommends.
    expected = (
        tokenizer.library.decode(ids)
        if kind == "byte_level"
        else text_with_a_replacement_for_each_invalid_byte(data)
    )
    word = tokenizer.library.token_to_id("a")

    assert "".join(push_all(tokenizer, ids)) == expected
    assert tokenizer.decode(ids) == expected
    # A token that is text ends the run.
    assert "".join(push_all(tokenizer, [word, *ids, word, *ids])) == f"a{expected}" * 2


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_level"])
def test_a_broken_run_is_not_held_back_once_it_cannot_become_a_character(
    tokenizers_by_kind, kind
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    broken = "\ufffd\ufffd" if kind == "byte_level" else "\ufffd\ufffd\ufffd"

    streamed = push_all(tokenizer, ids_of_bytes(tokenizer, kind, b"\xf0\x9f\xff\xe4A"))

    assert streamed == ["", "", broken, "", "\ufffdA", ""]


@settings(max_examples=300)
@given(st.data(), st.sampled_from(["byte_fallback", "byte_fallback_strip"]), st.booleans())
def test_byte_fallback_text_matches_the_library_unless_adjacent_bytes_are_partly_invalid(
    tokenizers_by_kind, data, kind, skip
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    to_id = tokenizer.library.token_to_id
    whole = st.text(max_size=3).map(lambda text: [f"<0x{b:02X}>" for b in text.encode()])
    # Bytes without a complete character: all of them are invalid.
    broken = st.lists(st.sampled_from(["<0xE4>", "<0xFF>", "<0xF0>"]), max_size=3)
    skipped = st.lists(st.just("</s>"), max_size=1)
    word = st.sampled_from(["▁", "▁▁x", "<user>"])
    parts = st.lists(st.tuples(whole | broken, skipped, word))
    names = [name for run, end, word in data.draw(parts) for name in (*run, *end, word)]
    ids = [to_id(name) for name in names]

    expected = tokenizer.library.decode(ids, skip)

    assert tokenizer.decode(ids, skip) == expected
    assert "".join(push_all(tokenizer, ids, skip=skip)) == expected


def test_valid_characters_next_to_invalid_bytes_are_kept(tokenizers_by_kind) -> None:
    tokenizer = tokenizers_by_kind["byte_fallback"]
    ids = [tokenizer.library.token_to_id(f"<0x{b:02X}>") for b in "你".encode() + b"\xff" + b"A"]

    assert push_all(tokenizer, ids) == ["", "", "你", "\ufffd", "A", ""]
    assert tokenizer.decode(ids) == "你\ufffdA"


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
def test_text_round_trips(tokenizers_by_kind, kind, text) -> None:
    tokenizer = tokenizers_by_kind[kind]

    pieces = push_all(tokenizer, tokenizer.encode(text))

    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_pieces_do_not_end_within_a_character(tokenizers_by_kind, kind) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("🦊界🦊", add_special_tokens=False)
    assert len(ids) > 3

    pieces = push_all(tokenizer, ids)

    assert [p for p in pieces if p] == ["🦊", "界", "🦊"]
    assert pieces[-1] == ""


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_incomplete_character_at_the_end_is_replaced(tokenizers_by_kind, kind) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("a🦊", add_special_tokens=False)[:-1]

    *pieces, rest = push_all(tokenizer, ids)

    assert "".join(pieces) == "a"
    assert set(rest) == {"\ufffd"}
    assert "a" + rest == tokenizer.library.decode(ids)


def test_a_skipped_special_token_within_a_character_does_not_break_it(tokenizers_by_kind) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    first, *rest = tokenizer.encode("🦊")

    assert push_all(tokenizer, [first, tokenizer.eos_token_id, *rest])[-2:] == ["🦊", ""]


def test_special_tokens_have_text_if_they_are_not_skipped(tokenizer) -> None:
    ids = [tokenizer.bos_token_id, *tokenizer.encode("the", False), tokenizer.eos_token_id]

    shown = "".join(push_all(tokenizer, ids, skip=False))

    assert shown.startswith("<s>")
    assert shown.endswith("</s>")
    assert "<" not in "".join(push_all(tokenizer, ids))


def test_ids_beyond_the_vocabulary_add_nothing(tokenizer) -> None:
    ids = tokenizer.encode("the dog", False)
    padded = [tokenizer.vocab_size + 7, ids[0], 2**31, *ids[1:]]

    assert "".join(push_all(tokenizer, padded)) == tokenizer.library.decode(ids)


@pytest.mark.parametrize("bad", [-1, 2**70, "7", None, 1.5])
def test_an_invalid_id_is_rejected(tokenizer, bad) -> None:
    with pytest.raises(TokenizerError, match="not a token id"):
        IncrementalDetokenizer(tokenizer).push(bad)
    with pytest.raises(TokenizerError, match="not a token id"):
        tokenizer.decode([bad])


# --- decoders ---------------------------------------------------------------------------------------------------

REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def steps(*decoders):
    return {"type": "Sequence", "decoders": list(decoders)}


@pytest.mark.parametrize(
    ("decoder", "rules"),
    [
        ({"type": "ByteLevel", "use_regex": True}, DecoderRules(byte_level=True)),
        (steps({"type": "ByteLevel"}), DecoderRules(byte_level=True)),
        (METASPACE, DecoderRules(drop_first_marks=True)),
        (METASPACE | {"prepend_scheme": "first"}, DecoderRules(drop_first_marks=True)),
        (METASPACE | {"prepend_scheme": "never"}, DecoderRules()),
        (steps(REPLACE, FALLBACK, FUSE), DecoderRules(byte_fallback=True)),
        (steps(REPLACE, FALLBACK, FUSE, STRIP), DecoderRules(byte_fallback=True, strip_spaces=1)),
        (
            steps(REPLACE, FALLBACK, FUSE, STRIP | {"start": 3}),
            DecoderRules(byte_fallback=True, strip_spaces=3),
        ),
        (None, None),
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, None),
        ({"type": "CTC"}, None),
        (METASPACE | {"replacement": "_"}, None),
        (steps({"type": "ByteLevel"}, FUSE), None),
        (steps(), None),
        (steps(FALLBACK, FUSE), None),
        (steps(REPLACE, FUSE, FALLBACK), None),
        (steps(REPLACE | {"content": "_"}, FALLBACK, FUSE), None),
        (steps(REPLACE | {"pattern": {"String": "_"}}, FALLBACK, FUSE), None),
        (steps(REPLACE | {"pattern": {"Regex": "▁"}}, FALLBACK, FUSE), None),
        (steps(REPLACE, FALLBACK, FUSE, STRIP | {"content": "_"}), None),
        (steps(REPLACE, FALLBACK, FUSE, STRIP | {"stop": 1}), None),
        (steps(REPLACE, FALLBACK, FUSE, STRIP, FUSE), None),
    ],
)
def test_a_decoder_that_works_token_by_token_is_recognized_and_no_other(decoder, rules) -> None:
    assert recognize(decoder) == rules


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_decodes_only_for_decoders_without_known_rules(
    tokenizers_by_kind, kind
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    decoder = tokenizer.library.decoder
    stated = None if decoder is None else json.loads(decoder.__getstate__())

    assert tokenizer.pieces(True).rules == recognize(stated)
    assert (recognize(stated) is None) is (kind in ("word_piece", "no_decoder"))


def test_a_piece_is_looked_up_in_the_vocabulary_once_for_all_streams(tokenizers_by_kind) -> None:
    tokenizer = Tokenizer(tokenizers_by_kind["byte_level"].library)
    pieces, loads = tokenizer.pieces(True), []
    pieces.token = lambda token_id: (
        loads.append(token_id) or pieces.__class__.token(pieces, token_id)
    )
    ids = tokenizer.encode("the dogs")

    for _ in range(3):
        push_all(tokenizer, ids)

    assert sorted(loads) == sorted(set(ids))


@pytest.mark.parametrize(
    ("name", "text"),
    [("<0x41>", "A"), ("<0x0A>", "\n"), ("<0xGG>", None), ("<0x4>", None), ("<0x041>", None),
     ("<1x41>", None), ("<0x41)", None), ("(0x41>", None)],
)  # fmt: skip
def test_only_a_token_that_names_a_byte_is_one(name, text) -> None:
    library = libraries_of.byte_fallback(strip=False)
    library.add_tokens([tokenizers.AddedToken(name, normalized=False)])
    tokenizer = Tokenizer(library)

    assert tokenizer.decode([library.token_to_id(name)]) == (name if text is None else text)


@pytest.mark.parametrize(
    ("kind", "words", "expected"),
    [
        ("word_piece", ["the", "dog", "##s", "!"], ["the", " dog", "s", "!", ""]),
        ("no_decoder", ["the", "dog", "!"], ["the", " dog", " !", ""]),
        # Its apostrophe is joined to the word before it once the letters after it are known.
        ("word_piece", ["dog", "'", "n't", ","], None),
    ],
)
def test_a_decoder_without_known_rules_streams_each_token_when_its_text_is_known(
    tokenizers_by_kind, kind, words, expected
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = [tokenizer.library.token_to_id(word) for word in words]

    streamed = push_all(tokenizer, ids)

    assert "".join(streamed) == tokenizer.library.decode(ids)
    assert expected in (None, streamed)


def test_without_known_rules_text_that_stays_incomplete_is_returned_after_sixteen_tokens(libraries):
    """A decoder of bytes whose rules are made unknown: each token is the first byte of a character."""
    library = tokenizers.Tokenizer.from_str(libraries["byte_level"].to_str())
    tokenizer = Tokenizer(library)
    ids = ids_of_bytes(tokenizer, "byte_level", b"\xe4" * 20 + b"A")
    stream = _WindowStream(tokenizer.pieces(True), library)

    streamed = [stream.push(token_id) for token_id in ids]

    assert streamed == [""] * 15 + ["\ufffd" * 16] + [""] * 4 + ["\ufffd" * 4 + "A"]
    assert stream.push(ids[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
    assert not stream.at_rest


# --- after a prompt ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 2, 4, 9])
def test_prompt_and_continuation_concatenate_to_the_whole_text(
    tokenizers_by_kind, kind, cut
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the dogs the dog the dogs ! the", False) * 2
    prompt = [tokenizer.bos_token_id, *ids[:cut]]

    added = "".join(push_all(tokenizer, ids[cut:], prompt=prompt))

    library = tokenizer.library
    assert library.decode(prompt) + added == library.decode([*prompt, *ids[cut:]])


def test_the_first_space_is_dropped_without_a_prompt_and_kept_after_one(tokenizers_by_kind) -> None:
    tokenizer = tokenizers_by_kind["byte_fallback_strip"]
    ids = tokenizer.encode("the", add_special_tokens=False)
    far = [*tokenizer.encode("fox"), *[tokenizer.eos_token_id] * 50]

    assert "".join(push_all(tokenizer, ids)) == "the"
    assert "".join(push_all(tokenizer, ids, prompt=[tokenizer.bos_token_id])) == "the"
    assert "".join(push_all(tokenizer, ids, prompt=tokenizer.encode("fox"))) == " the"
    assert "".join(push_all(tokenizer, ids, prompt=far)) == " the"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["<0x0A>", "▁"], "\n "),
        (["<0x09>", "a"], "\ta"),
        (["<0x20>", "<0x20>", "a"], " a"),
        (["▁", "▁", "<0x0A>"], " \n"),
        (["</s>", "▁", "a"], "a"),
        (["▁"], ""),
        ([], ""),
    ],
)
def test_of_the_beginning_of_a_text_only_one_space_is_dropped(
    tokenizers_by_kind, names, text
) -> None:
    tokenizer = tokenizers_by_kind["byte_fallback_strip"]
    ids = [tokenizer.library.token_to_id(name) for name in names]

    assert tokenizer.library.decode(ids) == text
    assert "".join(push_all(tokenizer, ids)) == text
    assert tokenizer.decode(ids) == text


def test_a_character_that_begins_in_the_prompt_is_completed(tokenizers_by_kind) -> None:
    tokenizer = tokenizers_by_kind["byte_level"]
    ids = tokenizer.encode("🦊")

    assert "".join(push_all(tokenizer, ids[2:], prompt=ids[:2])) == "🦊"


# --- speed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_per_token_does_not_grow_with_the_stream(tokenizers_by_kind, kind) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = tokenizer.encode("the dogs the dog 你 ! ", False) * 600

    def seconds_per_token(count: int) -> float:
        best = 1.0
        for _ in range(5):
            detokenizer = IncrementalDetokenizer(tokenizer)
            started = time.thread_time()
            for token_id in ids[:count]:
                detokenizer.push(token_id)
            best = min(best, (time.thread_time() - started) / count)
        return best

    # Decoding the whole text for each token would take thirty times as long here.
    assert seconds_per_token(len(ids)) < 10 * seconds_per_token(len(ids) // 30)


def test_streams_in_several_threads_share_one_tokenizer(libraries) -> None:
    tokenizer = Tokenizer(libraries["byte_level"])
    ids = list(range(tokenizer.vocab_size))
    expected, results = libraries["byte_level"].decode(ids), []

    def work() -> None:
        results.append("".join(push_all(tokenizer, ids)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [expected] * 8


# Well-formed sequences: ranges of their bytes. Source: the Unicode Standard, table 3-7.
TRAIL = (0x80, 0xBF)
WELL_FORMED = (
    ((0x00, 0x7F),),
    ((0xC2, 0xDF), TRAIL),
    ((0xE0, 0xE0), (0xA0, 0xBF), TRAIL),
    ((0xE1, 0xEC), TRAIL, TRAIL),
    ((0xED, 0xED), (0x80, 0x9F), TRAIL),
    ((0xEE, 0xEF), TRAIL, TRAIL),
    ((0xF0, 0xF0), (0x90, 0xBF), TRAIL, TRAIL),
    ((0xF1, 0xF3), TRAIL, TRAIL, TRAIL),
    ((0xF4, 0xF4), (0x80, 0x8F), TRAIL, TRAIL),
)


def decode_by_the_table(data: bytes, *, for_each_byte: bool) -> str:
    """Decode UTF-8 by the table; U+FFFD stands for a maximal part of a character, or for each of its bytes."""
    text, i = "", 0
    while i < len(data):
        form = next((f for f in WELL_FORMED if f[0][0] <= data[i] <= f[0][1]), ())
        size = 0
        while size < len(form) and i + size < len(data):
            if not form[size][0] <= data[i + size] <= form[size][1]:
                break
            size += 1
        if form and size == len(form):
            point = data[i] & (0x7F, 0x1F, 0x0F, 0x07)[size - 1]
            for byte in data[i + 1 : i + size]:
                point = point << 6 | byte & 0x3F
            text += chr(point)
        else:
            text += "\ufffd" * (max(size, 1) if for_each_byte else 1)
        i += max(size, 1)
    return text


BROKEN = (
    b"\xc0\xaf", b"\xe0\x80\x80", b"\xf0\x80\x80\x80",  # longer than needed
    b"\xed\xa0\x80", b"\xed\xbf\xbf",  # surrogates
    b"\xf4\x90\x80\x80", b"\xf5", b"\xff", b"\xfe",  # beyond U+10FFFF
    b"\xe2\x82", b"\xf0\x9f\x99", b"\xc3", b"\x80", b"\xbf\xbf",  # parts
    b"\xc3\xc3\xa9", b"\xe2\x82\x41", b"\xf0\x9f\xe2\x82\xac",  # parts before characters
)  # fmt: skip
RUNS = st.lists(
    st.sampled_from(BROKEN) | st.text(max_size=2).map(str.encode) | st.binary(max_size=4),
    max_size=8,
).map(b"".join)


def byte_names(kind: str) -> list[str]:
    """Return the token of each byte. Those of byte-level tokenizers are from GPT-2's encoder, in its own words."""
    if kind.startswith("byte_fallback"):
        return [f"<0x{byte:02X}>" for byte in range(256)]
    shown = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


@settings(max_examples=300)
@given(RUNS, st.sampled_from(["byte_level", "byte_fallback"]))
def test_a_stream_of_bytes_is_decoded_as_the_unicode_standard_says(tokenizers_by_kind, data, kind):
    tokenizer = tokenizers_by_kind[kind]
    names = byte_names(kind)
    ids = [tokenizer.library.token_to_id(names[byte]) for byte in data]
    assert None not in ids

    parts = push_all(tokenizer, ids)

    assert "".join(parts) == decode_by_the_table(data, for_each_byte=kind == "byte_fallback")
    # What is returned is never taken back: the last part may only hold what no byte has completed.
    assert all(len(part) <= 4 for part in parts)


@pytest.mark.parametrize("data", BROKEN)
def test_the_table_agrees_with_python(data):
    assert decode_by_the_table(data, for_each_byte=False) == data.decode("utf-8", "replace")
