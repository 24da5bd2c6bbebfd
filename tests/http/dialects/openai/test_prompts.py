"""Fill-in-the-middle prompts: the tokens of each family, their order, and the tokens that end the text."""

import httpx
import pytest
from tokenizers import AddedToken

from model.text.tokenizer import Tokenizer
from server.http.app import create_app
from server.http.dialects.openai.prompts import FAMILIES, find_family
from tests.http.conftest import CONFIG
from tests.http.fakes import save_tokenizer

pytestmark = pytest.mark.anyio


def make_tokenizer(folder, names, bos=None):
    save_tokenizer(folder)
    plain = Tokenizer.from_folder(folder)
    tokens = [AddedToken(name, special=True) for name in names]
    plain.library.add_special_tokens(tokens)
    return Tokenizer(plain.library, bos)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.prefix)
async def test_the_parts_of_a_text_are_marked(tmp_path, engine, family):
    names = [n for n in (family.prefix, family.suffix, family.middle, *family.ends[:1]) if n]
    tokenizer = make_tokenizer(tmp_path, names)
    assert find_family(tokenizer) == family
    app = create_app(engine, tokenizer, CONFIG)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        body = {"prompt": "ab", "suffix": "yz", "stop_token_ids": [3]}
        response = await client.post("/v1/completions", json=body)

    assert response.status_code == 200, response.text
    before, after = tokenizer.encode("ab"), tokenizer.encode("yz")
    prefix, suffix = tokenizer.token_id(family.prefix), tokenizer.token_id(family.suffix)
    parts = [[prefix, *before], [suffix, *after]]
    if family.suffix_first:
        parts.reverse()
    middle = [tokenizer.token_id(family.middle)] if family.middle else []
    (request,) = engine.requests
    assert request.prompt_token_ids == [*parts[0], *parts[1], *middle]
    ends = [tokenizer.token_id(name) for name in family.ends[:1]]
    assert list(request.sampling.stop_token_ids) == [3, *ends]


async def test_an_empty_suffix_is_none(complete, engine, tokenizer):
    await complete("ab", suffix="")

    assert engine.requests[0].prompt_token_ids == tokenizer.encode("ab")
