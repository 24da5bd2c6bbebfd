"""Structured output: compiles constraints to grammars, and computes which tokens a grammar allows next.

The only module that uses llguidance, which is a library without dependencies. It does not import PyTorch, because the
front ends check constraints with it. Several of llguidance's algorithms recurse or run without a limit, so a constraint
that a client sent is compiled first in a process that may end (`server.http.text.grammar_worker`). Afterwards the
engine compiles the same text with the same limits.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from model.errors import GrammarError
from model.sampling.followed_matcher import NO_RULES, FollowedMatcher, MatcherRules
from model.text.lark import JSON_OPTIONS, check_size, json_rule, pattern, quote
from model.text.schema.lower import LEVELS, Unenforced
from model.text.schema.modern import Schema
from model.text.schema.reduce import describe, lower
from model.text.structural_tag import Languages, tag_grammar
from model.text.tokenizer import Tokenizer
from model.text.tools.translate import Constrained, TranslatedTools, translate_tools

WORD_BITS: Final = 32

Words = npt.NDArray[np.int32]

# An eighth to a half of the library's defaults. With them the most costly pattern known, ((x{1000}){1000}){1000}, takes
# 0.4 s instead of 2 s. A lexer state takes 1 to 2 kB.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=25_000,
    step_max_items=25_000,
    max_lexer_states=25_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
SERIALIZED: Final = "serialized"
"""Kind of a constraint that is a grammar in the library's own format, as `Translation.grammar` has it."""
_TRIAL_TOKENS: Final = 16
_TRIAL_SECONDS: Final = 0.2
_MAX_REASON_CHARACTERS: Final = 300


