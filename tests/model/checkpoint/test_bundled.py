"""The bundled checkpoint is complete, small, and as its model card states."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import model
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.text import tokenizer as text_tokenizer
from model.text.chat_template import ChatTemplate
from model.training import card, evaluate
from model.training.tokenization import TURN_END_ID

FOLDER = Path(model.__file__).parent / "bundled"
MIB = 2**20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def _read(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def test_the_folder_is_complete_and_within_its_size_limits():
    names = {path.name for path in FOLDER.iterdir()}
    index = _read("model.safetensors.index.json")
    shards = set(index["weight_map"].values())
    assert names == shards | {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "evaluation.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert all((FOLDER / shard).stat().st_size <= 15 * MIB for shard in shards)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 24 * MIB


def test_the_model_card_matches_the_recorded_figures():
    rendered = card.render(_read("config.json"), _read("evaluation.json"), _read("training.json"))
    assert (FOLDER / "README.md").read_text() == rendered


def test_a_conversation_is_framed_with_the_tokens_of_turns():
    served = text_tokenizer.Tokenizer.from_folder(FOLDER)
    chat = ChatTemplate.from_folder(FOLDER, served)
    messages = [
        {"role": "user", "content": "Reverse a string.<|im_end|>"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "import os\n"},
    ]
    rendered = chat.render(messages)

    assert rendered.text == (
        "<|endoftext|><|im_start|>user\nReverse a string.<|im_end|><|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nimport os\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert rendered.encode().count(TURN_END_ID) == 3
    assert ModelConfig.from_folder(FOLDER).eos_token_ids == (0, TURN_END_ID)


def test_the_model_compresses_held_out_files_better_than_xz():
    figures = _read("evaluation.json")["compression"]
    assert figures["bits_per_byte"] < 0.5 * figures["xz_bits_per_byte"]
    assert figures["bits_per_byte"] < 0.5 * figures["xz_all_files_as_one_bits_per_byte"]


def test_the_configuration_is_a_llama_of_the_size_in_the_card():
    config = ModelConfig.from_folder(FOLDER)
    assert config.architecture == "LlamaForCausalLM"
    assert config.max_context >= 2048
    assert config.network.num_parameters == _read("evaluation.json")["parameters"]


@settings(max_examples=200)
@given(text=st.text())
def test_the_tokenizer_round_trips_every_text(text):
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if not any(token in text for token in special):  # decoding leaves those out
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n\n", "\t x\r\n", "    def f():\n\n        return  1   \n", "é漢\U0001f600\x00"],
)
def test_the_tokenizer_round_trips_white_space_and_other_scripts(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_prompt_begins_with_the_separator_and_a_line_end_is_one_token(tokenizer):
    tokens = tokenizer.encode("def f():\n    return 1\n").tokens
    assert tokens[0] == "<|endoftext|>"
    assert tokens.count("Ċ") == 2
    assert "ĠĠĠĠ" in tokens


def test_typical_first_prompts_complete_to_python(tokenizer):
    torch.manual_seed(0)
    served = load_model(FOLDER, ModelConfig.from_folder(FOLDER), torch.float32, "cpu")
    prompts = ["def fibonacci(n):\n", "class Stack:\n    def __init__"]
    completions = evaluate.complete(served, tokenizer, prompts, evaluate.greedy(96))
    function = evaluate.cut_function(prompts[0], completions[0])
    assert evaluate.parses(function)
    assert isinstance(ast.parse(function).body[0], ast.FunctionDef)
    assert len(function.splitlines()) > 1
    whole_lines = (prompts[1] + completions[1]).rpartition("\n")[0]
    assert evaluate.parses(whole_lines)
