"""The formats of strings that structured output holds, as regular expressions.

The grammar library has its own, but those of `email` and `json-pointer` allow texts that are not JSON, and it
ignores lengths beside all of them.
"""

from collections.abc import Mapping
from functools import cache
from typing import Final

from tandem.frontend.schemas.patterns import Expression, parse

_LEAP_YEAR = r"(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)"
_DAY = (
    rf"(?:{_LEAP_YEAR}-02-29|\d{{4}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])))"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_CLOCK = r"(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_DATES = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = (
    r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"  # a limit of 63 would take half a second to compile
)
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_H16 = "[0-9A-Fa-f]{1,4}"
_PERCENT = "%[0-9A-Fa-f]{2}"
_HOST = rf"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_PERCENT})*"
_SEGMENT = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PERCENT})"
_TAIL = rf"(?:\?(?:[/?]|{_SEGMENT})*)?(?:#(?:[/?]|{_SEGMENT})*)?"
_AUTHORITY = (
    rf"//(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_PERCENT})*@)?{_HOST}(?::\d*)?(?:/{_SEGMENT}*)*"
)
_ROOTED = rf"/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?"
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]*:"
_VARIABLE = rf"(?:\w|{_PERCENT})+(?:\.(?:\w|{_PERCENT})+)*(?:\*|:[1-9]\d{{0,3}})?"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"

PATTERNS: Final[Mapping[str, str]] = {
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
    "duration": rf"^P(?:\d+W|{_DATES}(?:T{_CLOCK})?|T{_CLOCK})$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": "^(?:"
    + "|".join(
        [f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{1,7}}:", f":(?:(?::{_H16}){{1,7}}|:)"]
        + [f"(?:{_H16}:){{1,{7 - count}}}(?::{_H16}){{1,{count}}}" for count in range(1, 7)]
    )
    + ")$",
    "uri": f"^{_SCHEME}(?:{_AUTHORITY}|{_ROOTED}|{_SEGMENT}+(?:/{_SEGMENT}*)*){_TAIL}$",
    "uri-reference": f"^(?:(?:{_SCHEME})?(?:{_AUTHORITY}|{_ROOTED})|{_SCHEME}{_SEGMENT}+(?:/{_SEGMENT}*)*)?{_TAIL}$",
    "uri-template": rf"^(?:[A-Za-z0-9!#$&()*+,./:;=?@_~\[\]-]|{_PERCENT}|"
    rf"\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9]\d*)(?:#|{_POINTER})$",
}


@cache
def expression_of(name: str) -> Expression:
    """Return the expression of a format's pattern."""
    return parse(PATTERNS[name])
