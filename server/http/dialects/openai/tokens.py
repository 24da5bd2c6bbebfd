"""vLLM's forms of /tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from server.errors import UnknownModelError
from server.http.context import check_vocabulary
from server.http.dialects.openai.errors import render_error, status_of
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.replies import (
    DetokenizeReply,
    OpenAIErrorReply,
    TokenizeReply,
)
from server.http.dialects.openai.schema import (
    DetokenizeBody,
    TokenizeMessagesBody,
    TokenizePromptBody,
)
from server.http.messages import encode_conversation, read_messages
from server.http.token_routes import TokenForm

if TYPE_CHECKING:
    from server.http.context import AppContext

ReplyT = TypeVar("ReplyT")
_Answer: TypeAlias = tuple[ReplyT, tuple[str, ...]]


async def _tokenize_prompt(context: AppContext, body: object) -> _Answer[TokenizeReply]:
    request, warnings = parse_body(TokenizePromptBody, body, context.config)
    add = request.add_special_tokens is not False
    token_ids = await context.tokenize(
        request.prompt, "prompt", lambda: context.tokenizer.encode(request.prompt, add)
    )
    return _reply(context, token_ids, names=bool(request.return_token_strs)), warnings


async def _tokenize_messages(context: AppContext, body: object) -> _Answer[TokenizeReply]:
    request, warnings = parse_body(TokenizeMessagesBody, body, context.config)
    token_ids = await encode_conversation(
        context,
        read_messages(request.messages),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
    )
    return _reply(context, token_ids, names=bool(request.return_token_strs)), warnings


def _reply(context: AppContext, token_ids: list[int], *, names: bool) -> TokenizeReply:
    return TokenizeReply(
        count=len(token_ids),
        max_model_len=context.engine_info().max_total_tokens,
        tokens=token_ids,
        token_strs=[context.tokenizer.token_name(i) for i in token_ids] if names else None,
    )


async def _detokenize(context: AppContext, body: object) -> _Answer[DetokenizeReply]:
    request, warnings = parse_body(DetokenizeBody, body, context.config)
    if request.tokens:
        check_vocabulary(request.tokens, "tokens", context.engine_info())
    text = await context.tokenize(
        request.tokens,
        "tokens",
        lambda: context.tokenizer.decode(request.tokens, skip_special_tokens=False),
    )
    return DetokenizeReply(text), warnings


TOKEN_FORMS = (
    TokenForm(
        endpoint="tokenize",
        keys=("messages",),
        body=TokenizeMessagesBody,
        reply=TokenizeReply,
        error_reply=OpenAIErrorReply,
        answer=_tokenize_messages,
        render_error=render_error,
        status_of=status_of,
        errors=(UnknownModelError,),
    ),
    TokenForm(
        endpoint="tokenize",
        keys=("prompt",),
        body=TokenizePromptBody,
        reply=TokenizeReply,
        error_reply=OpenAIErrorReply,
        answer=_tokenize_prompt,
        render_error=render_error,
        status_of=status_of,
        errors=(UnknownModelError,),
    ),
    TokenForm(
        endpoint="detokenize",
        keys=("tokens",),
        body=DetokenizeBody,
        reply=DetokenizeReply,
        error_reply=OpenAIErrorReply,
        answer=_detokenize,
        render_error=render_error,
        status_of=status_of,
        errors=(UnknownModelError,),
    ),
)
