"""What Tessera answers to a name of a peer: the rows of the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from server.cli.peers.forms import same

if TYPE_CHECKING:
    from server.cli.peers.forms import Form
    from server.cli.peers.subjects import Subject

Takes = Literal["value", "nothing", "optional"]


class Row(NamedTuple):
    """The answer to some names of one peer. Exactly one of `setting`, `always`, `near` and `subject` is set.

    Attributes:
        flags: names on the command line and in a configuration file, separated by spaces.
        variables: names in the environment, separated by spaces.
        setting: understood: the setting of Tessera with the same meaning.
        form: makes the text of the setting from the text of the peer.
        always: without effect: what is so whether the name is given or not.
        only: texts for which that holds, separated by spaces; empty for all.
        either: whether the opposite has no effect either.
        near: answered with the names of Tessera that come near.
        subject: refused: what Tessera does not have.
        takes: what follows a flag: a value, nothing (it is true or false), or a value that may be absent.
        needs: a variable without which these variables are not read.
    """

    flags: str = ""
    variables: str = ""
    setting: str = ""
    form: Form = same
    always: str = ""
    only: str = ""
    either: bool = False
    near: str = ""
    subject: Subject | None = None
    takes: Takes = "value"
    needs: str = ""

    def means(self, other: Row) -> bool:
        """Whether another row gives the same answer."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("setting", "form", "always", "only", "near", "subject")
        )


class Peer(NamedTuple):
    """A server whose names are known.

    Attributes:
        name: as its project spells it.
        rows: of its table.
        prefix: with which its variables begin; empty if they have none in common.
        variables_are_flags: whether a variable of what Tessera does not have is as explicit as a flag.
    """

    name: str
    rows: tuple[Row, ...]
    prefix: str = ""
    variables_are_flags: bool = False


def understood(  # noqa: D103 - rows; the attributes are documented above
    setting: str,
    flags: str = "",
    variables: str = "",
    *,
    form: Form = same,
    takes: Takes = "value",
    needs: str = "",
) -> Row:
    return Row(
        setting=setting, flags=flags, variables=variables, form=form, takes=takes, needs=needs
    )


def always(  # noqa: D103 - as above
    reason: str,
    flags: str = "",
    variables: str = "",
    *,
    only: str = "",
    takes: Takes = "nothing",
    either: bool = False,
) -> Row:
    return Row(
        always=reason, flags=flags, variables=variables, only=only, takes=takes, either=either
    )


def near(  # noqa: D103 - as above
    text: str, flags: str = "", variables: str = "", *, takes: Takes = "value"
) -> Row:
    return Row(near=text, flags=flags, variables=variables, takes=takes)


def absent(  # noqa: D103 - as above
    subject: Subject, flags: str = "", variables: str = "", *, takes: Takes = "optional"
) -> Row:
    return Row(subject=subject, flags=flags, variables=variables, takes=takes)
