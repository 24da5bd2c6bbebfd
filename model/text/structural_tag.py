"""The Lark grammar of a structural tag: a tree of formats, as xgrammar defines them.

Source: xgrammar 0.2.6, "Structural Tag Usage". Formats of single tokens are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from model.errors import GrammarError
from model.text.lark import quote

_MOST_REPETITIONS: Final = 10_000
_MOST_CHARACTERS: Final = 100_000


class Languages(NamedTuple):
    """How other languages are written in Lark.

    Attributes:
        json: the expression for a JSON schema, given with its place in the tag.
        grammar: the Lark grammar for a grammar.
        regex: the terminal for a regular expression.
    """

    json: Callable[[Any, str], str]
    grammar: Callable[[str], str]
    regex: Callable[[str], str]


class _Node(NamedTuple):
    """The expression for a format, in parts: free text needs to know what ends it.

    Attributes:
        head: fixed text at the beginning.
        body: the expression after it.
        tail: terminal of free text after that; empty for none.
        instead: terminal of free text in the place of all this; empty for none.
    """

    head: str = ""
    body: str = ""
    tail: str = ""
    instead: str = ""

    @property
    def is_free(self) -> bool:
        return bool(self.tail or self.instead)


def tag_grammar(tag_format: object, languages: Languages) -> str:
    """Return the grammar of text in a format.

    Raises:
        GrammarError: the format is not valid or not supported.
    """
    writer = _Writer(languages)
    start = writer.closed(writer.node(tag_format, "format", last=True), ())
    return "\n".join([f"start: {start or quote('')}", "TEXT: /(?s:.*)/", *writer.rules])


class _Writer:
    """Writes the rules of one grammar.

    Attributes:
        rules: beside `start`.
    """

    def __init__(self, languages: Languages) -> None:
        self.rules: list[str] = []
        self._languages = languages
        self._formats: Mapping[str, Callable[[dict[str, Any], str, bool], _Node]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "grammar": self._grammar,
            "regex": self._regex,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "plus": self._plus,
            "star": self._star,
            "repeat": self._repeat,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
        }

    def node(self, value: object, where: str, *, last: bool) -> _Node:
        """Translate a format.

        Args:
            value: the format.
            where: its place, for error messages.
            last: whether nothing follows it, so that free text may end it.
        """
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(kind, str):
            raise GrammarError(f"the key `{where}` must be an object with a `type`")
        write = self._formats.get(kind)
        if write is None:
            known = ", ".join(self._formats)
            raise GrammarError(f"`{where}.type` must be one of {known}. Given: {quote(kind[:60])}")
        return write(value, where, last)

    def closed(self, node: _Node, ends: Sequence[str]) -> str:
        """Return the expression for a node and one of the texts that may end it; none if nothing does."""
        end = _alternatives([quote(text) for text in ends]) if any(ends) else ""
        parts = [quote(node.head) if node.head else "", node.body]
        parts.append(self._until(node.tail, end) if node.tail else end)
        expression = _joined(*parts)
        if node.instead:
            return _alternatives([expression, self._until(node.instead, end)])
        return expression

    def _until(self, text: str, end: str) -> str:
        """Return the expression for free text up to the first of its ends."""
        return self._rule(f"{text} {end}", lazy=True) if end else text

    def _rule(self, expression: str, *, lazy: bool = False) -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def _terminal(self, expression: str) -> str:
        name = f"TERMINAL_{len(self.rules)}"
        self.rules.append(f"{name}: {expression}")
        return name

    def _text(self, excludes: Sequence[str], most: int | None = None) -> str:
        """Return the terminal of free text without some strings."""
        if not excludes and most is None:
            return "TEXT"
        base = "TEXT" if most is None else f"/(?s:.{{0,{most}}})/"
        return self._terminal(base + "".join(f" & ~(TEXT {quote(text)} TEXT)" for text in excludes))

    def _const_string(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        return _Node(head=_string(value, "value", where))

    def _json_schema(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        style = value.get("style", "json")
        if style != "json":
            raise GrammarError(f"`{where}.style` must be json")
        if "json_schema" not in value:
            raise GrammarError(f"`{where}.json_schema` is required")
        return _Node(body=self._languages.json(value["json_schema"], f"{where}.json_schema"))

    def _grammar(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        text = self._languages.grammar(_string(value, "grammar", where))
        return _Node(body=self._rule(f"%lark {{\n{text}\n}}"))

    def _regex(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        return _Node(body=self._terminal(self._languages.regex(_string(value, "pattern", where))))

    def _any_text(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        if value.get("max_tokens") is not None:
            raise GrammarError(f"`{where}.max_tokens` is not supported; use `max_chars`")
        most = value.get("max_chars")
        if most is not None:
            most = _count(value, "max_chars", where, _MOST_CHARACTERS)
        return _Node(tail=self._text(_strings(value, "excludes", where, required=False), most))

    def _sequence(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        elements = _list(value, "elements", where)
        head, body, text = "", "", ""
        for i, element in enumerate(elements):
            place = f"{where}.elements.{i}"
            node = self.node(element, place, last=last and i == len(elements) - 1)
            if text:
                if not node.head or node.instead:
                    raise GrammarError(
                        f"`{place}` must begin with a fixed string, since it follows free text"
                    )
                body = _joined(body, self._until(text, quote(node.head)), node.body)
            elif node.instead:
                if i < len(elements) - 1:
                    raise _not_last(place)
                return _Node(head=head, body=_joined(body, self.closed(node, ())))
            elif head or body:
                body = _joined(body, quote(node.head) if node.head else "", node.body)
            else:
                head, body = node.head, node.body
            text = node.tail
        return _Node(head, body, text)

    def _or(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        return _Node(
            body=_alternatives(
                [
                    self._fixed(element, f"{where}.elements.{i}", last=last)
                    for i, element in enumerate(_list(value, "elements", where))
                ]
            )
        )

    def _fixed(self, value: object, where: str, *, last: bool = False) -> str:
        """Return the expression for a format that ends by itself, or with the whole text."""
        node = self.node(value, where, last=last)
        if node.is_free and not last:
            raise _not_last(where)
        return self.closed(node, ()) or quote("")

    def _repeated(self, value: dict[str, Any], where: str, count: str) -> _Node:
        return _Node(body=f"({self._fixed(value.get('content'), f'{where}.content')}){count}")

    def _optional(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        return _Node(body=f"({self._fixed(value.get('content'), f'{where}.content', last=last)})?")

    def _plus(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        return self._repeated(value, where, "+")

    def _star(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        return self._repeated(value, where, "*")

    def _repeat(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        fewest = _count(value, "min", where, _MOST_REPETITIONS)
        if value.get("max") == -1:
            return self._repeated(value, where, f"{{{fewest},}}")
        most = _count(value, "max", where, _MOST_REPETITIONS)
        if most < fewest:
            raise GrammarError(f"`{where}.max` must be >= `min`. Given: {most} and {fewest}")
        return self._repeated(value, where, f"{{{fewest},{most}}}")

    def _tag(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        begin, rest = self._tag_parts(value, where, last=last)
        return _Node(head=begin, body=rest)

    def _tag_parts(
        self, value: dict[str, Any], where: str, *, last: bool = False
    ) -> tuple[str, str]:
        """Return the beginning of a tag and the expression for what follows it."""
        begin = _string(value, "begin", where)
        end = value.get("end")
        ends = [end] if isinstance(end, str) else end
        if not (isinstance(ends, list) and ends and all(isinstance(text, str) for text in ends)):
            raise GrammarError(f"`{where}.end` must be a string or a list of strings")
        node = self.node(value.get("content"), f"{where}.content", last=last and not any(ends))
        if node.is_free and not (all(ends) or (last and not any(ends))):
            raise GrammarError(f"`{where}.end` cannot be empty, since free text is before it")
        if any(ends) and not all(ends):
            return begin, _joined(
                self.closed(node, ()), f"({_alternatives([quote(e) for e in ends if e])})?"
            )
        return begin, self.closed(node, ends)

    def _tags(self, value: dict[str, Any], where: str) -> list[tuple[str, str]]:
        parts = []
        for i, tag in enumerate(_list(value, "tags", where)):
            place = f"{where}.tags.{i}"
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                raise GrammarError(f"`{place}` must be a tag")
            parts.append(self._tag_parts(tag, place))
        return parts

    def _triggered_tags(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        triggers = _strings(value, "triggers", where)
        tags = self._tags(value, where)
        found: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, (begin, rest) in enumerate(tags):
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise GrammarError(f"`{where}.tags.{i}.begin` starts with none of the triggers")
            remainder = begin[len(trigger) :]
            found[trigger].append(_joined(quote(remainder) if remainder else "", rest))
        for trigger, bodies in found.items():
            if not bodies:
                raise GrammarError(f"no tag begins with the trigger {quote(trigger)}")
        first = _alternatives([_joined(quote(begin), rest) for begin, rest in tags])
        return self._dispatched(
            value,
            where,
            [(trigger, _alternatives(bodies)) for trigger, bodies in found.items()],
            first=first if _flag(value, "at_least_one", where) else "",
            once=_flag(value, "stop_after_first", where),
        )

    def _dispatch(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        rules = []
        for i, rule in enumerate(_list(value, "rules", where)):
            if not (isinstance(rule, list) and len(rule) == 2 and _is_text(rule[0])):
                raise GrammarError(f"`{where}.rules.{i}` must be a list of a string and a format")
            rules.append((rule[0], self._fixed(rule[1], f"{where}.rules.{i}.1")))
        once = not _flag(value, "loop", where, default=True)
        return self._dispatched(value, where, rules, first="", once=once)

    def _dispatched(
        self,
        value: dict[str, Any],
        where: str,
        rules: Sequence[tuple[str, str]],
        *,
        first: str,
        once: bool,
    ) -> _Node:
        """Return the node for free text in which an expression follows each trigger.

        Args:
            value: the format, with the strings that the text excludes.
            where: its place.
            rules: triggers, and the expressions after them.
            first: the expression that the text begins with; empty for none.
            once: whether the text ends after the first expression.
        """
        if first and once:
            return _Node(body=first)
        for trigger, _ in rules:
            # A number ends at the byte after it. The library fails if that byte is a whole trigger.
            if len(trigger.encode()) == 1 and any(
                "%json" in b and b.endswith("}") for _, b in rules
            ):
                raise GrammarError(
                    f"`{where}`: a trigger must have two bytes or more where JSON ends a region. Given: "
                    + quote(trigger)
                )
        excludes = _strings(value, "excludes", where, required=False)
        text = self._text(excludes)
        dispatched = _alternatives(
            [_joined(self._until(text, quote(trigger)), body) for trigger, body in rules]
        )
        rest = self._text([*(trigger for trigger, _ in rules), *excludes])
        if once:
            return _Node(body=dispatched, instead=rest)
        return _Node(body=_joined(first, f"{self._rule(dispatched)}*"), tail=rest)

    def _tags_with_separator(self, value: dict[str, Any], where: str, last: bool) -> _Node:
        del last
        separator = _string(value, "separator", where)
        tags = [_joined(quote(b) if b else "", rest) for b, rest in self._tags(value, where)]
        tag = self._rule(_alternatives(tags))
        body = tag
        if not _flag(value, "stop_after_first", where):
            body = f"{tag} ({_joined(quote(separator) if separator else '', tag)})*"
        if not _flag(value, "at_least_one", where):
            body = f"({body})?"
        return _Node(body=body)


def _not_last(where: str) -> GrammarError:
    return GrammarError(
        f"`{where}` is free text: it must come last, or a fixed string or the `end` of a tag must follow it"
    )


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _alternatives(expressions: Sequence[str]) -> str:
    if len(expressions) == 1:
        return expressions[0]
    return "(" + " | ".join(expression or quote("") for expression in expressions) + ")"


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _string(value: dict[str, Any], key: str, where: str) -> str:
    found = value.get(key)
    if not isinstance(found, str):
        raise GrammarError(f"`{where}.{key}` must be a string")
    return found


def _list(value: dict[str, Any], key: str, where: str) -> list[Any]:
    found = value.get(key)
    if not (isinstance(found, list) and found):
        raise GrammarError(f"`{where}.{key}` must be a list, not empty")
    return found


def _strings(
    value: dict[str, Any], key: str, where: str, *, required: bool = True
) -> Sequence[str]:
    if not required and not value.get(key):
        return ()
    found = _list(value, key, where)
    if not all(_is_text(text) for text in found):
        raise GrammarError(f"`{where}.{key}` must be a list of strings, none of them empty")
    return found


def _flag(value: dict[str, Any], key: str, where: str, *, default: bool = False) -> bool:
    found = value.get(key)
    if found is None:
        return default
    if not isinstance(found, bool):
        raise GrammarError(f"`{where}.{key}` must be true or false")
    return found


def _count(value: dict[str, Any], key: str, where: str, most: int) -> int:
    found = value.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        raise GrammarError(f"`{where}.{key}` must be an integer from 0 to {most}")
    return found
