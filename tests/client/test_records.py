"""The client's records and parameters are those of the service."""

import msgspec
import pytest

from server.client import chat_records, parameters, records
from server.http import service_routes
from server.http.dialects.openai import replies as openai
from server.http.dialects.openai.schema import ChatBody
from server.http.dialects.tgi import replies as tgi
from server.http.dialects.tgi.schema import GenerateParameters
from server.http.metrics.usage import RequestUsage

PAIRS = [
    (records.PromptToken, tgi.PromptToken),
    (records.Token, tgi.Token),
    (records.BestOfSequence, tgi.BestOfSequence),
    (records.Details, tgi.Details),
    (records.GenerateReply, tgi.GenerateReply),
    (records.StreamDetails, tgi.StreamDetails),
    (records.StreamEvent, tgi.StreamEvent),
    (records.PromptSpan, tgi.PromptSpan),
    (records.Usage, RequestUsage),
    (records.Health, service_routes.HealthReply),
    (chat_records.CalledFunction, openai.CalledFunction),
    (chat_records.ToolCall, openai.ToolCall),
    (chat_records.ChatMessage, openai.ChatMessage),
    (chat_records.TopLogprob, openai.TopLogprob),
    (chat_records.TokenLogprob, openai.TokenLogprob),
    (chat_records.ChatLogprobs, openai.ChatLogprobs),
    (chat_records.ChatChoice, openai.ChatChoice),
    (chat_records.PromptTokensDetails, openai.PromptTokensDetails),
    (chat_records.CompletionTokensDetails, openai.CompletionTokensDetails),
    (chat_records.ChatUsage, openai.Usage),
    (chat_records.ChatReply, openai.ChatReply),
    (chat_records.ToolCallDelta, openai.ToolCallDelta),
    (chat_records.ChatDelta, openai.ChatDelta),
    (chat_records.ChatChunkChoice, openai.ChatChunkChoice),
    (chat_records.ChatChunk, openai.ChatChunk),
]
LEFT_OUT = {"object", "system_fingerprint", "function_call", "token_ids", "prompt_token_ids"}
"""Constants, an older form of calls, and fields of parameters that the client does not name."""
REFUSED = {"adapter_id", "watermark"}
"""Parameters without an effect."""


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda record: record.__name__)
def test_a_record_has_the_fields_of_the_services(ours, theirs):
    assert set(ours.__struct_fields__) == set(theirs.__struct_fields__) - LEFT_OUT


def test_every_record_is_compared():
    found = {
        record
        for module in (records, chat_records)
        for record in vars(module).values()
        if isinstance(record, type) and issubclass(record, msgspec.Struct)
    }

    assert found == {ours for ours, _ in PAIRS}


def test_the_parameters_of_generate_are_those_of_the_service():
    known = GenerateParameters.model_fields.keys() - REFUSED

    assert parameters.GenerateParameters.__annotations__.keys() == known


def test_the_parameters_of_chat_are_known_to_the_service():
    assert parameters.ChatParameters.__annotations__.keys() <= ChatBody.model_fields.keys()