class GrammarTokenizer:
    """A checkpoint's vocabulary in the form in which grammars are matched against it. Immutable.

    Building one takes 25 ms for 4,096 tokens and about a second for 150,000, so each process builds it once.

    Args:
        tokenizer: the checkpoint's tokenizer.
        vocab_size: number of the model's logits; ids without a token are never allowed.
        eos_token_ids: end the output where the grammar allows it, as do those that the tokenizer's files name.

    Attributes:
        num_words: 32-bit words of a mask; covers the vocabularies of the model and of the tokenizer.
        eos_token_ids: see above, all of them.

    Raises:
        GrammarError: the tokenizer is of a kind that the library does not support.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        size = max(vocab_size, tokenizer.vocab_size)
        ids = [i for i in dict.fromkeys((*eos_token_ids, *tokenizer.ends)) if i < size]
        try:
            self.library = LLTokenizer(
                tokenizer.library.to_str(), n_vocab=size, eos_token=ids or None
            )
        except ValueError as error:
            raise GrammarError(
                f"structured output does not support this model's tokenizer: {_one_line(str(error))}"
            ) from error
        self.eos_token_ids = tuple(self.library.eos_tokens)
        self.num_words = -(-size // WORD_BITS)


class GrammarMatcher(FollowedMatcher):
    """A matcher of this process.

    Made by `compile_matcher` and `copy`.

    Attributes:
        library: the library's matcher, in the state after the tokens ahead.
    """

    __slots__ = ("library",)

    def __init__(self, library: LLMatcher, rules: MatcherRules = NO_RULES) -> None:
        super().__init__(rules)
        self.library = library

    def copy(self, rules: MatcherRules | None = None) -> GrammarMatcher:
        """Return an independent matcher in the same state.

        Args:
            rules: of the copy; None for the same.
        """
        copy = GrammarMatcher(self.library.deep_copy(), self.rules if rules is None else rules)
        copy.take_over(self)
        return copy

    def follow(self, token_id: int, most: int = sys.maxsize) -> None:
        """Accept a token ahead, and the tokens that are forced after it.

        Args:
            token_id: the token; there are none ahead.
            most: forced tokens that are accepted.
        """
        library = self.library
        self.is_masked = self.is_followed = False
        self.ahead.append(token_id)
        self.num_tokens += 1
        if not library.consume_token(token_id):
            self.is_refused = True
            return
        if (left := min(self.num_left, most)) <= 0:
            return
        forced = library.compute_ff_tokens()
        self.is_followed = len(forced) < left
        for forced_id in forced[:left]:
            if not library.consume_token(forced_id):
                self.has_stopped = True  # with an error
                return
            self.ahead.append(forced_id)
            self.num_tokens += 1

    def write_mask(self, words: Words, address: int, end_ids: Sequence[int]) -> None:
        """Compute which tokens may come next.

        Args:
            words: [num_words] int32 contiguous, written: bit i % 32 of word i // 32 is 1 where token i is allowed.
            address: of `words`; NumPy takes a microsecond to tell it.
            end_ids: the model's end tokens. They are allowed where the grammar and `rules` allow them, and where
                nothing else is. A matcher that cannot continue allows them, and has an `error`.
        """
        library = self.library
        library.unsafe_compute_mask_ptr(address, words.nbytes)
        self.is_masked = True
        self.has_stopped = library.is_stopped()
        if self.num_tokens < self.rules.ends_from and _allows_any(words, end_ids):
            kept = words.copy()
            _clear_bits(kept, end_ids)
            if kept.any():
                words[:] = kept

    @property
    def is_accepting(self) -> bool:
        """Whether the output so far follows the grammar, so that it may end here."""
        return self.library.is_accepting()

    @property
    def has_usable_caches(self) -> bool:
        """Whether no matcher with the same caches made the library fail, which leaves them locked."""
        self.library.is_accepting()
        return not self.library.is_error()

    def _find_error(self) -> str:
        if not self.library.is_error():
            return ""
        return f"the grammar cannot be followed further: {_reason(self.library.get_error())}"

    def _consume(self, token_id: int) -> bool:
        return self.library.consume_token(token_id)

    def _find_forced(self) -> list[int]:
        return self.library.compute_ff_tokens()

    def _ends(self) -> bool:
        return self.library.is_stopped() and not self.library.is_error()


def compile_matcher(tokenizer: GrammarTokenizer, grammar: str) -> GrammarMatcher:
    """Compile a serialized grammar.

    It releases the interpreter lock. It may take long or end the process unless `check` has accepted the grammar.

    Raises:
        GrammarError: the grammar is not valid, needs something that is not supported, or exceeds a limit.
    """
    matcher = LLMatcher(tokenizer.library, grammar, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(_reason(matcher.get_error()))
    return GrammarMatcher(matcher)


def check(tokenizer: GrammarTokenizer, grammar: str) -> None:
    """Compile a grammar and follow it for a few tokens. May take long, or end the process.

    Raises:
        GrammarError: it cannot be compiled, no output can follow it, or its masks exceed a limit.
    """
    matcher = compile_matcher(tokenizer, grammar)
    words = np.empty((1, tokenizer.num_words), np.int32)
    for step in range(_TRIAL_TOKENS):
        start = time.thread_time()
        matcher.library.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.library.is_error():
            if step == 0 and "NoExtension" in matcher.library.get_error():
                raise GrammarError("no text follows this grammar")
            raise GrammarError(_reason(matcher.library.get_error()))
        if time.thread_time() - start > _TRIAL_SECONDS:
            raise GrammarError(
                f"finding the allowed tokens takes more than {_TRIAL_SECONDS:g} seconds"
            )
        token_id = _some_token(words[0], tokenizer.eos_token_ids, step)
        if token_id is None:
            return
        if not matcher.accept(token_id):
            raise GrammarError(_reason(matcher.library.get_error()))


def _some_token(words: npt.NDArray[np.int32], excluded: Sequence[int], choice: int) -> int | None:
    """Return one of the tokens of a mask that are not excluded, None if there is none. Changes the mask."""
    _clear_bits(words, excluded)
    nonzero = np.flatnonzero(words)
    if not len(nonzero):
        return None
    index = int(nonzero[choice * 7919 % len(nonzero)])
    bits = int(words[index]) & 0xFFFFFFFF
    return index * WORD_BITS + (bits & -bits).bit_length() - 1


def _allows_any(words: Words, token_ids: Sequence[int]) -> bool:
    """Return whether a mask allows one of some tokens."""
    return any(
        int(words[token_id // WORD_BITS]) >> token_id % WORD_BITS & 1 for token_id in token_ids
    )


def _clear_bits(words: Words, token_ids: Sequence[int]) -> None:
    """Clear the bits of tokens in a mask."""
    view = words.view(np.uint32)
    for token_id in token_ids:
        view[token_id // WORD_BITS] &= np.uint32(~(1 << token_id % WORD_BITS) & 0xFFFFFFFF)


class Translation(NamedTuple):
    """A constraint in llguidance's format.

    Attributes:
        grammar: the serialized grammar.
        unenforced: for each schema, a phrase that names the keywords that the grammar does not enforce; empty if it
            enforces all of them.
    """

    grammar: str
    unenforced: tuple[str, ...] = ()


def serialize(kind: str, value: object) -> str:
    """Translate a constraint without compiling it, all of which the grammar enforces; see `translate`."""
    return translate(kind, value, strict=True).grammar


def translate(
    kind: str,
    value: object,
    *,
    strict: bool = False,
    level: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Translation:
    """Translate a constraint to llguidance's format, without compiling it.

    Args:
        kind: "json_schema", "json_object", "regex", "choice", "lark", "structural_tag" or "tools".
        value: of plain JSON types; see `server.http.text.structured_output.StructuredOutput`.
        strict: whether a keyword of a JSON schema that the grammar cannot enforce is an error.
        level: of the reduction of JSON schemas; see `model.text.schema.lower.lower_schema`.
        tokenizer: needed for "tools" only.

    Raises:
        GrammarError: the value is of the wrong type, too long or too deeply nested.
    """
    if kind == "json_schema":
        lowered = lower(value, strict=strict, level=level)
        check_size(lowered.schema)
        return Translation(_json_grammar(lowered.schema), describe(lowered.unenforced))
    if kind == "tools":
        assert tokenizer is not None
        tools = translate_tools(value, tokenizer, level=level)
        if (text := tools.text) is None:
            return Translation(LLMatcher.grammar_from_lark(tools.grammar), tools.unenforced)
        inner = translate(
            text.kind, text.value, strict=text.strict, level=level * (not text.strict)
        )
        return _joint_grammar(tools, text, inner)
    if kind == "structural_tag":
        return _tag_grammar(value, strict=strict, level=level)
    if kind == SERIALIZED:
        return Translation(str(value))  # it may be longer than what it was translated from
    check_size(value)
    return Translation(_TEXT_GRAMMARS[kind](value))


def _joint_grammar(
    tools: TranslatedTools, text: Constrained, translated: Translation
) -> Translation:
    """Return the grammar of a message that is calls, or text that follows a constraint.

    Args:
        tools: with the rule `value` left out.
        text: the constraint.
        translated: the same.
    """
    inner = translated.grammar
    part = json.loads(inner)["grammars"][0] if inner.startswith("{") else {"lark_grammar": inner}
    lark, rule = tools.grammar, part.get("lark_grammar") or ""
    excluded = " | ".join(map(quote, tools.begins))
    unenforced = (*tools.unenforced, *(f"`{text.field}`: {p}" for p in translated.unenforced))
    if text.kind in ("regex", "choice") and rule.startswith("start: ") and "\n" not in rule:
        # One lexeme, which would hide that the same characters begin a call.
        expression = rule.removeprefix("start: ")
        lark += f"\nvalue: VALUE\nVALUE: ({expression}) & ~(({excluded}) ANY)\nANY: /(?s:.*)/"
        return Translation(LLMatcher.grammar_from_lark(lark), unenforced)
    if text.kind == "structural_tag":
        free = f"TEXT: ANY & ~(ANY ({excluded}) ANY)\nANY: /(?s:.*)/"
        part = {"lark_grammar": rule.replace(_FREE_TEXT, free)}
    parts = [{"name": "calls", "lark_grammar": f"{lark}\nvalue: @text"}, {**part, "name": "text"}]
    return Translation(json.dumps({"grammars": parts}), unenforced)


def compile_constraint(
    tokenizer: GrammarTokenizer,
    kind: str,
    value: object,
    *,
    strict: bool = False,
    text_tokenizer: Tokenizer | None = None,
) -> Translation:
    """Translate a constraint and check the grammar. May take long, or end the process.

    A JSON schema that the library refuses is reduced further, unless it is strict.

    Raises:
        GrammarError: see `translate` and `check`.
    """
    refusal: GrammarError | None = None
    levels = LEVELS if kind in ("json_schema", "structural_tag", "tools") and not strict else 1
    for level in range(levels):
        found = translate(kind, value, strict=strict, level=level, tokenizer=text_tokenizer)
        try:
            check(tokenizer, found.grammar)
        except GrammarError as error:
            refusal = refusal or error
            if _NOTHING_FOLLOWS.search(str(error)):
                break
            continue
        return found
    assert refusal is not None
    raise refusal


def _object_grammar(_: object) -> str:
    return _json_grammar({"type": "object"})


def _regex_grammar(expression: object) -> str:
    expression = _string(expression)
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise GrammarError("the regular expression ends in a lone backslash")
    return LLMatcher.grammar_from_regex(expression)


def _lark_grammar(grammar: object) -> str:
    return LLMatcher.grammar_from_lark(_as_lark(_string(grammar)))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise GrammarError("must be a string")
    return value


def _with_characters(grammar: str) -> str:
    """Replace the escapes of GBNF for characters by these: the library drops leading zeros of their codes."""
    if "::=" not in grammar:
        return grammar
    return _GBNF_ESCAPE.sub(_unescaped, grammar)


def _unescaped(found: re.Match[str]) -> str:
    digits = found[1] or found[2]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code <= sys.maxunicode and not 0xD800 <= code < 0xE000 else found[0]


def _json_grammar(schema: dict[str, Any] | bool) -> str:
    if isinstance(schema, bool):
        schema = {"allOf": [schema]}
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_options())
    except ValueError:  # its message contains the number
        raise GrammarError("must have no integer of more than 64 bits") from None


def _options() -> Any:  # noqa: ANN401 - the library's type lacks that values may be null
    return dict(JSON_OPTIONS)


def _choice_grammar(value: object) -> str:
    if not (isinstance(value, list) and value and all(isinstance(choice, str) for choice in value)):
        raise GrammarError("must be a list of strings, at least one")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quote, value)))


_TEXT_GRAMMARS: Final[dict[str, Callable[[object], str]]] = {
    "json_object": _object_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "lark": _lark_grammar,
}
_FREE_TEXT: Final = "TEXT: /(?s:.*)/"


def _tag_grammar(value: object, *, strict: bool, level: int) -> Translation:
    """Translate `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`.

    Text is free up to a trigger. From there on one of the structures whose `begin` starts with it must follow.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise GrammarError("must be an object with `structures` and `triggers`")
    if "format" in value and not value.keys() & {"structures", "triggers"}:
        kept: list[Unenforced] = []

        def json_of(schema: Any, where: str) -> str:  # noqa: ANN401 - a JSON value
            lowered = lower(schema, strict=strict, level=level)
            kept.extend(Unenforced(key, f"/{where}{place}") for key, place in lowered.unenforced)
            return json_rule(lowered.schema)

        text = tag_grammar(value["format"], Languages(json_of, grammar=_as_lark, regex=pattern))
        check_size(text)
        return Translation(LLMatcher.grammar_from_lark(text), describe(kept))
    unknown = [key for key in value if key not in ("type", "structures", "triggers")]
    if unknown:
        raise GrammarError(f"the key `{unknown[0]}` of a structural tag is not supported")
    structures, triggers = value.get("structures"), value.get("triggers")
    if not (isinstance(structures, list) and structures):
        raise GrammarError("`structures` must be a list, not empty")
    if not (isinstance(triggers, list) and triggers and all(_is_text(t) for t in triggers)):
        raise GrammarError("`triggers` must be a list of strings, not empty")
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    unenforced: list[Unenforced] = []
    for i, structure in enumerate(structures):
        schema = structure.get("schema", {}) if isinstance(structure, dict) else {}
        lowered = lower(schema, strict=strict, level=level)
        unenforced += [
            Unenforced(keyword, f"/structures/{i}/schema{place}")
            for keyword, place in lowered.unenforced
        ]
        trigger, body = _structure(structure, lowered.schema, triggers, f"structures.{i}")
        bodies[trigger].append(body)
    lines = [
        "start: tag* tail",
        "tail: TAIL",
        _FREE_TEXT,
        "TAIL: TEXT" + "".join(f" & ~(TEXT {quote(t)} TEXT)" for t in bodies),
        "tag: " + " | ".join(f"tag_{i}" for i in range(len(bodies))),
    ]
    for i, (trigger, found) in enumerate(bodies.items()):
        if not found:
            raise GrammarError(f"no structure begins with the trigger {quote(trigger)}")
        lines += [f"trigger_{i}[lazy]: TEXT {quote(trigger)}"]
        lines += [f"tag_{i}: trigger_{i} (" + " | ".join(found) + ")"]
    text = "\n".join(lines)
    check_size(text)
    return Translation(LLMatcher.grammar_from_lark(text), describe(unenforced))


