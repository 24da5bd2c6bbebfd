"""The request bodies of the OpenAI routes: types and fixed ranges, as the OpenAPI document shows them.

`options` has this server's limits and the rules between fields, `fields` the fields that are accepted without effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.http.body.field_types import (
    MESSAGE_SCHEMA,
    MessageList,
    ObjectOrText,
    OnlyFalse,
    StructuralTag,
    TagFormat,
    optional,
)
from server.http.body.sampling_fields import SMALLEST, CommonSamplingFields, number

INT32_MAX = 2**31 - 1
UINT32_MAX = 2**32 - 1
INT64_MAX = 2**63 - 1
MAX_TEMPERATURE = 2.0
MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128
MAX_PREDICTION_PARTS = 1024

# Unknown fields were removed, and reported, before.
_BODY = ConfigDict(
    strict=True, extra="ignore", frozen=True, allow_inf_nan=False, hide_input_in_errors=True
)


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopStringList = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(fail_fast=True),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}},
            ]
        }
    ),
]

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
"""A text, a list of texts, a list of token ids, or a list of such lists; `prompts` checks it."""


Choice = Annotated[list[str], Field(min_length=1)]


class StreamOptions(BaseModel):
    """What the events of a stream report beside the text."""

    model_config = _BODY

    include_usage: bool | None = optional(
        "Send the usage in an event of its own before the end of the stream."
    )
    continuous_usage_stats: bool | None = optional("Report the usage so far in every event.")
    include_obfuscation: OnlyFalse | None = optional("Not supported: null or false.")


class StructuredOutputs(BaseModel):
    """A constraint on the text: exactly one of the fields."""

    model_config = _BODY

    json_schema: ObjectOrText | None = Field(
        None, alias="json", description="A JSON schema, as an object or as a string."
    )
    regex: str | None = optional("A regular expression that the text matches.")
    choice: Choice | None = optional("Strings; the text is one of them.")
    grammar: str | None = optional("A Lark grammar.")
    json_object: bool | None = optional("True: the text is any JSON object.")
    structural_tag: StructuralTag | None = optional("A structural tag.")
    whitespace_pattern: str | None = optional(
        "Of the white space in JSON; must allow a space and nothing."
    )
    disable_any_whitespace: bool | None = optional("Not supported for JSON: null or false.")
    disable_additional_properties: bool | None = optional(
        "Objects of the JSON schema have declared properties only."
    )


class Structure(BaseModel):
    """A part of a structural tag."""

    model_config = _BODY | ConfigDict(extra="forbid")

    begin: Annotated[str, Field(min_length=1)]
    schema_: ObjectOrText | None = Field(None, alias="schema")
    end: str | None = None


class ResponseFormat(BaseModel):
    """The format of the text. Each API has its constraint in another field."""

    model_config = _BODY

    type: Literal[
        "text", "json_object", "json_schema", "json", "regex", "regex_schema", "grammar", "ebnf",
        "structural_tag",
    ] = Field(description="`text` is free.")  # fmt: skip
    name: str | None = optional("Name of the schema.")
    description: str | None = optional("What the schema is for.")
    strict: bool | None = optional("Refuse a schema that cannot be enforced.")
    json_schema: dict[str, Any] | None = optional(
        "With `json_schema`: an object with the schema in its field `schema`."
    )
    schema_: Annotated[Any, WithJsonSchema({"type": ["object", "boolean", "null"]})] = Field(
        None, alias="schema", description="With `json_schema`, `json_object` or `json`: the schema."
    )
    value: ObjectOrText | None = optional(
        "With `json`, `json_object`, `json_schema`, `regex` or `grammar`: the schema, the expression or the grammar."
    )
    pattern: str | None = optional("With `regex`: the expression.")
    regex: ObjectOrText | None = optional("With `regex`: the expression.")
    regex_schema: str | None = optional("With `regex_schema`: the expression.")
    grammar: str | None = optional("With `grammar`: the grammar, as GBNF or Lark.")
    ebnf: str | None = optional("With `ebnf`: the grammar, as GBNF or Lark.")
    structures: Annotated[list[Structure], Field(min_length=1)] | None = optional(
        "With `structural_tag`."
    )
    triggers: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = (
        optional("With `structural_tag`.")
    )
    format: TagFormat | None = optional("With `structural_tag`.")


class SamplingFields(CommonSamplingFields):
    """The fields that all routes that generate text have in common. Null means the default."""

    model_config = _BODY

    model: str | None = optional("A name of the served model. May be left out; `tgi` is accepted.")
    temperature: Annotated[
        float | None, number("temperature", f"{SMALLEST}. Default: 1", le=MAX_TEMPERATURE)
    ] = None
    top_k: Annotated[int | None, number("top_k", "; 0 and -1 mean all", ge=-1, le=INT32_MAX)] = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = optional(
        "Makes sampling repeatable. Each further completion of a prompt has the next higher seed."
    )
    stop: StopStringList | None = optional("Strings that end the text; they are cut off.")
    include_stop_str_in_output: bool | None = optional(
        "Keep the stop string or stop token at the end of the text."
    )
    min_tokens: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = optional(
        "Minimum number of tokens to generate before an end-of-sequence token, stop token or "
        "stop string ends the text."
    )
    skip_special_tokens: bool | None = optional(
        "Whether special tokens add no text. Default: true."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = optional(
        "Keep only this number of the prompt's last tokens; -1 keeps as many as fit."
    )
    stream: bool | None = optional("Answer with server-sent events.")


class GuidedFields(BaseModel):
    """A constraint on the text, by names that preceded `structured_outputs`."""

    model_config = _BODY

    guided_json: ObjectOrText | None = optional("Older name of `structured_outputs.json`.")
    guided_regex: str | None = optional("Older name of `structured_outputs.regex`.")
    guided_choice: Choice | None = optional("Older name of `structured_outputs.choice`.")
    guided_grammar: str | None = optional("Older name of `structured_outputs.grammar`.")
    guided_whitespace_pattern: str | None = optional(
        "Older name of `structured_outputs.whitespace_pattern`."
    )


class ConstraintFields(GuidedFields):
    """The fields that state a constraint on the text; `constraints` has a row for each."""

    response_format: ResponseFormat | None = optional("The format of the text.")
    structured_outputs: StructuredOutputs | None = optional("A constraint on the text.")
    nvext: GuidedFields | None = optional("The older names, as NVIDIA NIM has them.")
    json_schema: Annotated[ObjectOrText | bool | None, Field(description="A JSON schema.")] = None
    regex: str | None = optional("A regular expression that the text matches.")
    ebnf: str | None = optional("A grammar, as GBNF or Lark.")
    grammar: ObjectOrText | None = optional("A grammar, as GBNF or Lark; or a format.")
    format: ObjectOrText | None = optional("A JSON schema; or `json` for any object.")
    structural_tag: StructuralTag | None = optional("A structural tag.")


class TextFields(SamplingFields, ConstraintFields):
    """The fields that completions and chat have in common."""

    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = optional(
        "Number of completions of each prompt."
    )
    stream_options: StreamOptions | None = optional("Only with `stream`.")
    return_token_ids: bool | None = optional(
        "Report the ids of the prompt's and the generated tokens."
    )
    return_tokens_as_token_ids: bool | None = optional(
        "In log-probabilities, write tokens as `token_id:` and their id."
    )


class CompletionBody(TextFields):
    """Prompts and how to continue them."""

    prompt: PromptField = Field(
        description="One or several prompts, as text or as token ids. Token ids get no BOS token.",
        examples=["def fibonacci(n):"],
    )
    suffix: str | None = optional(
        "Text after the completion: fill in the middle, if the model has tokens for it."
    )
    add_special_tokens: bool | None = optional(
        "Whether a text gets the tokens that the tokenizer adds, such as BOS. Default: true."
    )
    max_tokens: Annotated[int, Field(ge=0, le=UINT32_MAX)] | None = optional(
        "Maximum number of tokens to generate. Default: 16. 0 only with `echo`."
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = optional(
        "Completions to generate for each prompt, of which the `n` with the highest mean "
        "log-probability are returned. Default: `n`."
    )
    echo: bool | None = optional("Put the prompt before the text.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = optional(
        "Report log-probabilities, and this number of most likely tokens at each position."
    )


class ToolFields(BaseModel):
    """The functions that the model may call; null means the default."""

    model_config = _BODY

    tools: list[dict[str, Any]] | None = optional("Functions that the model may call.")
    tool_choice: ObjectOrText | None = optional(
        "Which tools the model calls: `none`, `auto`, `required`, one by name, or `allowed_tools`."
    )
    parallel_tool_calls: bool | None = optional("Whether one reply may call several tools.")


class PredictionText(BaseModel):
    """A part of a predicted answer."""

    type: Literal["text"]
    text: str


class Prediction(BaseModel):
    """What the answer will probably be, in whole or in part."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionText], Field(max_length=MAX_PREDICTION_PARTS)]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(TextFields, ToolFields):
    """A conversation, which the model continues."""

    messages: MessageList = Field(
        description="The conversation.", examples=[[{"role": "user", "content": "Hello"}]]
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = optional(
        "Maximum number of tokens to generate. Default: fills the context."
    )
    max_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = optional(
        "Older name of `max_completion_tokens`."
    )
    logprobs: bool | None = optional("Report log-probabilities.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = optional(
        "Number of most likely tokens to report at each position; requires `logprobs`."
    )
    add_generation_prompt: bool | None = optional(
        "End with the beginning of the assistant's message. Default: true."
    )
    continue_final_message: bool | None = optional(
        "Continue the last message; excludes `add_generation_prompt`."
    )
    echo: bool | None = optional(
        "Put the last message before the text if it is the assistant's, as it is if it is continued."
    )
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Further variables for the chat template."
    )
    chat_template: None = optional("Not supported: null. The model's own template is used.")
    functions: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = optional(
        "Older form of `tools`."
    )
    prediction: Prediction | None = optional(
        "Text that the answer will probably have, such as a file to edit: as far as it does, the answer takes fewer "
        "steps. It changes nothing else. See `speculation`."
    )
    function_call: ObjectOrText | None = optional("Older form of `tool_choice`.")
    modalities: list[Literal["text"]] | None = optional("Kinds of output: text only.")
    audio: None = optional("Not supported: null.")


