"""The tables of other servers' parameters are complete, and their cells are what the application does."""

import pytest
from huggingface_hub import TextGenerationInputGenerateParameters
from openai.types import completion_create_params as completion_types
from openai.types.chat import completion_create_params as chat_types
from openai.types.responses import response_create_params as response_types

from docs.parameter_table import parameter_tables
from docs.request_parameters import CHAT, COMPLETIONS, GENERATE, RESPONSES


def _of(module, name):
    return (
        getattr(module, f"{name}CreateParamsBase"),
        getattr(module, f"{name}CreateParamsStreaming"),
    )


@pytest.fixture(scope="module")
def tables():
    return {
        marker: dict(line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:])
        for marker, table in parameter_tables().items()
    }


def test_every_parameter_of_tgi_s_client_is_listed():
    assert GENERATE.keys() == TextGenerationInputGenerateParameters.__annotations__.keys()


@pytest.mark.parametrize(
    ("listed", "base", "streaming"),
    [
        (COMPLETIONS, *_of(completion_types, "Completion")),
        (CHAT, *_of(chat_types, "Completion")),
        (RESPONSES, *_of(response_types, "Response")),
    ],
)
def test_every_parameter_of_openai_s_client_is_listed(listed, base, streaming):
    names = base.__annotations__.keys() | streaming.__annotations__.keys()

    assert names == {name for name, row in listed.items() if "OpenAI" in row.api} & names
    assert {name for name, row in listed.items() if "OpenAI" in row.api} <= names | {
        "response_format"  # of completions: vLLM's alone
    }


def test_cells_say_supported_warning_or_the_message_of_the_refusal(tables):
    tgi, openai = tables["tgi-parameters"], tables["openai-parameters"]

    assert tgi["`top_k`"] == "yes"
    assert tgi["`watermark`"] == "warning"
    assert tgi["`adapter_id`"].startswith("refused: the adapter `a/b` does not exist")
    assert openai["`top_k`"] == "vLLM | yes | yes | yes"
    assert openai["`user`"] == "OpenAI, vLLM | warning | warning | warning"
    assert openai["`audio`"].startswith("OpenAI |  | refused: `audio` is not supported")


def test_other_names_have_a_meaning_or_a_warning(tables):
    names = tables["tgi-other-names"]

    assert names["`parameters.stop_tokens`"] == "`parameters.stop`"
    assert names["`parameters.num_return_sequences`"] == "only 1"
    assert names["`parameters.num_beams`"] == "warning; none for `1`"
    assert names["`options`"] == "warning; none for `{}`"
