"""outlines: each kind of output by its models for OpenAI, vLLM, SGLang and Text Generation Inference."""

import functools
from typing import Literal

import openai
import outlines
from huggingface_hub import InferenceClient
from outlines.types import CFG, Regex
from pydantic import BaseModel
from scenario import MODEL, run, url


class Answer(BaseModel):
    """A typed answer."""

    degrees: int


client = openai.OpenAI(base_url=f"{url()}/v1", api_key="none", max_retries=0)
MODELS = {
    "openai": (outlines.from_openai(client, MODEL), {"max_tokens": 40}),
    "vllm": (outlines.from_vllm(client, MODEL), {"max_tokens": 40}),
    "sglang": (outlines.from_sglang(client, MODEL), {"max_tokens": 40}),
    "tgi": (outlines.from_tgi(InferenceClient(url())), {"max_new_tokens": 40}),
}
OUTPUTS = {
    "text": None,
    "schema": Answer,
    "choice": Literal["cold", "warm"],
    "integer": int,
    "regex": Regex("[0-9]{1,3}"),
    "grammar": CFG('?start: "cold" | "warm"'),
}
REFUSED_BY_CLIENT = {
    ("openai", "choice"), ("openai", "integer"), ("openai", "regex"), ("openai", "grammar"),
    ("tgi", "grammar"),
}  # fmt: skip


def ask(model, output, limits, streamed):
    """Ask once."""
    if streamed:
        assert list(model.stream("How warm is Rome?", output, **limits))
    else:
        assert model("How warm is Rome?", output, **limits)


run(
    {
        f"{name}, {kind}, streamed {streamed}": functools.partial(
            ask, model, output, limits, streamed
        )
        for name, (model, limits) in MODELS.items()
        for kind, output in OUTPUTS.items()
        if (name, kind) not in REFUSED_BY_CLIENT
        for streamed in (False, True)
    }
)
