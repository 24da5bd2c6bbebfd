from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.errors import TokenizerError
from model.text.detokenizer import IncrementalDetokenizer
from model.text.tokenizer import Tokenizer

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


@settings(max_examples=300)
@given(st.data(), st.sampled_from(KINDS), st.booleans())
def test_the_concatenated_stream_equals_the_text_of_all_tokens(
    tokenizers_by_kind, data, kind, skip
) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(sequences(tokenizer.vocab_size))

    assert "".join(push_all(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip)


@settings(max_examples=300)
@given(st.data(), st.sampled_from([k for k in KINDS if "fallback" not in k]), st.booleans())
def test_the_text_of_any_tokens_matches_the_library(tokenizers_by_kind, data, kind, skip) -> None:
    tokenizer = tokenizers_by_kind[kind]
    ids = data.draw(sequences(tokenizer.vocab_size))

    assert tokenizer.decode(ids, skip) == tokenizer.library.decode(ids, skip)


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

    assert "".join(push_all(tokenizer, padded)) == "".join(push_all(tokenizer, ids))


@pytest.mark.parametrize("bad", [-1, 2**70, "7", None, 1.5])
def test_an_invalid_id_is_rejected(tokenizer, bad) -> None:
    with pytest.raises(TokenizerError, match="not a token id"):
        IncrementalDetokenizer(tokenizer).push(bad)
    with pytest.raises(TokenizerError, match="not a token id"):
        tokenizer.decode([bad])


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

    assert tokenizer.decode(prompt) + added == tokenizer.decode([*prompt, *ids[cut:]])


def test_the_first_space_is_dropped_without_a_prompt_and_kept_after_one(tokenizers_by_kind) -> None:
    tokenizer = tokenizers_by_kind["byte_fallback_strip"]
    ids = tokenizer.encode("the", add_special_tokens=False)
    far = [*tokenizer.encode("fox"), *[tokenizer.eos_token_id] * 50]

    assert "".join(push_all(tokenizer, ids)) == "the"
    assert "".join(push_all(tokenizer, ids, prompt=[tokenizer.bos_token_id])) == "the"
    assert "".join(push_all(tokenizer, ids, prompt=tokenizer.encode("fox"))) == " the"
    assert "".join(push_all(tokenizer, ids, prompt=far)) == " the"


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
