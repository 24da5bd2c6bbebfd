"""A client of a running service, for programs in Python: typed, synchronous or asynchronous.

It covers Tessera's own routes and chat. For the rest of the OpenAI and Anthropic APIs, their own clients work.
"""

from server.client.async_client import AsyncClient
from server.client.chat_records import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    ChatUsage,
    PromptTokensDetails,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from server.client.errors import (
    ServiceConnectionError,
    ServiceError,
    ServiceStatusError,
    ServiceTimeoutError,
)
from server.client.parameters import ChatParameters, GenerateParameters
from server.client.records import (
    BestOfSequence,
    Details,
    GenerateReply,
    Health,
    PromptSpan,
    PromptToken,
    StreamDetails,
    StreamEvent,
    Token,
    Usage,
)
from server.client.streams import AsyncStream, Stream
from server.client.sync_client import Client
from server.engine.core.plan_report import PlanReport

__all__ = [
    "Client", "AsyncClient", "Stream", "AsyncStream", "ServiceError", "ServiceStatusError",
    "ServiceConnectionError", "ServiceTimeoutError", "GenerateParameters", "ChatParameters", "GenerateReply",
    "Details", "BestOfSequence", "PromptToken", "Token", "StreamEvent", "StreamDetails", "Usage", "PromptSpan",
    "ChatReply", "ChatChoice", "ChatMessage", "ToolCall", "CalledFunction", "ChatUsage", "PromptTokensDetails",
    "ChatLogprobs", "TokenLogprob", "TopLogprob", "ChatChunk", "ChatChunkChoice", "ChatDelta", "ToolCallDelta",
    "Health", "PlanReport",
]  # fmt: skip
