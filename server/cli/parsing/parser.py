"""The parser of all commands: argparse with suggestions for misspelled names and a help text that fits a terminal.

Names of other servers are never taken for misspelled ones: `server.cli.peers` has them.

The only module that uses private names of argparse.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from server.cli.peers.values import is_flag

if TYPE_CHECKING:
    from server.cli.peers.reading import Reading

_WIDEST = 100
_SHORT = re.compile(r"(-[a-z]+)([0-9]+)")
PEERS = "names of peers"
"""Where parsed arguments keep what flags of other servers said; absent if there were none."""
SEVERAL = "several words"
"""Where parsed arguments keep the flags that several words follow; absent if there are none."""
BOOLEAN = ("true", "false")
_BOOLEANS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off", "t", "f", "y", "n"})


class HelpFormatter(argparse.HelpFormatter):
    """Fits the help to the terminal, up to 100 columns. Descriptions keep their paragraphs, and indented lines."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDEST, shutil.get_terminal_size().columns) - 2
        super().__init__(prog, max_help_position=28, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap the paragraphs of a description; one with indented lines is a table and stays as it is."""
        parts = text.split("\n\n")
        for index, part in enumerate(parts):
            if not any(line.startswith("  ") for line in part.splitlines()):
                parts[index] = textwrap.fill(
                    part, width, initial_indent=indent, break_on_hyphens=False
                )
        return "\n\n".join(parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap a help text without breaking the names of flags at their hyphens."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class SeveralWords(NamedTuple):
    """A flag of a list, and the words that follow it.

    Attributes:
        flag: as it was given.
        setting: the flag of the same setting.
        words: two or more.
    """

    flag: str
    setting: str
    words: list[str]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and suggest the most similar name.

    A flag of `BOOLEAN` values may be given without one, for true; `--no-` before its name means false.
    Positional arguments that are optional may stand before, between and after the flags. All words that follow a flag
    of a list are its values, as in vLLM, where the command has no positional argument but the model.

    Attributes:
        takes_settings: whether flags of other servers are understood, since this command has their settings.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - those of argparse
        defaults: dict[str, Any] = {"allow_abbrev": False, "formatter_class": HelpFormatter}
        super().__init__(**defaults | options)
        self._booleans: set[str] = set()
        self._checked_later: set[str] = set()
        self._lists: dict[str, Callable[[str], bool]] = {}
        self.takes_settings = False

    def add_listed(
        self,
        flag: str,
        values: Sequence[str],
        group: argparse._ArgumentGroup | None = None,
        **options: Any,  # noqa: ANN401 - those of argparse
    ) -> None:
        """Add a flag whose values the help and the completion list, and the caller checks.

        Args:
            flag: with two hyphens.
            values: that it takes; `BOOLEAN` makes it a flag of true or false.
            group: that the help shows it in.
            options: of `add_argument`.
        """
        action = (group or self).add_argument(flag, choices=values, **options)
        self._checked_later.add(action.dest)
        if values is BOOLEAN:
            self._booleans.add(flag)

    def add_list(
        self,
        flag: str,
        may_be_value: Callable[[str], bool],
        group: argparse._ArgumentGroup,
        **options: Any,  # noqa: ANN401 - those of argparse
    ) -> None:
        """Add a flag that takes several values, with commas or spaces between them, and may be repeated.

        Args:
            flag: with two hyphens.
            may_be_value: whether a word has the form of a value.
            group: that the help shows it in.
            options: of `add_argument`.
        """
        group.add_argument(flag, action="append", **options)
        self._lists[flag] = may_be_value

    def walk(self) -> Iterator[argparse.Action]:
        """Yield all arguments of this command and of the commands below it."""
        for action in self._actions:
            yield action
            if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - this module wraps them
                for parser in action.choices.values():
                    yield from parser.walk()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; exits with status 2 and one line on standard error if one is wrong or unknown.

        argparse calls this for the parser of a command too, which therefore reports its own errors.
        """
        words, several = self._with_commas(sys.argv[1:] if args is None else list(args))
        words, peers = self._without_peers(words)
        parsed, rest = super().parse_known_args(self._with_values(words), namespace)
        if peers is not None:
            setattr(parsed, PEERS, peers)
        if several:
            setattr(parsed, SEVERAL, several)
        if unknown := next((word for word in rest if word.startswith("-") and word != "-"), None):
            flag = unknown.partition("=")[0]
            if flag in self._known_flags():
                where = (
                    "takes no value"
                    if "=" in unknown
                    else "follows --, after which no flag is read"
                )
                self.error(f"{flag} {where}")
            self.error(f"unknown flag {flag}{self._flag_hint(flag)}")
        self._fill_positionals(parsed, rest)
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Print an error and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {message.removeprefix('argument ')}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401 - as in argparse
        """Raise an error that lists the choices, and suggests one for a misspelled command."""
        if action.choices is None or value in action.choices or action.dest in self._checked_later:
            return
        choices = [str(choice) for choice in action.choices]
        if action.option_strings:
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(choices)}")
        hint = did_you_mean(str(value), choices) or f"; the {action.dest}s are {', '.join(choices)}"
        self.error(f"unknown {action.dest} {value!r}{hint}")

    def _with_commas(self, words: list[str]) -> tuple[list[str], list[SeveralWords]]:
        """Join the words that follow a flag of a list."""
        several: list[SeveralWords] = []
        if not self._lists or len(self._get_positional_actions()) > 1:
            return words, several
        result: list[str] = []
        index = 0
        while index < len(words) and words[index] != "--":
            word = words[index]
            result.append(word)
            index += 1
            if not is_flag(word) or (setting := self._list_of(word)) is None:
                continue
            values = words[index : index + 1]
            while (end := index + len(values)) < len(words):
                if is_flag(words[end]) or not self._lists[setting](words[end]):
                    break
                values.append(words[end])
            if len(values) > 1 and not is_flag(values[0]):
                several.append(SeveralWords(word, setting, values))
                result.append(",".join(values))
                index += len(values)
        return result + words[index:], several

    def _list_of(self, word: str) -> str | None:
        """Return the flag of the list that a flag sets, which may be of another server; None if it sets none."""
        name = word.replace("_", "-") if word.startswith("--") else word
        if name in self._lists:
            return name
        if name.partition("=")[0] in self._known_flags():
            return None
        from server.cli.peers.table import find_flag  # noqa: PLC0415 - only where a name is unknown

        settings = (f"--{it.row.setting.replace('_', '-')}" for it in find_flag(word))
        return next((it for it in settings if it in self._lists), None)

    def _without_peers(self, words: list[str]) -> tuple[list[str], Reading | None]:
        """Take flags of other servers out of the words, if there are unknown flags; exits if one is refused."""
        known = self._known_flags()
        if all(word.partition("=")[0] in known for word in words if word.startswith("-")):
            return words, None
        if self._subparsers is not None:
            self._check_first(words[0].partition("=")[0], known)
            return words, None
        from server.cli.peers.reading import PeerNameError  # noqa: PLC0415 - only where a name is unknown
        from server.cli.peers.words import find_foreign, take_out  # noqa: PLC0415 - as above

        if not self.takes_settings:
            if (word := find_foreign(words, known)) and len(word) > 2:
                self.error(f"unknown flag {word}; `{self.prog} --help` lists the flags")
            return words, None
        try:
            left, reading = take_out(words, known)
        except PeerNameError as error:
            self.error(str(error))
        return left, reading if reading.notes or reading.given else None

    def _check_first(self, word: str, known: set[str]) -> None:
        """Exit with an error if an unknown flag stands where a command must."""
        if word.startswith("-") and word not in known:
            if hint := did_you_mean(word, known):
                self.error(f"unknown flag {word}{hint}")
            actions = [it for it in self._actions if isinstance(it, argparse._SubParsersAction)]  # noqa: SLF001 - as in `walk`
            command = next(iter(actions[0].choices))
            self.error(
                f"{word} follows a command, as in `{self.prog} {command} {word}`; "
                f"`{self.prog} --help` lists them"
            )

    def _known_flags(self) -> set[str]:
        return set(self._option_string_actions) | {"--no-" + name[2:] for name in self._booleans}

    def _with_values(self, args: list[str]) -> list[str]:
        """Give boolean flags without a value theirs, so that a positional argument may follow."""
        result: list[str] = []
        for index, word in enumerate(args):
            if word == "--":
                return result + args[index:]
            following = args[index + 1].lower() if index + 1 < len(args) else ""
            # A number is no model, but a wrong value, such as the sizes of `--cuda-graphs 1,2` in another server.
            is_value = following in _BOOLEANS or following.replace(",", "").isdigit()
            if word in self._booleans and not is_value:
                result.append(f"{word}=true")
            elif word.startswith("--no-") and "--" + word[5:] in self._booleans:
                if following in BOOLEAN:  # which would be the model
                    self.error(f"{word} takes no value, but {args[index + 1]!r} follows it")
                result.append(f"--{word[5:]}=false")
            else:
                result.append(word)
        return result

    def _fill_positionals(self, parsed: argparse.Namespace, rest: list[str]) -> None:
        """Assign words to optional positional arguments, which argparse all takes to be absent at the first word."""
        empty = [
            action
            for action in self._get_positional_actions()
            if action.nargs == "?" and getattr(parsed, action.dest, None) is None
        ]
        if len(rest) > len(empty):
            self.error(f"unexpected argument {rest[len(empty)]!r}")
        for action, word in zip(empty, rest, strict=False):
            setattr(parsed, action.dest, word)

    def _flag_hint(self, flag: str) -> str:
        if (short := _SHORT.fullmatch(flag)) and self.takes_settings:
            from server.cli.peers.table import find_flag  # noqa: PLC0415 - only where a name is unknown

            if find_flag(short[1]):
                return f"; the value of {short[1]} is a word of its own: {short[1]} {short[2]}"
        known = [name for name in sorted(self._known_flags()) if name.startswith("--")]
        hint = did_you_mean(flag.replace("_", "-").lower(), known)
        return hint or f"; `{self.prog} --help` lists the flags"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known word that a word is a misspelling of; empty if there is none."""
    bare = word.lstrip("-")
    distance, nearest = min(((_edits(bare, it.lstrip("-")), it) for it in known), default=(99, ""))
    # One edit in a short word, and one more for every six letters.
    return f"; did you mean {nearest}?" if distance <= 1 + len(bare) // 6 else ""


def _edits(first: str, second: str) -> int:
    """Count the letters to insert, drop, replace or exchange with the next that make one word of the other."""
    rows = [list(range(len(second) + 1))]
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            replaced = rows[i - 1][j - 1] + (letter != other)
            row.append(min(rows[i - 1][j] + 1, row[j - 1] + 1, replaced))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                row[j] = min(row[j], rows[i - 2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
