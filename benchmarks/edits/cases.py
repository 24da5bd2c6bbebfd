"""The requests of the benchmark: edits, text without repetition and JSON by a schema, as tokens of any model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from benchmarks.edits.data import Edit, read_edits
from model.checkpoint.config import ModelConfig
from model.hub.resolve import is_bundled
from model.sampling.grammar import serialize
from model.sampling.parameters import SamplingParams
from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer
from server.engine.core.request import GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable

_NUM_TEXTS: Final = 100
_NUM_SCHEMAS: Final = 50
_TEXT_PROMPT: Final = 64
_TEXT_TOKENS: Final = 128
_JSON_TOKENS: Final = 256
_LINES_AFTER: Final = 1
"""Lines of the answer that a prompt has after the first change."""
_NAMES: Final = (
    "name", "title", "author", "city", "country", "status", "comment", "address", "category", "language", "currency",
    "description", "created_by", "department", "manufacturer", "registration_number",
)  # fmt: skip
_VALUES: Final[tuple[dict[str, Any], ...]] = (
    {"type": "string", "maxLength": 16},
    {"type": "integer", "minimum": 0, "maximum": 10_000},
    {"type": "boolean"},
    {"enum": ["available", "reserved", "discontinued"]},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
)


class Case(msgspec.Struct, frozen=True):
    """One request.

    Attributes:
        prompt: token ids.
        tokens: most tokens of the answer.
        temperature: of the sampling; 0 is greedy.
        seed: of the sampling.
        ends: whether the model's end tokens end the answer.
        schema: that the answer follows; None for any text.
    """

    prompt: list[int]
    tokens: int
    temperature: float = 0.0
    seed: int = 0
    ends: bool = True
    schema: dict[str, Any] | None = None

    def request(
        self, number: int, model: ModelConfig, *, salt: str, logprobs: bool
    ) -> GenerateRequest:
        """Return the request of an engine.

        Args:
            number: its id.
            model: for its end tokens.
            salt: of the prefix cache.
            logprobs: whether log-probabilities are reported.
        """
        ends = tuple(model.eos_token_ids) if self.ends else ()
        sampling = SamplingParams(
            max_new_tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
            eos_token_ids=ends,
            grammar=None if self.schema is None else serialize("json_schema", self.schema),
            logprobs=logprobs,
        )
        return GenerateRequest(
            request_id=number, prompt_token_ids=self.prompt, sampling=sampling, cache_salt=salt
        )

    def body(self, model: str, *, salt: str, logprobs: bool) -> dict[str, Any]:
        """Return the body of a request of `POST /v1/completions` for a stream; see `request`."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "temperature": self.temperature,
            "repetition_penalty": 1.0,
            "seed": self.seed,
            "ignore_eos": not self.ends,
            "cache_salt": salt,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature:  # a checkpoint may have other defaults
            body |= {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        if self.schema is not None:
            format_ = {"name": "record", "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": format_}
        return body | ({"logprobs": 0} if logprobs else {})


class Model:
    """What prompts are made of: the tokenizer and the chat template of a checkpoint.

    Attributes:
        config: of the checkpoint.
        tokenizer: likewise.
        most_tokens: limit of prompt and answer.

    Args:
        folder: of the checkpoint, or its GGUF file.
        max_model_len: limit of prompt and answer; None for the model's own.
    """

    def __init__(self, folder: Path, max_model_len: int | None = None) -> None:
        self.config = ModelConfig.from_folder(folder)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.most_tokens = min(max_model_len or self.config.max_context, self.config.max_context)
        # The bundled model's template is for single functions: it continues text.
        template = None if is_bundled(folder) else ChatTemplate.from_folder(folder, self.tokenizer)
        self._template = template

    def edits(self) -> list[Case]:
        """Return the edits; the answer is begun, up to a line after the first change, and has the rest of the part."""
        return [case for edit in read_edits() if (case := self._edit(edit)) is not None]

    def _edit(self, edit: Edit) -> Case | None:
        first, _, new = edit.changes[0]
        lines = edit.edited.splitlines(keepends=True)[: first + len(new) + _LINES_AFTER]
        begun = "".join(lines).removesuffix(
            "\n"
        )  # which most tokenizers join with the spaces after it
        if self._template is None:
            text = f"# before\n{edit.text}\n# after: {edit.instruction}\n{begun}"
            prompt = self.tokenizer.encode(text)
        else:
            task = f"{edit.instruction.capitalize()} in this file:\n\n```python\n{edit.text}```"
            chat = self._template.render([{"role": "user", "content": task}])
            answer = f"```python\n{begun}"
            prompt = chat.encode() + self.tokenizer.encode(answer, add_special_tokens=False)
        rest = self.tokenizer.encode(edit.edited[len(begun) :], add_special_tokens=False)
        fits = len(prompt) + len(rest) <= self.most_tokens
        return Case(prompt, len(rest)) if fits else None

    def texts(self) -> list[Case]:
        """Return prompts of random tokens, sampled at temperature 1: nothing in prompt or answer repeats."""
        rng = random.Random(1)
        tokens = self.config.network.vocab
        return [
            Case(
                [rng.randrange(tokens) for _ in range(_TEXT_PROMPT)],
                _TEXT_TOKENS,
                temperature=1.0,
                seed=seed,
                ends=False,
            )
            for seed in range(_NUM_TEXTS)
        ]

    def schemas(self) -> list[Case]:
        """Return prompts for records as JSON, each with a schema."""
        rng = random.Random(2)
        cases = []
        for seed in range(_NUM_SCHEMAS):
            names = rng.sample(_NAMES, rng.randint(4, 8))
            schema = {
                "type": "object",
                "properties": {name: rng.choice(_VALUES) for name in names},
                "required": names,
                "additionalProperties": False,
            }
            prompt = self.tokenizer.encode(f"# A record with {', '.join(names)}, as JSON:\n")
            cases.append(Case(prompt, _JSON_TOKENS, temperature=1.0, seed=seed, schema=schema))
        return cases


WORKLOADS: Final[dict[str, Callable[[Model], list[Case]]]] = {
    "edits": Model.edits,
    "text": Model.texts,
    "json": Model.schemas,
}
"""The cases of a workload by its name."""


def random_cases(vocab_size: int, prompt: int, tokens: int, count: int) -> list[Case]:
    """Return greedy requests with prompts of random tokens that do not end, for models with random weights."""
    rng = random.Random(3)
    return [
        Case([rng.randrange(vocab_size) for _ in range(prompt)], tokens, ends=False)
        for _ in range(count)
    ]
