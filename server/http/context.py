"""State that all routes share: engine client, tokenizer, limits, admission and metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from model.errors import ChatTemplateError, ChatTemplateLimitError, TokenizerError
from model.text.rendering.renderer import RenderingUnavailableError
from model.text.special_text import MARK_BYTES
from model.text.token_length import longest_token
from model.text.tools.conversation import fit_conversation
from model.text.tools.formats import find_format
from server.engine.link.front_end.client import EngineHandle, EngineUnavailableError
from server.engine.link.protocol import EngineState
from server.errors import PromptTooLongError, StoppingError, UnavailableError, ValidationError
from server.http.adapters.table import AdapterTable
from server.http.body.validation import describe
from server.http.load.admission import Admission
from server.http.load.load_shedding import LoadShedding
from server.http.load.paced_refusals import PacedRefusals
from server.http.reply.receipts import WeightsDigest
from server.http.request_id import current_request
from server.http.text.chat_renderer import ChatRenderer
from server.http.text.grammar_compiler import GrammarCompiler
from server.http.text.tokenizing import TokenizerThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Sized

    from model.text.chat_template import ChatTemplate, Conversation, RenderedChat
    from model.text.tokenizer import Tokenizer
    from server.engine.core.messages import EngineInfo
    from server.engine.core.request import GenerateRequest
    from server.engine.link.front_end.request_stream import RequestStream
    from server.http.config import HTTPConfig
    from server.http.lifecycle import Lifecycle
    from server.http.metrics.registry import Metrics

ResultT = TypeVar("ResultT")

log = logging.getLogger("tessera")

# A phase is free text and may be long after a failed start.
_MAX_PHASE_CHARACTERS = 200
_MAX_UTF8_BYTES = 4


class AppContext:
    """Owns the threads that tokenize and render, and the grammar compiler. Used only on the event loop.

    Args:
        client: the engine's client.
        tokenizer: the model's tokenizer.
        config: limits and intervals.
        metrics: the service's metrics.
        lifecycle: the stage of this front end.
        chat_template: the model's chat template; None if it has none.
    """

    def __init__(
        self,
        client: EngineHandle,
        tokenizer: Tokenizer,
        config: HTTPConfig,
        metrics: Metrics,
        lifecycle: Lifecycle,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.client = client
        client.restart_queue.seconds = config.restart_wait
        self.tokenizer = tokenizer
        self.config = config
        self.metrics = metrics
        self.adapters = AdapterTable(config, client)
        self.shedding = LoadShedding(client, config, metrics.clients)
        self.lifecycle = lifecycle
        self.chat_template = chat_template
        templates = () if chat_template is None else chat_template.sources
        self.tool_format = find_format(config.tool_call_format, templates, tokenizer)
        self.refusals = PacedRefusals(metrics.clients)
        self.admission = Admission(config, metrics, self.shedding.retry_after, self.refusals.note)
        self.grammars = GrammarCompiler(str(tokenizer.folder), config.eos_token_ids)
        self.weights = WeightsDigest(config.checkpoint)
        self._longest_token = longest_token(tokenizer.library)
        # Elsewhere the event loop would wait for another process.
        self._inline_characters = config.inline_characters if tokenizer.is_linear else -1
        self._workers = TokenizerThreads(config.validation_workers, tokenizer.growth)
        self._chat_renderer = ChatRenderer(self._workers)
        self._has_logged_limit = False

    def close(self) -> None:
        """End the threads and processes; no request may follow."""
        self.adapters.close()
        self._workers.close()
        self.tokenizer.close()
        self._chat_renderer.close()
        self.grammars.close()

    def engine_info(self) -> EngineInfo:
        """Return the facts that the running engine reported, or the last one while requests wait for the next one.

        Raises:
            UnavailableError: the engine is not ready, and requests do not wait for it.
        """
        if self.client.info is None or not self.client.takes_requests:
            raise self.unavailable()
        return self.client.info

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Submit a request to the engine; it waits while the engine is being started again.

        Raises:
            UnavailableError: the engine is not ready, and the request cannot wait for it.
        """
        try:
            return self.client.submit(request)
        except EngineUnavailableError:
            raise self.unavailable() from None

    @property
    def reads_parts(self) -> bool:
        """Whether the chat template reads content that is a list of parts."""
        return self.chat_template is not None and self.chat_template.reads_parts

    @property
    def is_ready(self) -> bool:
        """Whether requests should be sent here: the engine is ready, and the service is not about to end."""
        return self.client.state is EngineState.READY and not self.lifecycle.is_draining

    def unavailable(self) -> UnavailableError:
        """Make the error that reports the engine's state and phase."""
        if self.lifecycle.is_draining:
            return StoppingError()
        return UnavailableError(
            f"the model is not ready: {self.client.state.value}, {self.phase()}"
        )

    def phase(self) -> str:
        """Return the engine's current phase on one line."""
        return " ".join(self.client.phase.split())[:_MAX_PHASE_CHARACTERS]

    async def encode(
        self, text: str, field: str, *, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        """Tokenize a prompt.

        Args:
            text: the prompt.
            field: the request's field that holds it, for error messages.
            add_special_tokens: whether to add the tokens that the tokenizer adds to every text, such as BOS.
            most: limit of tokens. A text that certainly has more is refused without being tokenized; the caller checks
                the tokens. None for no limit.

        Raises:
            ValidationError: the prompt cannot be tokenized, or has no tokens.
        """
        if most is not None and len(text) > self.config.inline_characters:
            self._check_length(text, field, most, self._longest_token)
        token_ids = await self.tokenize(
            text, field, lambda: self.tokenizer.encode(text, add_special_tokens)
        )
        if not token_ids:
            raise ValidationError(f"`{field}` has no tokens")
        return token_ids

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Render a conversation with the model's chat template and tokenize it.

        Args:
            messages: from `server.http.text.messages.read_messages`.
            tools: definitions of tools, as in the OpenAI API.
            add_generation_prompt: whether to end with the beginning of the assistant's next message.
            continue_final_message: whether to leave the last message open, so that the model continues it.
            variables: further variables for the template.
            most: limit of tokens, as for `encode`.

        Raises:
            ValidationError: the model has no chat template, or the template rejects the messages.
        """
        longest = self._longest_token and max(self._longest_token, MARK_BYTES)

        def encode(rendered: RenderedChat) -> list[int]:
            if most is not None:
                self._check_length(rendered.marked, "messages", most, longest)
            return rendered.encode()

        token_ids = await self.convert_chat(
            encode,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        if not token_ids:
            raise ValidationError("`messages` has no tokens")
        return token_ids

    async def convert_chat(
        self,
        convert: Callable[[RenderedChat], ResultT],
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        **options: Any,  # noqa: ANN401 - those of `ChatTemplate.prepare`
    ) -> ResultT:
        """Render a conversation and pass it to a function, as `tokenize` does; otherwise like `encode_chat`.

        Messages and tools are fitted to the template first. The event loop never waits for a template.

        Raises:
            ValidationError: as `encode_chat`.
            UnavailableError: no process could render the conversation.
        """
        template = self.chat_template
        if template is None:
            raise ValidationError(
                "`messages`: the model has no chat template; start the server with --chat-template, or use a prompt"
            )

        def prepare() -> Conversation:
            forms = template.form, template.form_with_tools
            fitted, definitions = fit_conversation(messages, tools, forms, self.tool_format)
            return template.prepare(fitted, tools=definitions, **options)

        try:
            conversation, text = await self._chat_renderer.render(
                prepare, (messages, tools, options), current_request().client
            )
            return await self.tokenize(text, "messages", lambda: convert(conversation.finish(text)))
        except ChatTemplateError as error:
            if isinstance(error, ChatTemplateLimitError) and not self._has_logged_limit:
                self._has_logged_limit = True
                log.warning("a conversation is refused, and so will others be: %s", error)
            raise ValidationError(str(error)) from None
        except RenderingUnavailableError as error:
            log.error("%s", error)
            raise UnavailableError(str(error)) from None

    async def encode_words(self, words: Sequence[str], field: str) -> tuple[tuple[int, ...], ...]:
        """Tokenize each word twice: at the beginning of a text and after a space.

        Args:
            words: the words.
            field: the request's field that holds them, for error messages.

        Returns:
            The distinct sequences of token ids.

        Raises:
            ValidationError: a word cannot be tokenized, or has no tokens.
        """
        found: dict[tuple[int, ...], None] = {}
        for i, word in enumerate(words):
            bare = word.removeprefix(" ")
            texts = [text for text in (bare, f" {bare}") if text]

            def work(texts: list[str] = texts) -> list[list[int]]:
                return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

            encoded = await self.tokenize(word, f"{field}.{i}", work)
            if not any(encoded):
                raise ValidationError(f"`{field}.{i}` has no tokens")
            found |= {tuple(ids): None for ids in encoded if ids}
        return tuple(found)

    async def tokenize(self, text: Sized, field: str, work: Callable[[], ResultT]) -> ResultT:
        """Call a function that tokenizes a text, or decodes tokens, in a thread if there are many.

        Args:
            text: the text that the function tokenizes, or the tokens that it decodes.
            field: the request's field that holds it, for error messages.
            work: the function; must not use state that the event loop changes.

        Raises:
            ValidationError: the text cannot be tokenized, or the tokens cannot be decoded.
        """
        try:
            if len(text) <= self._inline_characters:
                return work()
            size = len(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
            return await self._workers.run(work, size, current_request().client)
        except TokenizerError as error:
            raise ValidationError(f"`{field}` cannot be tokenized: {error}") from None

    def _check_length(self, text: str, field: str, most: int, longest: int | None) -> None:
        """Check that a text may have at most `most` tokens; may be called in a thread.

        Args:
            text: the text.
            field: the request's field that holds it, for error messages.
            most: limit of tokens.
            longest: bytes that one token can stand for; None if that is not known.

        Raises:
            ValidationError: it has more.
        """
        if longest is None or len(text) * _MAX_UTF8_BYTES <= most * longest:
            return
        least = -(-len(text.encode("utf-8", "surrogatepass")) // longest)
        if least > most:
            raise PromptTooLongError(
                f"`{field}` must have at most {most} tokens. Given: at least {least} tokens",
                least,
                most,
            )


def check_vocabulary(token_ids: list[int], field: str, info: EngineInfo) -> None:
    """Check that every token of a prompt is in the model's vocabulary.

    Raises:
        ValidationError: a token is not.
    """
    if (largest := max(token_ids)) >= info.vocab_size:
        raise ValidationError(
            f"`{field}` has a token that the model does not know: its vocabulary has "
            f"{info.vocab_size} tokens. Given: token {describe(largest)}"
        )
