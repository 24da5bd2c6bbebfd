"""Renders a conversation with a checkpoint's chat template and encodes it. This module does not import PyTorch.

What the template sees is as in Hugging Face's `apply_chat_template`, and so are the tokens, except that special tokens
in messages stay text (`model.text.special_text`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from model.errors import ChatTemplateError, ChatTemplateLimitError
from model.text.rendering.marks import alternatives
from model.text.rendering.protocol import FUNCTIONS
from model.text.rendering.renderer import (
    RENDERERS,
    RENDERING_ERRORS,
    Allowance,
    Program,
    TemplateFailureError,
    TemplateInvalidError,
    TemplateLimitError,
    TemplateRefusalError,
    rendering,
)
from model.text.special_text import SpecialText, special_tokens
from model.text.template_files import DEFAULT, find_templates, special_variables
from model.text.template_form import PROBE_TOOL, TemplateForm, find_form
from model.text.tokenizer import Tokenizer, TokenSpans
from model.text.tokens.files import read_tokenizer_files
from model.text.tokens.turn import Turn, find_turn
from model.text.tools.arguments import read_arguments

LOADING_SECONDS: Final = 5.0
"""Processor time for compiling the templates of a checkpoint and trying them on short conversations."""
_MAX_MESSAGE = 500
_WITH_TOOLS: Final = "tool_use"
_ROLES: Final = (
    "system", "user", "assistant", "tool", "developer", "function", "ipython", "observation",
)  # fmt: skip
_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt"})
_PROBE: Final = "Zebra"

Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation.

    Attributes:
        marked: the text, with marks instead of the special tokens that the template wrote.
    """

    marked: str
    _special: SpecialText

    @property
    def text(self) -> str:
        """The text; special tokens of the template and of messages look alike in it."""
        return self._special.unmark(self.marked)

    def encode(self) -> list[int]:
        """Return the token ids; only special tokens that the template wrote are special.

        Raises:
            TokenizerError: the text cannot be encoded.
        """
        return self._special.encode(self.marked)

    def encode_with_offsets(self) -> tuple[str, TokenSpans]:
        """Return the text and its tokens with the characters that each stands for; otherwise like `encode`."""
        return self._special.encode_with_offsets(self.marked)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that is ready to be rendered.

    Attributes:
        finish: makes the result of the text that the processes return.
    """

    finish: Callable[[str], RenderedChat]
    _program: Program
    _task: bytes
    _describe: Callable[[Exception], ChatTemplateError]

    async def render(self) -> str:
        """Return the text for `finish`; the event loop does other work meanwhile.

        Raises:
            Exception: as `ChatTemplate.render`.
        """
        try:
            return await RENDERERS.render_on_loop(self._program, self._task, Allowance())
        except RENDERING_ERRORS as error:
            raise self._describe(error) from None

    def render_in_thread(self) -> str:
        """Return the same; the thread waits."""
        try:
            return RENDERERS.do(self._program, self._task, Allowance())
        except RENDERING_ERRORS as error:
            raise self._describe(error) from None


class ChatTemplate:
    """The chat templates of a checkpoint, compiled. Immutable, and therefore thread-safe.

    They run in the processes of `model.text.rendering.renderer`.

    Args:
        templates: Jinja source by name: `default`, and `tool_use` for conversations with tools if it is there.
        tokenizer: the checkpoint's tokenizer.
        tokens: further variables for the templates: the checkpoint's special tokens by role, such as `bos_token`.

    Attributes:
        sources: Jinja source of each template.
        form: of the template for conversations without tools.
        form_with_tools: of the template for conversations with tools, when it is given some.
        reads_parts: whether every template reads content that is a list of parts.
        turn: the tokens in the assistant's turns, those of conversations without tools.

    Raises:
        ChatTemplateError: a template cannot be compiled or used.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        tokenizer: Tokenizer,
        tokens: Mapping[str, object] | None = None,
    ) -> None:
        if DEFAULT not in templates:
            raise ChatTemplateError(
                f"no chat template is named {DEFAULT!r}; there are: {', '.join(sorted(templates))}"
            )
        self.sources = tuple(templates.values())
        tokens = dict(tokens or {})
        for name, text in (("bos_token", tokenizer.bos_token), ("eos_token", tokenizer.eos_token)):
            if text is not None:
                tokens.setdefault(name, text)
        known = special_tokens(tokenizer)
        allowance = Allowance(LOADING_SECONDS)
        written = "\0".join(
            text
            for source in templates.values()
            for text in (source, *_probe(_Trial(Program(source), tokens, allowance)))
        )
        everything = "\0".join((written, *_texts(tokens)))
        self._special = SpecialText(tokenizer, [text for text in known if text in everything])
        self._tokens = _map_texts(tokens, self._special.mark)
        self._templates = {
            name: _Template(_Trial(Program(source, self._special.marks), self._tokens, allowance))
            for name, source in templates.items()
        }
        # A special token that is not marked is made of pieces, such as '<|' + role + '|>'.
        marked = "\0".join(
            text for template in self._templates.values() for text in _probe(template.trial)
        )
        self._composed = tuple(text for text in known if len(text) > 1 and text in marked)
        self._find_composed = alternatives(self._composed)
        self.reads_parts = all(template.reads_parts for template in self._templates.values())
        self.form = self._templates[DEFAULT].find_form(None)
        self.turn = self._find_turn(tokenizer)
        self.form_with_tools = self._templates[self._name(tools=True)].find_form([PROBE_TOOL])

    @classmethod
    def from_folder(
        cls, path: Path | str, tokenizer: Tokenizer, source: str | None = None
    ) -> ChatTemplate | None:
        """Read the templates of a checkpoint.

        Args:
            path: the checkpoint.
            tokenizer: the checkpoint's tokenizer.
            source: a template that takes the place of the checkpoint's.

        Returns:
            None if there is no template.

        Raises:
            ChatTemplateError: a file is damaged, or a template cannot be used.
        """
        folder = Path(path)
        config = read_tokenizer_files(folder, ChatTemplateError).config
        templates = find_templates(folder, config) if source is None else {DEFAULT: source}
        return cls(templates, tokenizer, special_variables(config)) if templates else None

    def render(self, messages: Sequence[Message], **options: Any) -> RenderedChat:  # noqa: ANN401 - those of `prepare`
        """Render a conversation; the thread waits.

        Args:
            messages: as for `prepare`.
            options: likewise.

        Raises:
            ChatTemplateError: the template cannot render these messages; the message names the place.
            RenderingUnavailableError: no process could render them.
        """
        conversation = self.prepare(messages, **options)
        return conversation.finish(conversation.render_in_thread())

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> Conversation:
        """Make a conversation ready to be rendered.

        Args:
            messages: plain JSON values; each has a `role`, most have `content`, a text or a list of parts of type
                `text`.
            tools: definitions of tools, as in the OpenAI API.
            add_generation_prompt: whether to end with the beginning of the assistant's next message.
            continue_final_message: whether to leave the last message open, so that the model continues it.
            variables: further variables for the template, such as `documents` or `enable_thinking`.

        Raises:
            ChatTemplateError: the messages or variables cannot be rendered; the message names the place.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError(
                "`add_generation_prompt` and `continue_final_message` exclude each other"
            )
        for name in variables or ():
            if name in _RESERVED or name in FUNCTIONS or not name.isidentifier():
                raise ChatTemplateError(
                    f"`{_printable(name, 60)}` cannot be a variable of the chat template"
                )
        template = self._templates[self._name(tools=bool(tools))]
        adapted = [
            template.adapt(message, f"messages.{number}") for number, message in enumerate(messages)
        ]
        if not adapted:
            raise ChatTemplateError("`messages` cannot be empty")
        if continue_final_message:
            adapted[-1] = _with_end(adapted[-1], f"{self._special.end} ", len(adapted) - 1)
        given: dict[str, Any] = {
            "messages": adapted,
            "tools": list(tools) if tools else None,
            **(variables or {}),
        }
        if self._composed:
            _check_roles(adapted)
            roles = [message["role"] for message in adapted]
            given = _map_texts(given, self._break)
            for message, role in zip(given["messages"], roles, strict=True):
                message["role"] = role
        given = {"documents": None, **self._tokens, **given}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            task = rendering(template.program, given)
        except TemplateFailureError as error:
            raise self._describe(error) from None
        finish = functools.partial(self._finish, is_continued=continue_final_message)
        return Conversation(finish, template.program, task, self._describe)

    def _finish(self, text: str, *, is_continued: bool) -> RenderedChat:
        if is_continued:
            text = _cut(text, self._special.end)
        if self._composed:
            text = self._find_composed.sub(lambda found: self._special.mark(found[0]), text)
            text = text.replace(self._special.breaker, "")
        return RenderedChat(text, self._special)

    def _find_turn(self, tokenizer: Tokenizer) -> Turn:
        template = self._templates[DEFAULT]

        def render(messages: Sequence[Message], is_prompt: bool) -> str:
            adapted = [template.adapt(message, "") for message in messages]
            marked = template.trial.render(adapted, add_generation_prompt=is_prompt)
            return self._special.unmark(marked)

        added = tokenizer.library.get_added_tokens_decoder().values()
        ends = map(tokenizer.token_name, tokenizer.ends)
        return find_turn(render, {*ends, *(token.content for token in added)})

    def _name(self, *, tools: bool) -> str:
        """Return the name of the template for conversations with or without tools."""
        return _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else DEFAULT

    def _describe(self, error: Exception) -> ChatTemplateError:
        """Return what an error of a rendering means for the conversation."""
        if isinstance(error, TemplateLimitError):
            return ChatTemplateLimitError(f"`messages`: the chat template reached a limit: {error}")
        what = "rejects the conversation" if isinstance(error, TemplateRefusalError) else "fails"
        return ChatTemplateError(f"`messages`: the chat template {what}: {self._printable(error)}")

    def _printable(self, error: Exception) -> str:
        return _printable(self._special.unmark(str(error)).replace(self._special.breaker, ""))

    def _break(self, text: str) -> str:
        """Break what could become a token that the template makes of pieces."""
        for token in self._composed:
            head, tail = re.escape(token[0]), re.escape(token[-1])
            text = re.sub(
                f"{head}(?={re.escape(token[1])}|$)", token[0] + self._special.breaker, text
            )
            text = re.sub(
                f"(?:(?<={re.escape(token[-2])})|^){tail}", self._special.breaker + token[-1], text
            )
            if text and text in token[1:-1]:
                text = self._special.breaker + text
        return text


@dataclass(frozen=True, slots=True)
class _Trial:
    """Renders short conversations with a template, to find out what it does.

    Args:
        program: the template, which is compiled.
        tokens: special tokens by role.
        allowance: of all templates of the checkpoint.

    Raises:
        ChatTemplateError: the template cannot be compiled.
        ChatTemplateLimitError: it reaches a limit.
    """

    program: Program
    tokens: Mapping[str, object]
    allowance: Allowance

    def __post_init__(self) -> None:
        """Compile the template."""
        try:
            RENDERERS.compile(self.program, self.allowance)
        except TemplateInvalidError as error:
            problem = _printable(str(error))
        except TemplateLimitError as error:
            problem = str(error)
        else:
            return
        raise ChatTemplateError(f"the chat template cannot be compiled: {problem}")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return what the template makes of messages; empty if it rejects them.

        Raises:
            ChatTemplateLimitError: it reaches a limit even here.
        """
        given = {"messages": messages, "tools": tools, "documents": None}
        try:
            return RENDERERS.render(
                self.program,
                {**self.tokens, **given, "add_generation_prompt": add_generation_prompt},
                self.allowance,
            )
        except TemplateLimitError as error:
            raise ChatTemplateLimitError(
                f"the chat template reaches a limit for one short message: {error}"
            ) from None
        except (TemplateRefusalError, TemplateFailureError):
            return ""