def _as_lark(grammar: str) -> str:
    """Return a grammar, as GBNF or Lark, as Lark."""
    if not _GBNF_RULE.search(grammar):
        return grammar
    try:
        return gbnf_to_lark(_with_characters(grammar))
    except Exception as error:  # noqa: BLE001 - the library's converter raises no class of its own
        raise GrammarError(f"the grammar cannot be read: {_one_line(str(error))}") from None


def _structure(
    structure: object, schema: Schema, triggers: list[str], where: str
) -> tuple[str, str]:
    """Return the trigger of a structure, and the rule for what follows it."""
    if not isinstance(structure, dict) or set(structure) - {"begin", "schema", "end"}:
        raise GrammarError(f"`{where}` must be an object with `begin`, `schema` and `end`")
    begin, end = structure.get("begin"), structure.get("end", "")
    if not (isinstance(begin, str) and begin and isinstance(end, str)):
        raise GrammarError(f"`{where}.begin` and `{where}.end` must be strings")
    if not end and any(len(trigger.encode()) == 1 for trigger in triggers):
        # A number ends at the byte after it. The library fails if that byte is a whole trigger.
        raise GrammarError(f"`{where}.end` is required, since a trigger is a single byte")
    trigger = next((t for t in triggers if begin.startswith(t)), None)
    if trigger is None:
        raise GrammarError(f"`{where}.begin` starts with none of the triggers")
    parts = [json_rule(schema)]
    if len(begin) > len(trigger):
        parts.insert(0, quote(begin[len(trigger) :]))
    if end:
        parts.append(quote(end))
    return trigger, " ".join(parts)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


_NOTHING_FOLLOWS: Final = re.compile("unsatisfiable|no text follows|unknown name", re.IGNORECASE)
_GBNF_RULE: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_GBNF_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_UNIMPLEMENTED: Final = re.compile(r"Unimplemented keys: (\[.*?\])")


def _reason(error: str) -> str:
    """Return the library's error as a phrase that names the keyword, on one line."""
    error = error.partition("<backtrace>")[0]
    if found := _UNIMPLEMENTED.search(error):
        keys = json.loads(found[1])
        noun = "keyword" if len(keys) == 1 else "keywords"
        names = ", ".join(f"`{key}`" for key in keys)
        return f"the JSON schema {noun} {names} {'is' if len(keys) == 1 else 'are'} not supported"
    return _one_line(error.removesuffix("<non-verbose/>"))


def _one_line(text: str) -> str:
    line = " ".join(text.split())[:_MAX_REASON_CHARACTERS]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
