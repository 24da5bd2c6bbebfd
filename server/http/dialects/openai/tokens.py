"""vLLM's forms of /tokenize and /detokenize."""

from __future__ import annotations

import functools
from array import array
from typing import TYPE_CHECKING

from model.text.detokenizer import IncrementalDetokenizer
from server.errors import UnknownModelError
from server.http.context import AppContext, check_vocabulary
from server.http.dialects.openai.errors import render_error, status_of
from server.http.dialects.openai.fields import parse_body
from server.http.dialects.openai.replies import DetokenizeReply, OpenAIErrorReply, TokenizeReply
from server.http.dialects.openai.schema import (
    DetokenizeBody,
    TokenizeMessagesBody,
    TokenizePromptBody,
)
from server.http.text.messages import encode_conversation, offered_tools, read_messages
from server.http.token_replies import TokenReply, array_pieces, text_pieces
from server.http.token_routes import TokenForm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from model.text.tokenizer import Tokenizer

# Tokens that are decoded at a time; takes less than a millisecond.
_DECODED = 500


async def _tokenize_prompt(context: AppContext, body: object) -> TokenReply:
    request, warnings = parse_body(TokenizePromptBody, body, context)
    add = request.add_special_tokens is not False
    token_ids = await context.tokenize(
        request.prompt, "prompt", lambda: array("I", context.tokenizer.encode(request.prompt, add))
    )
    return _reply(context, token_ids, warnings, names=bool(request.return_token_strs))


async def _tokenize_messages(context: AppContext, body: object) -> TokenReply:
    request, warnings = parse_body(TokenizeMessagesBody, body, context)
    token_ids = await encode_conversation(
        context,
        read_messages(request.messages, parts=context.reads_parts),
        tools=offered_tools(request.tools, request.tool_choice),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        variables=request.chat_template_kwargs,
    )
    return _reply(context, array("I", token_ids), warnings, names=bool(request.return_token_strs))


def _reply(
    context: AppContext, token_ids: array[int], warnings: tuple[str, ...], *, names: bool
) -> TokenReply:
    longest = context.engine_info().max_total_tokens
    return TokenReply(
        _pieces(token_ids, longest, context.tokenizer if names else None),
        token_ids.itemsize * len(token_ids),
        warnings,
    )


def _pieces(
    token_ids: array[int], max_model_len: int, tokenizer: Tokenizer | None
) -> Iterator[bytes]:
    """Render a `TokenizeReply`; with the names of the tokens if the tokenizer is given."""
    yield b'{"count":%d,"max_model_len":%d,"tokens":' % (len(token_ids), max_model_len)
    yield from array_pieces(token_ids, list)
    yield b',"token_strs":'
    if tokenizer is None:
        yield b"null"
    else:
        yield from array_pieces(token_ids, lambda ids: [tokenizer.token_name(i) for i in ids])
    yield b"}"


async def _detokenize(context: AppContext, body: object) -> TokenReply:
    request, warnings = parse_body(DetokenizeBody, body, context)
    if request.tokens:
        check_vocabulary(request.tokens, "tokens", context.engine_info())
    return TokenReply(_text_pieces(array("I", request.tokens), context.tokenizer), 0, warnings)


def _text_pieces(token_ids: array[int], tokenizer: Tokenizer) -> Iterator[bytes]:
    """Render a `DetokenizeReply`."""
    yield b'{"prompt":'
    yield from text_pieces(_texts(token_ids, tokenizer))
    yield b"}"


def _texts(token_ids: array[int], tokenizer: Tokenizer) -> Iterator[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    for i in range(0, len(token_ids), _DECODED):
        yield "".join([detokenizer.push(token_id) for token_id in token_ids[i : i + _DECODED]])
    yield detokenizer.flush()


_form = functools.partial(
    TokenForm,
    error_reply=OpenAIErrorReply,
    render_error=render_error,
    status_of=status_of,
    errors=(UnknownModelError,),
)
TOKEN_FORMS = (
    _form(
        endpoint="tokenize", keys=("messages",), body=TokenizeMessagesBody, reply=TokenizeReply,
        answer=_tokenize_messages,
    ),
    _form(
        endpoint="tokenize", keys=("prompt",), body=TokenizePromptBody, reply=TokenizeReply,
        answer=_tokenize_prompt,
    ),
    _form(
        endpoint="detokenize", keys=("tokens",), body=DetokenizeBody, reply=DetokenizeReply,
        answer=_detokenize,
    ),
)  # fmt: skip