class _Template:
    """One compiled template, and the forms of messages that it understands.

    Attributes:
        program: the template.
        trial: renders short conversations with it.
        reads_parts: whether it reads content that is a list of parts.
    """

    def __init__(self, trial: _Trial) -> None:
        self.program, self.trial = trial.program, trial
        as_text, as_parts = (
            _renders(trial, content) for content in (_PROBE, [{"type": "text", "text": _PROBE}])
        )
        self.reads_parts = as_parts
        self._texts = as_text or not as_parts
        self._object_arguments = False

    def find_form(self, tools: Sequence[Mapping[str, object]] | None) -> TemplateForm:
        """Return what the template does with messages beside these tools; called before `adapt`."""

        def render(
            messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = tools
        ) -> str:
            return self.trial.render([self.adapt(message, "") for message in messages], tools)

        self._object_arguments = False
        form = find_form(render, functools.partial(render, tools=None) if tools else None)
        self._object_arguments = form.object_arguments
        return form

    def adapt(self, message: Message, place: str) -> dict[str, Any]:
        """Return a message with `content` in a form that the template understands.

        Raises:
            ChatTemplateError: it has no role, or parts that are not text.
        """
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"`{place}` must be an object")
        adapted = dict(message)
        if not isinstance(adapted.get("role"), str):
            raise ChatTemplateError(f"`{place}.role` is required, and must be a string")
        content = adapted.get("content")
        if isinstance(content, list | tuple):
            texts = [_part_text(part, f"{place}.content.{i}") for i, part in enumerate(content)]
            if not self.reads_parts:
                adapted["content"] = "\n".join(texts)
        elif isinstance(content, str):
            if not self._texts:
                adapted["content"] = [{"type": "text", "text": content}]
        elif content is not None:
            raise ChatTemplateError(f"`{place}.content` must be a string or a list of parts")
        calls = adapted.get("tool_calls")
        if isinstance(calls, list | tuple):
            if self._object_arguments:
                adapted["tool_calls"] = [_with_arguments(call) for call in calls]
        elif calls is None:
            adapted.pop("tool_calls", None)
        return adapted


