"""Finds the calls of tools in a message, piece by piece while it is generated."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import Final

from model.text.tools.definitions import Tool
from model.text.tools.formats import ToolFormat
from model.text.tools.grammar import PARAMETER_END


@dataclasses.dataclass(slots=True)
class CallDelta:
    """What a piece of text adds to a call.

    Attributes:
        index: number of the call in its message.
        name: of the tool if the call begins here; otherwise None.
        arguments: characters of the JSON of the arguments.
    """

    index: int
    name: str | None
    arguments: str


@dataclasses.dataclass(slots=True)
class MessageDelta:
    """What a piece of text adds to a message.

    Attributes:
        content: text before the calls, or without any.
        calls: at most one entry for each call, in order.
        trailing: text after the calls. The grammars allow none; a special token can add some.
    """

    content: str = ""
    calls: list[CallDelta] = dataclasses.field(default_factory=list)
    trailing: str = ""


class _State(enum.Enum):
    TEXT = enum.auto()  # before calls
    START = enum.auto()  # of a message that is calls or a value
    HEAD = enum.auto()  # after what begins the calls
    TRIAL = enum.auto()  # after the head of a call that may be a value
    ARGUMENTS = enum.auto()  # JSON
    PARAMETER = enum.auto()  # before a parameter, or after the last one
    VALUE = enum.auto()  # of a parameter
    TAIL = enum.auto()
    AFTER = enum.auto()  # after a call
    END = enum.auto()


_OPEN: Final = (_State.HEAD, _State.TRIAL)
_NONE: Final = -1  # no candidate begins the text


class CallParser:
    """Parses one message. What it finds does not depend on how the text is divided into pieces.

    Every text has a result: what is not a complete beginning of a call is content, unless the message was cut off
    within it. A call that is cut off has the arguments up to there. Syntax between or after calls that is cut off at
    the end of the message is dropped.

    Args:
        format_: of the calls.
        tools: that may be called, at least one.
        atomic: whether the vocabulary has tokens for the parts of calls, so that ordinary tokens never write them.
        constrained: whether text without calls follows a constraint: then nothing precedes calls, and a text that
            begins like a call without a marker is one only if it is one to its end.

    Attributes:
        num_calls: calls so far.
        call_complete: whether the last call has all of its arguments.
    """

    def __init__(
        self,
        format_: ToolFormat,
        tools: Sequence[Tool],
        *,
        atomic: bool = False,
        constrained: bool = False,
    ) -> None:
        self.num_calls = 0
        self.call_complete = False
        self._format = format_
        self._tools = tools
        self._heads = [format_.head_of(tool.name) for tool in tools]
        self._atomic, self._constrained = atomic, constrained
        self._state = _State.HEAD
        if format_.marker:
            self._state = _State.START if constrained else _State.TEXT
        self._rest = ""  # not yet consumed
        self._ended = False
        self._cut_off = False
        self._following: str | None = None
        self._delta = MessageDelta()
        self._tool = tools[0]
        self._json = _JSONScanner()
        self._scanned = 0  # characters of the arguments on trial
        self._tried = False  # whether these are all of them
        self._num_parameters = 0
        self._is_text = False
        self._steps = {
            _State.TEXT: self._text,
            _State.START: self._start,
            _State.HEAD: self._head,
            _State.TRIAL: self._trial,
            _State.ARGUMENTS: self._arguments,
            _State.PARAMETER: self._parameter,
            _State.VALUE: self._value,
            _State.TAIL: self._tail,
            _State.AFTER: self._after,
            _State.END: self._end,
        }

    def push(self, text: str) -> MessageDelta:
        """Parse the next piece; return what became certain."""
        self._rest += text
        return self._advance()

    def finish(self, *, cut_off: bool = False, after: str | None = None) -> MessageDelta:
        """Parse the end of the message; return what was held back.

        Args:
            cut_off: whether the message ended before the model ended it. Its last characters are dropped if they may
                begin calls.
            after: text of a stop string that followed, empty if that string stays at the end; None if none ended the
                message. It tells whether they did.
        """
        self._ended, self._cut_off, self._following = True, cut_off, after
        return self._advance()

    def _advance(self) -> MessageDelta:
        self._delta = MessageDelta()
        # A marker, or a head, at the end of a message was consumed, but begins no call.
        while self._rest or (self._ended and self._state in _OPEN):
            if not self._steps[self._state]():
                break
        return self._delta

    # Each step consumes text or changes the state, and returns True; or it needs more text, and returns False.

    def _text(self) -> bool:
        before, found = self._until(self._format.marker, atomic=self._atomic)
        self._delta.content += before
        if found:
            self._state = _State.HEAD
        return found

    def _start(self) -> bool:
        marker = self._format.marker
        number = self._match([marker])
        if number is None:
            return False
        if number != _NONE:
            self._state = _State.HEAD
        elif self._is_cut(self._rest, marker, atomic=self._atomic):
            self._take(len(self._rest))
        else:
            self._state = _State.END
        return True

    def _head(self) -> bool:
        format_ = self._format
        opening = format_.opening
        markers = [format_.optional_marker, ""] if format_.optional_marker else [""]
        candidates = [m + opening + head for m in markers for head in self._heads]
        number = self._match(candidates)
        if number is None:
            return False
        if number == _NONE:
            marked = 0 < len(self._rest) < len(format_.optional_marker)
            atomic = self._atomic and marked and format_.optional_marker.startswith(self._rest)
            if any(self._is_cut(self._rest, text, atomic=atomic) for text in candidates):
                self._take(len(self._rest))
                self._state = _State.END
                return False
            self._delta.content += format_.marker
            self._state = _State.END
            if format_.marker and not self._constrained:
                self._state = _State.TEXT
        elif (
            self._constrained
            and not format_.marker
            and number >= len(candidates) - len(self._heads)
        ):
            self._tool = self._tools[number % len(self._heads)]
            self._state = _State.TRIAL
        else:
            self._begin(number % len(self._heads))
        return True

    def _trial(self) -> bool:
        """Find out whether the text after a head is the rest of a call."""
        tail, is_call = self._format.tail, self._cut_off
        if self._rest.startswith("{"):
            if not self._tried:
                length, self._tried = self._json.scan(self._rest[self._scanned :])
                self._scanned += length
            following = self._rest[self._scanned :]
            if self._tried and following:
                is_call = following.startswith(tail) or (is_call and tail.startswith(following))
            elif not self._ended:
                return False
        elif not self._rest and not self._ended:
            return False
        else:
            is_call = is_call and not self._rest
        if is_call:
            self._begin(self._tools.index(self._tool))
        else:
            self._delta.content += self._format.head_of(self._tool.name)
            self._state = _State.END
        return True

    def _arguments(self) -> bool:
        length, done = self._json.scan(self._rest)
        self._add(self._take(length))
        if done:
            self.call_complete = True
            self._state = _State.TAIL
        return done

    def _parameter(self) -> bool:
        parameters = self._tool.parameters
        tail = self._format.tail
        number = self._continue([*(f"<parameter={p.name}>\n" for p in parameters), tail])
        if number is None:
            return False
        if number == _NONE:
            self._state = _State.END
        elif number == len(parameters):
            self._add("}")
            self.call_complete = True
            self._state = _State.AFTER
        else:
            parameter = parameters[number]
            self._is_text = parameter.is_text
            separator = ", " if self._num_parameters else ""
            self._add(f"{separator}{_quote(parameter.name)}: " + '"' * self._is_text)
            self._num_parameters += 1
            self._state = _State.VALUE
        return True

    def _value(self) -> bool:
        value, found = self._until(PARAMETER_END, atomic=False)
        self._add(_quote(value)[1:-1] if self._is_text else value)
        if found:
            self._add('"' * self._is_text)
            self._state = _State.PARAMETER
        return found

    def _tail(self) -> bool:
        if not self._format.tail:
            self._state = _State.AFTER
            return True
        number = self._continue([self._format.tail])
        if number is None:
            return False
        self._state = _State.END if number == _NONE else _State.AFTER
        return True

    def _after(self) -> bool:
        candidates = [self._format.separator + head for head in self._heads]
        if self._format.closing:
            candidates.append(self._format.closing)
        number = self._continue(candidates)
        if number is None:
            return False
        if number == _NONE or number == len(self._heads):
            self._state = _State.END
        else:
            self._begin(number)
        return True

    def _end(self) -> bool:
        text = self._take(len(self._rest))
        if self.num_calls:
            self._delta.trailing += text
        else:
            self._delta.content += text
        return False

    def _begin(self, tool: int) -> None:
        self._tool = self._tools[tool]
        self._delta.calls.append(CallDelta(self.num_calls, self._tool.name, ""))
        self.num_calls += 1
        self.call_complete = False
        self._json = _JSONScanner()
        if self._format.arguments == "json":
            self._state = _State.ARGUMENTS
            return
        self._num_parameters = 0
        self._add("{")
        self._state = _State.PARAMETER

    def _add(self, arguments: str) -> None:
        """Append to the arguments of the current call."""
        if not arguments:
            return
        calls, index = self._delta.calls, self.num_calls - 1
        if calls and calls[-1].index == index:
            calls[-1].arguments += arguments
        else:
            calls.append(CallDelta(index, None, arguments))

    def _take(self, length: int) -> str:
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    def _until(self, end: str, *, atomic: bool) -> tuple[str, bool]:
        """Consume text up to `end`, and `end`; return the text, and whether `end` was found.

        If it was not, text that may be its beginning stays, or is dropped if the message was cut off there.
        """
        place = self._rest.find(end)
        if place >= 0:
            text = self._take(place)
            self._take(len(end))
            return text, True
        held = 0
        for length in range(min(len(end) - 1, len(self._rest)), 0, -1):
            begun = end[:length]
            if self._rest.endswith(begun) and (
                not self._ended or self._is_cut(begun, end, atomic=atomic)
            ):
                held = length
                break
        text = self._take(len(self._rest) - held)
        if self._ended:
            self._rest = ""
        return text, False

    def _is_cut(self, begun: str, whole: str, *, atomic: bool) -> bool:
        """Return whether the end of the message may have cut off `whole` after the text `begun`.

        Args:
            begun: a text.
            whole: a part of a call.
            atomic: whether it is one token, so that only a stop string cuts it.
        """
        if not self._cut_off or (atomic and self._following is None):
            return False
        text = begun + (self._following or "")
        return whole.startswith(text) or (text.startswith(whole) and whole.startswith(begun))

    def _match(self, candidates: Sequence[str]) -> int | None:
        """Consume the candidate that the text begins with; none of them is the beginning of another.

        Returns:
            Its number, `_NONE` if there is no such candidate, or None if more text is needed to tell.
        """
        for number, candidate in enumerate(candidates):
            if self._rest.startswith(candidate):
                self._take(len(candidate))
                return number
        if not self._ended and any(candidate.startswith(self._rest) for candidate in candidates):
            return None
        return _NONE

    def _continue(self, candidates: Sequence[str]) -> int | None:
        """As `_match`, after the beginning of a call: drop a candidate that the end of the message cuts off."""
        number = self._match(candidates)
        if number == _NONE and any(candidate.startswith(self._rest) for candidate in candidates):
            self._take(len(self._rest))
        return number


class _JSONScanner:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def scan(self, text: str) -> tuple[int, bool]:
        """Return how many characters of the next piece are the object's, and whether it ends there."""
        for i, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1, True
        return len(text), False


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
