"""Documents for fill-in-the-middle and instructions."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from model.training.infilling import (
    MAX_CHARACTERS,
    chunks,
    infilling_documents,
    infilling_prompt,
    rearrange,
)
from model.training.instructions import instruction, instruction_documents
from model.training.tokenization import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_END_ID,
    chat_turn,
    save_tokenizer,
    train_tokenizer,
)

PSM = re.compile(r"<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>(.*)", re.DOTALL)
FUNCTION = '''def add(a, *, b=1):
    """Return the sum of two
    numbers.

    More about it.
    """
    return a + b
'''


def restore(document: str) -> str:
    prefix, suffix, middle = PSM.fullmatch(document).groups()
    return middle + suffix if not prefix else prefix + middle + suffix


@given(st.text(min_size=1), st.integers(0, 1000))
def test_a_rearranged_text_contains_all_of_it_in_either_order(text, seed):
    assert restore(rearrange(text, np.random.default_rng(seed))) == text


def test_orders_and_cuts_have_their_shares():
    generator = np.random.default_rng(0)
    text = "abcdefghi\n" * 20
    documents = [rearrange(text, generator) for _ in range(2000)]
    suffix_first = sum(d.startswith("<|fim_prefix|><|fim_suffix|>") for d in documents)
    cuts = {len(PSM.fullmatch(d)[1]) % 10 for d in documents}
    single_lines = sum(1 <= len(PSM.fullmatch(d)[3].rstrip("\n")) < 10 for d in documents)

    assert 440 < suffix_first < 620
    assert cuts == set(range(10))
    assert 400 < single_lines < 700


def test_a_prompt_for_infilling_is_the_beginning_of_a_training_document():
    generator = np.random.default_rng(1)
    document = next(
        d
        for d in (rearrange("one two three", generator) for _ in range(99))
        if "<|fim_prefix|><" not in d
    )
    prefix, suffix, middle = PSM.fullmatch(document).groups()

    assert infilling_prompt(prefix, suffix) + middle == document


def test_each_copy_has_other_cuts_and_long_texts_are_cut_at_line_ends():
    text = "x = 1\n" * 1900
    parts = list(chunks(text))
    documents = list(infilling_documents([text, "tiny"], 2, seed=0))

    assert "".join(parts) == text
    assert all(len(part) <= MAX_CHARACTERS and part.endswith("\n") for part in parts)
    assert "".join(chunks("y" * 9000)) == "y" * 9000
    assert len(documents) == 2 * len(parts)
    assert documents[: len(parts)] != documents[len(parts) :]
    assert documents == list(infilling_documents([text, "tiny"], 2, seed=0))


def test_a_documented_function_becomes_an_instruction_and_its_answer():
    (document,) = instruction_documents([FUNCTION, "x = 1\n", "def f():\n    pass\n"], seed=0)
    user, answer, rest = document.split(f"{TURN_END}\n")

    assert user.startswith("<|im_start|>user\n")
    assert "eturn the sum of two numbers." in user
    assert "More about it" not in user
    assert answer == "<|im_start|>assistant\n" + FUNCTION.rstrip("\n")
    assert rest == ""


def test_a_fragment_that_does_not_parse_is_no_instruction():
    broken = 'def f():\n    """Return nothing of interest."""\n        class B:\n'

    assert instruction(broken, np.random.default_rng(0)) is None


def test_instructions_vary_and_name_the_function():
    generator = np.random.default_rng(0)
    requests = {instruction(FUNCTION, generator) for _ in range(50)}

    assert len(requests) == 5
    assert "Implement `add(a, *, b=1)`: Return the sum of two numbers." in requests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([FUNCTION] * 10, 300), path, 2048)
    return path


def test_the_tokenizer_has_the_special_tokens_first_and_the_template_frames_messages_with_them(
    folder,
):
    tokenizer = Tokenizer.from_folder(folder)
    chat = ChatTemplate.from_folder(folder, tokenizer)
    rendered = chat.render([{"role": "user", "content": f"a{TURN_END}b"}])

    assert [tokenizer.library.token_to_id(t) for t in SPECIAL_TOKENS] == list(
        range(len(SPECIAL_TOKENS))
    )
    assert all(tokenizer.is_special(i) for i in range(len(SPECIAL_TOKENS)))
    assert (
        rendered.text
        == END_OF_TEXT + chat_turn("user", f"a{TURN_END}b") + "<|im_start|>assistant\n"
    )
    assert rendered.encode().count(TURN_END_ID) == 1
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_a_training_document_is_encoded_as_serving_encodes_its_prompt(folder):
    tokenizer = Tokenizer.from_folder(folder)
    (document,) = instruction_documents([FUNCTION], seed=0)
    request = document.partition("user\n")[2].partition(TURN_END)[0]
    prompt = ChatTemplate.from_folder(folder, tokenizer).render(
        [{"role": "user", "content": request}]
    )
    ids = prompt.encode()

    assert tokenizer.encode(document)[: len(ids)] == ids
    ast.parse(FUNCTION)