def _probe(trial: _Trial) -> Iterator[str]:
    """Render short conversations with every usual role; those that the template rejects are left out."""
    user: Message = {"role": "user", "content": _PROBE}
    conversations: list[list[Message]] = [
        [user],
        [user, {"role": "assistant", "content": _PROBE}, user],
    ]
    for role in _ROLES:
        message: Message = {"role": role, "content": _PROBE}
        conversations += [[message, user], [user, message]]
    for messages in conversations:
        yield trial.render(messages)


def _renders(trial: _Trial, content: object) -> bool:
    """Return whether a template writes the probe's text, and not a Python list."""
    text = trial.render([{"role": "user", "content": content}])
    return _PROBE in text and "'type'" not in text and '"type"' not in text


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON values
    """Return a JSON value with every text and key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value


def _part_text(part: object, place: str) -> str:
    """Return the text of a part of `content`.

    Raises:
        ChatTemplateError: it is of another type.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ChatTemplateError(f"`{place}` must be an object")
    kind, text = part.get("type", "text"), part.get("text")
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise ChatTemplateError(
            f"`{place}` must have the type `text` and a text: this model reads nothing else"
        )
    return text


def _with_arguments(call: object) -> object:
    """Return a tool call whose arguments are an object, as templates expect, not JSON in a string."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    arguments = read_arguments(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}}


def _with_end(message: Mapping[str, Any], end: str, number: int) -> dict[str, Any]:
    """Return a message with `end` after its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + end}
    if isinstance(content, list | tuple) and content and isinstance(content[-1], Mapping):
        last = {**content[-1], "text": content[-1]["text"] + end}
        return {**message, "content": [*content[:-1], last]}
    raise ChatTemplateError(f"`messages.{number}.content` has no text to continue")


def _cut(text: str, end: str) -> str:
    """Return a text up to `end`; if a template has removed the space after it, without space at the end."""
    place = text.rfind(end)
    if place < 0:
        raise ChatTemplateError("`messages`: the chat template does not write the last message")
    kept = text[:place]
    return kept if text.startswith(" ", place + len(end)) else kept.rstrip()


def _check_roles(messages: Iterable[Message]) -> None:
    """Check the roles for a template that makes special tokens of them."""
    for number, message in enumerate(messages):
        if message["role"] not in _ROLES:
            raise ChatTemplateError(
                f"`messages.{number}.role` must be one of {', '.join(_ROLES)}: the chat template makes "
                "a special token of it"
            )


def _printable(text: str, limit: int = _MAX_MESSAGE) -> str:
    """Return the printable characters of a text on one line, cut."""
    return "".join(c if c.isprintable() else " " for c in text[:limit])