class TokenizePromptBody(BaseModel):
    """A text to tokenize."""

    model_config = _BODY

    model: str | None = optional("A name of the served model.")
    prompt: str = Field(description="The text.")
    add_special_tokens: bool | None = optional(
        "Whether the text gets the tokens that the tokenizer adds. Default: true."
    )
    return_token_strs: bool | None = optional("Report the names of the tokens in the vocabulary.")


class TokenizeMessagesBody(BaseModel):
    """A conversation to tokenize."""

    model_config = _BODY

    model: str | None = optional("A name of the served model.")
    messages: MessageList = Field(description="The conversation.")
    add_generation_prompt: bool | None = optional(
        "End with the beginning of the assistant's message. Default: true."
    )
    continue_final_message: bool | None = optional(
        "Leave the last message open; excludes `add_generation_prompt`."
    )
    tools: list[dict[str, Any]] | None = optional("Functions that the model may call.")
    tool_choice: ObjectOrText | None = optional("`none` leaves `tools` out of the prompt.")
    chat_template_kwargs: dict[str, Any] | None = optional(
        "Further variables for the chat template."
    )
    chat_template: None = optional("Not supported: null. The model's own template is used.")
    return_token_strs: bool | None = optional("Report the names of the tokens in the vocabulary.")


class DetokenizeBody(BaseModel):
    """Tokens to convert to text."""

    model_config = _BODY

    model: str | None = optional("A name of the served model.")
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = Field(
        description="Token ids."
    )


