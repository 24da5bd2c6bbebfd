"""Formats of strings that grammars enforce; every other format is an annotation."""

from __future__ import annotations

from typing import Final

_DATE: Final = (
    r"(?:[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])))"
)
_TIME: Final = (
    r"(?:(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d))"
)
_CLOCK: Final = r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))"
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?"
_HOST: Final = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE: Final = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4: Final = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP: Final = r"[0-9A-Fa-f]{1,4}"
_IPV6: Final = "|".join(
    [
        rf"{_GROUP}(?::{_GROUP}){{7}}",
        rf"::(?:{_GROUP}(?::{_GROUP}){{0,6}})?",
        *(
            rf"{_GROUP}(?::{_GROUP}){{{left - 1}}}::(?:{_GROUP}(?::{_GROUP}){{0,{6 - left}}})?"
            for left in range(1, 7)
        ),
        rf"{_GROUP}(?::{_GROUP}){{6}}::",
    ]
)
_ATOM: Final = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
_PATH: Final = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|%[0-9A-Fa-f]{2})"
_TAIL: Final = rf"(?:\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?"

PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": (rf"^P(?:\d+W|{_CLOCK}|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D){_CLOCK}?)$"),
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_HOST}$",
    "hostname": f"^{_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": r"^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "uri": (
        rf"^[A-Za-z][A-Za-z0-9+.\-]*:(?://{_HOST}(?::\d{{1,4}})?(?:/{_PATH}*)*|{_PATH}+(?:/{_PATH}+)*)"
        rf"{_TAIL}$"
    ),
}
"""By format: a pattern that only texts of the format match, though not all of them."""
