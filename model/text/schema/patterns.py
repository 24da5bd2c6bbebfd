"""Regular expressions of JSON schemas, which are ECMAScript's.

The library of grammars reads other expressions, and allows the wrong escapes in JSON for some sets of characters. So a
pattern is parsed here and written anew: with explicit sets, anchored at both ends, and with sets that hold no character
on which ECMAScript and Python disagree, so that a generated value matches for both.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import unicodedata
from typing import Final, TypeAlias

from model.errors import GrammarError

_Ranges: TypeAlias = tuple[tuple[int, int], ...]
_LAST: Final = sys.maxunicode
_SURROGATES: Final = ((0xD800, 0xDFFF),)
_MOST_ALTERNATIVES: Final = 64
_MOST_REPETITIONS: Final = 1000
_MAX_NESTING: Final = 40


class PatternError(GrammarError):
    """The text is not a regular expression."""


class UnsupportedPatternError(Exception):
    """No expression of the grammar's library means the same."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Set:
    """One character: of `sure` in every dialect, of `possible` in some."""

    sure: _Ranges
    possible: _Ranges


@dataclasses.dataclass(frozen=True, slots=True)
class _Raw:
    """A part that is passed on as it is."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Anchor:
    start: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Assertion:
    """Anything that looks around or back; `ahead` is the node of a positive lookahead."""

    text: str
    ahead: _Node | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Repeat:
    node: _Node
    least: int
    most: int | None


_Node: TypeAlias = _Set | _Raw | _Anchor | _Assertion | _Sequence | _Choice | _Repeat
_ANYTHING: Final = "(?s:.*)"


def _union(*sets: _Ranges) -> _Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _complement(ranges: _Ranges) -> _Ranges:
    found, start = [], 0
    for low, high in _union(ranges, _SURROGATES):
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        found.append((start, _LAST))
    return tuple(found)


def _without(ranges: _Ranges, other: _Ranges) -> _Ranges:
    return _complement(_union(_complement(ranges), other))


def _chars(text: str) -> _Ranges:
    return _union(tuple((ord(c), ord(c)) for c in text))


_DIGITS: Final = ((0x30, 0x39),)
_WORD: Final = _union(_DIGITS, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
# Of Python's characters of words, all beyond ASCII but some punctuation.
_POSSIBLE_WORD: Final = _union(_WORD, ((0x80, 0x200F), (0x2028, 0x202F), (0x2060, _LAST)))
_SPACE: Final = _union(
    ((0x09, 0x0D), (0x2000, 0x200A)), _chars(" \xa0\u1680\u2028\u2029\u202f\u205f\u3000")
)
_POSSIBLE_SPACE: Final = _union(_SPACE, ((0x1C, 0x1F),), _chars("\x85\ufeff"))
_LINE: Final = _complement(_chars("\n\r\u2028\u2029"))
_POSSIBLE_LINE: Final = _complement(_chars("\n"))
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_COUNT: Final = re.compile(r"\{(\d+)(,(\d*))?\}")
_CASED: Final = frozenset("bBkpP123456789")


@functools.cache
def _all_digits() -> _Ranges:
    digits = [c for c in range(0x1FC00) if unicodedata.category(chr(c)) == "Nd"]
    return _union(tuple((c, c) for c in digits))


def _class(letter: str) -> _Set:
    """Return the set of a letter after a backslash: d, D, w, W, s or S."""
    sure, possible = {
        "d": (_DIGITS, _all_digits()),
        "w": (_WORD, _POSSIBLE_WORD),
        "s": (_SPACE, _POSSIBLE_SPACE),
    }[letter.lower()]
    if letter.islower():
        return _Set(sure, possible)
    return _Set(_complement(possible), _complement(sure))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.place, self._depth = text, 0, 0

    def parse(self) -> _Node:
        node = self._choice()
        if self.place < len(self.text):
            raise self._error("an unopened `)`")
        return node

    def _error(self, what: str) -> PatternError:
        return PatternError(f"the regular expression has {what} at character {self.place}")

    def _next(self, text: str) -> bool:
        if self.text.startswith(text, self.place):
            self.place += len(text)
            return True
        return False

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise self._error(f"more than {_MAX_NESTING} levels of groups")
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else _Choice(tuple(options))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self.place < len(self.text) and self.text[self.place] not in "|)":
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _quantified(self, node: _Node) -> _Node:
        least, most = 1, None
        if self._next("*"):
            least = 0
        elif self._next("+"):
            pass
        elif self._next("?"):
            least, most = 0, 1
        elif found := _COUNT.match(self.text, self.place):
            least = int(found[1])
            most = least if found[2] is None else int(found[3]) if found[3] else None
            if most is not None and most < least:
                raise self._error("a repetition whose bounds are in the wrong order")
            self.place = found.end()
        else:
            return node
        if isinstance(node, _Anchor):
            node = _Assertion("", None)
        if self._next("+"):
            node = _Assertion(self.text)  # possessive
        self._next("?")
        if self.place < len(self.text) and (
            self.text[self.place] in "*+?" or _COUNT.match(self.text, self.place)
        ):
            raise self._error("a repetition of nothing")
        return _Repeat(node, least, most)

    def _atom(self) -> _Node:
        character = self.text[self.place]
        if character in "*+?":
            raise self._error("a repetition of nothing")
        self.place += 1
        if character == "(":
            return self._group()
        if character == "[":
            return self._set()
        if character == "\\":
            return self._escape(in_set=False)
        if character in "^$":
            return _Anchor(character == "^")
        if character == ".":
            return _Set(_LINE, _POSSIBLE_LINE)
        return _literal(ord(character))

    def _group(self) -> _Node:
        start = self.place - 1
        ahead = look = False
        if self._next("?"):
            if self._next("="):
                ahead = look = True
            elif found := re.compile(r"!|<=|<!").match(self.text, self.place):
                look, self.place = True, found.end()
            elif found := re.compile(r":|P?<\w+>").match(self.text, self.place):
                self.place = found.end()
            else:
                raise UnsupportedPatternError
        node = self._choice()
        if not self._next(")"):
            raise self._error("an unclosed group")
        if look:
            return _Assertion(self.text[start : self.place], node if ahead else None)
        return node

    def _escape(self, *, in_set: bool) -> _Node:
        if self.place >= len(self.text):
            raise self._error("a backslash at its end")
        letter = self.text[self.place]
        self.place += 1
        if letter in "dDwWsS":
            return _class(letter)
        if letter in "xuc" or letter in _CONTROLS or (letter == "b" and in_set):
            return _literal(self._code(letter))
        if in_set and (letter in "pP" or (letter.isascii() and letter.isalnum())):
            raise UnsupportedPatternError
        return (
            self._outside(letter)
            if letter.isascii() and letter.isalnum()
            else _literal(ord(letter))
        )

    def _outside(self, letter: str) -> _Node:
        """Return the node of an escaped letter or digit outside of sets."""
        if letter in "pP":
            found = re.compile(r"\{[\w=]+\}").match(self.text, self.place)
            if not found:
                raise UnsupportedPatternError
            self.place = found.end()
            return _Raw("\\" + letter + found[0])
        if letter in "AzZ":
            return _Anchor(letter == "A")
        if letter in _CASED:
            return _Assertion("\\" + letter)
        raise UnsupportedPatternError

    def _code(self, letter: str) -> int:
        if letter == "b":
            return 8
        if letter in _CONTROLS:
            if letter == "0" and self.text[self.place : self.place + 1].isdigit():
                raise UnsupportedPatternError
            return ord(_CONTROLS[letter])
        if letter == "c":
            found = re.compile("[A-Za-z]").match(self.text, self.place)
            if not found:
                raise UnsupportedPatternError
            self.place += 1
            return ord(found[0]) % 32
        forms = {"x": r"([0-9A-Fa-f]{2})", "u": r"([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]+)\}"}
        found = re.compile(forms[letter]).match(self.text, self.place)
        if not found:
            raise UnsupportedPatternError
        self.place = found.end()
        code = int(found[found.lastindex or 0], 16)
        low = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})").match(self.text, self.place)
        if 0xD800 <= code < 0xDC00 and low:
            self.place = low.end()
            code = 0x10000 + (code - 0xD800) * 0x400 + int(low[1], 16) - 0xDC00
        if code > _LAST or 0xD800 <= code < 0xE000:
            raise UnsupportedPatternError
        return code

    def _set(self) -> _Node:
        negated = self._next("^")
        if self._next("]"):
            raise UnsupportedPatternError  # ECMAScript and Python disagree
        sure: list[_Ranges] = []
        possible: list[_Ranges] = []
        while not self._next("]"):
            item = self._set_item()
            low = _only(item)
            ends = self.text[self.place : self.place + 1] == "-" and (
                self.text[self.place + 1 : self.place + 2] not in ("]", "")
            )
            if ends and low is not None:
                self.place += 1
                high = _only(self._set_item())
                if high is None:
                    raise UnsupportedPatternError
                if high < low:
                    raise self._error("a range whose ends are in the wrong order")
                item = _Set(((low, high),), ((low, high),))
            sure.append(item.sure)
            possible.append(item.possible)
        if negated:
            return _Set(_complement(_union(*possible)), _complement(_union(*sure)))
        return _Set(_union(*sure), _union(*possible))

    def _set_item(self) -> _Set:
        if self.place >= len(self.text):
            raise self._error("an unclosed set of characters")
        character = self.text[self.place]
        self.place += 1
        node = self._escape(in_set=True) if character == "\\" else _literal(ord(character))
        if not isinstance(node, _Set):
            raise UnsupportedPatternError
        return node


def _literal(code: int) -> _Set:
    if 0xD800 <= code <= 0xDFFF:
        raise UnsupportedPatternError
    return _Set(((code, code),), ((code, code),))


def _only(item: _Set) -> int | None:
    """Return the only character of a set, None if it has several."""
    if len(item.sure) == 1 and item.sure[0][0] == item.sure[0][1] and item.sure == item.possible:
        return item.sure[0][0]
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """An alternative: a text that may have to begin or end the whole text, and expressions that hold from its start."""

    start: bool
    body: str
    end: bool
    ahead: tuple[_Node, ...] = ()


class _Writer:
    """Writes expressions of the grammar's library.

    Args:
        in_json: whether the text is the value of a JSON string.
    """

    def __init__(self, *, in_json: bool) -> None:
        self._in_json = in_json

    def whole(self, node: _Node) -> list[str]:
        """Return expressions, each of which the whole text matches if the pattern is found in it."""
        parts = self._parts(node)
        ahead = {part.ahead for part in parts}
        if len(parts) > 1 and ahead != {()}:
            raise UnsupportedPatternError
        texts = []
        for part in parts:
            body = f"(?:{part.body})" if "|" in part.body else part.body
            begin, end = "" if part.start else _ANYTHING, "" if part.end else _ANYTHING
            texts.append(begin + body + end)
        found = ["|".join(f"(?:{text})" for text in texts) if len(texts) > 1 else texts[0]]
        for node_ahead in ahead.pop() if ahead else ():
            if not parts[0].start:
                raise UnsupportedPatternError
            found += self.whole(_Sequence((_Anchor(start=True), node_ahead)))
        return found

    def _parts(self, node: _Node) -> list[_Part]:
        if isinstance(node, _Sequence):
            return self._joined(node.parts)
        if not _is_special(node):
            return [_Part(False, self._text(node), False)]
        parts: list[_Part] = []
        match node:
            case _Anchor():
                parts = [_Part(node.start, "", not node.start)]
            case _Assertion(ahead=ahead) if ahead is not None:
                parts = [_Part(False, "", False, (ahead,))]
            case _Choice():
                parts = [part for option in node.options for part in self._parts(option)]
            case _Repeat(most=1):
                parts = self._parts(node.node)
                parts += [] if node.least else [_Part(False, "", False)]
        if not parts or len(parts) > _MOST_ALTERNATIVES:
            raise UnsupportedPatternError
        return parts

    def _joined(self, nodes: tuple[_Node, ...]) -> list[_Part]:
        whole = [_Part(False, "", False)]
        for node in nodes:
            whole = [
                joined
                for first in whole
                for second in self._parts(node)
                if (joined := _join(first, second)) is not None
            ]
            if not whole or len(whole) > _MOST_ALTERNATIVES:
                raise UnsupportedPatternError
        return whole

    def _text(self, node: _Node) -> str:
        """Return the expression of a node without anchors and assertions."""
        match node:
            case _Set():
                return self._set(node.sure)
            case _Raw():
                # See `_set`.
                return f"[{node.text}&&[^\\x1f]]" if self._in_json else node.text
            case _Sequence():
                return "".join(self._grouped(part, _Choice) for part in node.parts)
            case _Choice():
                return "|".join(self._text(option) for option in node.options)
            case _Repeat():
                most = node.most
                if max(node.least, most or 0) > _MOST_REPETITIONS:
                    raise UnsupportedPatternError
                inner = self._grouped(node.node, _Choice | _Sequence | _Repeat)
                if not inner or inner == "(?:)":
                    return ""
                count = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, most))
                return inner + (count or f"{{{node.least},{'' if most is None else most}}}")
        raise UnsupportedPatternError

    def _grouped(self, node: _Node, kinds: object) -> str:
        text = self._text(node)
        return f"(?:{text})" if isinstance(node, kinds) else text  # type: ignore[arg-type]

    def _set(self, ranges: _Ranges) -> str:
        if (
            self._in_json
            and _has(ranges, 0, 0x1F)
            and not (_has(ranges, 0x22) and _has(ranges, 0x5C))
        ):
            # For sets with all control characters the library allows the escapes of `"` and `\` too.
            ranges = _without(ranges, ((0x1F, 0x1F),))
        if not ranges:
            raise UnsupportedPatternError
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            return _escaped(ranges[0][0])
        items = [
            _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"
            for low, high in ranges
        ]
        return "[" + "".join(items) + "]"


def _has(ranges: _Ranges, low: int, high: int | None = None) -> bool:
    return any(a <= low and (low if high is None else high) <= b for a, b in ranges)


def _escaped(code: int) -> str:
    character = chr(code)
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{{{code:x}}}"


def _is_special(node: _Node) -> bool:
    """Return whether a node has anchors or assertions."""
    match node:
        case _Anchor() | _Assertion():
            return True
        case _Sequence():
            return any(map(_is_special, node.parts))
        case _Choice():
            return any(map(_is_special, node.options))
        case _Repeat():
            return _is_special(node.node)
    return False


def _join(first: _Part, second: _Part) -> _Part | None:
    """Return two parts one after the other, None if no text can match."""
    if second.ahead and first.body:
        raise UnsupportedPatternError
    if (first.end and second.body) or (second.start and first.body):
        # Only a text that is empty could match.
        raise UnsupportedPatternError
    body = first.body
    if second.body:
        body += f"(?:{second.body})" if "|" in second.body else second.body
    return _Part(
        first.start or second.start, body, first.end or second.end, first.ahead + second.ahead
    )


# Patterns of common generators that look around, and others that match a part of the same texts.
_WITHOUT_ASSERTIONS: Final = {
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$": (
        r"^[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[\-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?){0,2}$"
    ),
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        r"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"
        r"(?:T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S))?"
        r"|T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S))$"
    ),
}


@functools.lru_cache(maxsize=256)
def whole_expressions(pattern: str, *, in_json: bool = True) -> tuple[str, ...]:
    """Translate a pattern.

    Args:
        pattern: is found anywhere in a text that matches.
        in_json: whether the text is generated as a JSON string.

    Returns:
        Expressions of the grammar's library without anchors. A whole text that matches all of them matches the pattern.

    Raises:
        PatternError: it is not a regular expression.
        UnsupportedPatternError: it cannot be translated.
    """
    known = _WITHOUT_ASSERTIONS.get(pattern, pattern)
    return tuple(_Writer(in_json=in_json).whole(_Parser(known).parse()))


def check_pattern(pattern: str) -> None:
    """Check the syntax of a regular expression, as far as it is understood.

    Raises:
        PatternError: it is not valid.
    """
    try:
        _Parser(pattern).parse()
    except UnsupportedPatternError:
        return


def is_found(pattern: str, text: str) -> bool | None:
    """Return whether a text has a match of a pattern, None if Python cannot tell. May take very long."""
    python = re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", pattern)
    python = re.sub(r"\\k<(\w+)>", r"(?P=\1)", python)
    python = re.sub(r"\\u\{([0-9A-Fa-f]+)\}", lambda m: re.escape(chr(int(m[1], 16))), python)
    try:
        return re.search(python, text) is not None
    except (re.error, RecursionError, OverflowError, ValueError):
        return None