class TextSettings(BaseModel):
    """How the text of a response is formatted."""

    model_config = _BODY

    format: ResponseFormat | None = optional("The format of the text.")


def _check_items(value: object) -> object:
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    ):
        return value
    raise PydanticCustomError(
        "text_or_items", "must be {expected}", {"expected": "a string or a list of items"}
    )


TextOrItems = Annotated[
    Any,
    BeforeValidator(_check_items),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": MESSAGE_SCHEMA}]}),
]
"""A text, or items of a conversation; `responses_api.input` checks these."""

_TEXT = {"type": "string"}
_CALL_SCHEMA = {
    "type": "object",
    "required": ["type", "call_id", "name", "arguments"],
    "properties": {
        "type": {"const": "function_call"},
        "call_id": _TEXT,
        "name": _TEXT,
        "arguments": {"type": "string", "contentMediaType": "application/json"},
    },
}
_RESULT_SCHEMA = {
    "type": "object",
    "required": ["type", "call_id", "output"],
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": _TEXT,
        "output": {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "input_text"}, "text": _TEXT},
                    },
                },
            ]
        },
    },
}


class ResponseBody(SamplingFields, ConstraintFields, ToolFields):
    """A conversation, which the model continues. Nothing is stored between requests."""

    input: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    {
                        "type": "array",
                        "items": {"anyOf": [MESSAGE_SCHEMA, _CALL_SCHEMA, _RESULT_SCHEMA]},
                        "minItems": 1,
                    },
                ]
            }
        ),
    ] = Field(
        description="A text, or a list of messages, calls of tools and their results.",
        examples=["Hello"],
    )
    instructions: TextOrItems | None = optional(
        "A system message before the input, or a list of items."
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=UINT32_MAX)] | None = optional(
        "Maximum number of tokens to generate. Default: fills the context."
    )
    text: TextSettings | None = optional("How the text is formatted.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = optional(
        "Number of most likely tokens to report at each position."
    )
    include: list[str] | None = optional(
        "What else to report: `message.output_text.logprobs`. Other values have no effect."
    )
    metadata: dict[str, str] | None = optional("Returned with the response.")
    background: OnlyFalse | None = optional("Not supported: null or false.")
    truncation: Literal["auto", "disabled"] | None = optional(
        "`auto` drops the first messages of a conversation that is too long. Default: `disabled`."
    )
    previous_response_id: None = optional("Not supported: null.")
    conversation: None = optional("Not supported: null.")
    prompt: None = optional("Not supported: null. Use `input`.")
