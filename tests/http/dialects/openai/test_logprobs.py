"""Names and offsets of tokens in log-probabilities: each token has its own name, and begins where its text does."""

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models

from model.text.tokenizer import Tokenizer
from server.engine.core.request import FinishReason
from server.http.dialects.openai.logprobs import (
    ScoredToken,
    TokenNames,
    prompt_offsets,
)
from tests.http.dialects.openai.events import chunks
from tests.http.fakes import EOS_ID, IM_END_ID, say

pytestmark = pytest.mark.anyio

TEXT = "é€\N{GRINNING FACE}a"


def names_of(tokenizer, *token_ids, as_ids=False):
    top = tuple((token_id, -1.0) for token_id in token_ids[1:])
    names = TokenNames(tokenizer, as_ids=as_ids).at_position(ScoredToken(token_ids[0], -1.0, top))
    return [names[token_id] for token_id in token_ids]


def byte_fallback_tokenizer():
    vocabulary = [(f"<0x{byte:02X}>", 0.0) for byte in range(256)] + [("A", 0.0), ("<unk>", 0.0)]
    library = Library(models.Unigram(vocabulary, unk_id=257, byte_fallback=True))
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return Tokenizer(library)


def wordpiece_tokenizer():
    library = Library(models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    return Tokenizer(library)


def test_every_byte_has_a_name_of_its_own(tokenizer):
    names = names_of(tokenizer, *range(256))

    assert len(set(names)) == 256
    (first,) = tokenizer.encode("é")[:1]
    assert names[first] == r"bytes:\xc3"
    assert sum(name.startswith("bytes:") for name in names) == 128


def test_a_byte_is_not_named_as_the_character(tmp_path):
    assert names_of(byte_fallback_tokenizer(), 0x41, 256) == [r"bytes:\x41", "A"]


def test_tokens_of_equal_texts_are_told_apart_by_their_ids():
    assert names_of(wordpiece_tokenizer(), 1, 2) != names_of(wordpiece_tokenizer(), 1, 1)
    assert len(set(names_of(wordpiece_tokenizer(), 2, 1, 0))) == 3


def test_ids_without_a_token_are_named_by_their_ids(tokenizer):
    assert names_of(tokenizer, 290, 291, EOS_ID) == ["token_id:290", "token_id:291", "</s>"]


def test_all_names_are_ids_on_request(tokenizer):
    assert names_of(tokenizer, 5, 200, as_ids=True) == ["token_id:5", "token_id:200"]


@pytest.mark.parametrize("logprobs", [0, 1, 5])
async def test_the_sampled_token_is_among_the_likeliest(complete, engine, tokenizer, logprobs):
    tokens = tokenizer.encode(TEXT)
    others = tuple((token_id, -2.0) for token_id in tokenizer.encode("é€")[:5])
    engine.script = say(tokens, FinishReason.LENGTH, top=others)

    found = (await complete(logprobs=logprobs)).json()["choices"][0]["logprobs"]

    assert len(found["tokens"]) == len(tokens)
    for token_id, name, top in zip(tokens, found["tokens"], found["top_logprobs"], strict=True):
        assert name in top
        listed = [i for i, _ in others[:logprobs]]
        assert len(top) == len({*listed, token_id})


async def test_names_are_the_same_in_chat(chat, complete, engine, tokenizer):
    tokens = tokenizer.encode(TEXT)
    engine.script = say(tokens, FinishReason.LENGTH, top=((tokens[0], -0.25), (299, -2.0)))

    completion = (await complete(logprobs=2)).json()["choices"][0]["logprobs"]
    content = (await chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"][
        "content"
    ]

    assert [entry["token"] for entry in content] == completion["tokens"]
    for entry, top in zip(content, completion["top_logprobs"], strict=True):
        assert {other["token"] for other in entry["top_logprobs"]} <= set(top)


async def test_tokens_of_a_character_begin_where_it_does(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode(TEXT), FinishReason.LENGTH)

    choice = (await complete(logprobs=1)).json()["choices"][0]

    assert choice["text"] == TEXT
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3]


async def test_offsets_of_an_echoed_prompt_are_those_of_its_text(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("éb"), FinishReason.LENGTH)

    choice = (await complete(TEXT, echo=True, logprobs=1, max_tokens=3)).json()["choices"][0]
    scored = (await complete(TEXT, echo=True, logprobs=5, max_tokens=0)).json()["choices"][0]

    assert choice["text"] == TEXT + "éb"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 5]
    assert scored["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert scored["logprobs"]["tokens"] == choice["logprobs"]["tokens"][:10]
    assert len(set(scored["logprobs"]["tokens"])) == len(set(tokenizer.encode(TEXT)))
    assert scored["logprobs"]["top_logprobs"][0] is None


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": "zz"}, {"stop": ["é€", "q"]}])
async def test_a_stream_has_the_names_and_offsets_of_the_reply(complete, engine, tokenizer, fields):
    engine.script = say(tokenizer.encode("az" + TEXT + "z"), FinishReason.LENGTH)

    reply = (await complete(TEXT, logprobs=2, **fields)).json()["choices"][0]["logprobs"]
    events = chunks(await complete(TEXT, logprobs=2, stream=True, **fields))

    found = [chunk["choices"][0]["logprobs"] for chunk in events]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [value for part in found for value in part[name]] == reply[name]


async def test_text_that_is_held_back_for_a_stop_string_counts(complete, engine, tokenizer):
    engine.script = say(tokenizer.encode("axb"), FinishReason.LENGTH)

    choice = (await complete(logprobs=0, stop="xyz")).json()["choices"][0]

    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(("skip", "expected"), [(True, [0, 1, 1]), (False, [0, 1, 11])])
async def test_special_tokens_have_characters_only_where_they_are_text(
    complete, engine, tokenizer, skip, expected
):
    engine.script = say(
        [*tokenizer.encode("a"), IM_END_ID, *tokenizer.encode("b")], FinishReason.LENGTH
    )

    choice = (await complete(logprobs=0, skip_special_tokens=skip)).json()["choices"][0]

    assert choice["logprobs"]["text_offset"] == expected
    assert choice["text"][expected[-1] :] == "b"


def test_a_special_token_of_a_prompt_has_characters_if_the_text_names_it(tokenizer):
    token_ids = [EOS_ID, *tokenizer.encode("a</s>b")]

    assert prompt_offsets(tokenizer, token_ids, "a</s>b") == [0, 0, 1, 5]
    assert prompt_offsets(tokenizer, token_ids, "ab") == [0, 0, 1, 1]


async def test_each_choice_has_offsets_of_its_own(complete, engine, tokenizer):
    async def script(_engine, request, stream):
        text = "é" * (1 + request.sampling.seed % 2) + "."
        await say(tokenizer.encode(text), FinishReason.LENGTH)(_engine, request, stream)

    engine.script = script

    choices = (await complete(n=2, seed=2, logprobs=0)).json()["choices"]

    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 0, 1], [0, 0, 1, 1, 2]]
