"""Prompts have the requested length in tokens."""

import asyncio

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from model.hub.resolve import resolve
from model.text.tokenizer import Tokenizer
from server.cli.bench.serve.prompts import (
    PromptError,
    PromptMaker,
    approximate_prompts,
    with_server,
    with_tokenizer,
)
from server.cli.client.http_client import Client, Target
from tests.cli import fake_server as fake


def make(tokenizer, lengths, seed=0):
    async def run():
        maker = PromptMaker(with_tokenizer(tokenizer), np.random.default_rng(seed))
        await maker.learn()
        return await maker.make(lengths)

    return asyncio.run(run())


@pytest.fixture(scope="module")
def bundled():
    return Tokenizer.from_folder(resolve("bundled"))


@pytest.fixture(scope="module")
def metaspace():
    """A tokenizer like Llama 2's: a space belongs to the word after it, and every text begins with <s>."""
    vocabulary = ["<s>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    words = [f"\u2581{a}{b}" for a in "abcdef" for b in "aeiou"]
    merges = [("\u2581", word[1]) for word in words[::5]]
    merges += [(word[:2], word[2]) for word in words]
    tokens = list(dict.fromkeys([*vocabulary, *(a + b for a, b in merges)]))
    library = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>")
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    library.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    library.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(library)


def test_prompts_have_exactly_the_requested_number_of_tokens(bundled):
    lengths = [4, 17, 100, 256, 1024]
    prompts = make(bundled, lengths)

    assert [len(bundled.encode(prompt.text)) for prompt in prompts] == lengths
    assert [prompt.tokens for prompt in prompts] == lengths
    assert all(prompt.exact for prompt in prompts)


def test_prompts_are_exact_with_a_tokenizer_that_adds_tokens_and_encodes_spaces(metaspace):
    lengths = [5, 64, 300]
    prompts = make(metaspace, lengths)

    assert [len(metaspace.encode(prompt.text)) for prompt in prompts] == lengths


def test_a_prompt_of_an_impossible_length_is_marked_inexact(bundled):
    (prompt,) = make(bundled, [1])

    assert prompt.tokens == len(bundled.encode(prompt.text))
    assert not prompt.exact


def test_prompts_share_no_prefix_and_a_seed_repeats_them(bundled):
    first = make(bundled, [64] * 20)

    assert len({prompt.text[:40] for prompt in first}) == 20
    assert make(bundled, [64] * 20) == first
    assert make(bundled, [64] * 20, seed=1) != first


def test_prompts_made_with_the_server_equal_those_of_its_tokenizer(bundled):
    def tokenize(body):
        import json

        spans = bundled.encode_with_offsets(json.loads(body)["inputs"])
        return fake.plain(
            [{"id": s.id, "text": s.text, "start": s.start, "stop": s.stop} for s in spans]
        )

    async def run():
        async with fake.FakeServer({"/tokenize": tokenize}) as server:
            client = Client(Target.from_url(server.url))
            maker = PromptMaker(with_server(client), np.random.default_rng(0))
            await maker.learn()
            prompts = await maker.make([64, 65])
            client.close()
            return prompts

    assert asyncio.run(run()) == make(bundled, [64, 65])


@pytest.mark.parametrize("answer", [fake.plain({}, "404 Not Found"), fake.plain({"tokens": 3})])
def test_the_error_for_a_server_that_does_not_tokenize_names_the_remedy(answer):
    async def run():
        async with fake.FakeServer({"/tokenize": answer}) as server:
            client = Client(Target.from_url(server.url))
            await PromptMaker(with_server(client), np.random.default_rng(0)).learn()

    with pytest.raises(PromptError, match="--tokenizer"):
        asyncio.run(run())


def test_approximate_prompts_are_marked_inexact():
    prompts = approximate_prompts([3, 50], np.random.default_rng(0))

    assert [len(prompt.text.split()) for prompt in prompts] == [3, 50]
    assert not any(prompt.exact for prompt in prompts)
