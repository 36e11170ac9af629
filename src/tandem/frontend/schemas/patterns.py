r"""Regular expressions of JSON schemas, written so that the grammar library matches them as JSON Schema means them.

```
 pattern ─ parse ─▶ expression of a whole string ─ bounded ─▶ with minLength and maxLength ─ json_pattern ─▶ text
```

JSON Schema searches in a string, by the rules of ECMA-262. The library matches whole strings, reads anchors and
lookaheads in the middle as empty, and writes quotes and line breaks into JSON as they are. So `parse` adds `.*` on each side without an
anchor, and `json_pattern` writes only classes and characters that a JSON string may contain unescaped. Where every
matching string needs an escape, such as in `^"a"$`, it writes the escapes.

Lookaround, back-references, word boundaries, flags and Unicode properties raise `ValueError`.
"""

import re
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from tandem.frontend.schemas.budget import Budget
from tandem.wire.generation import MAX_GRAMMAR_BYTES

_LAST = 0x10FFFF
_MAX_DEPTH, _MAX_PATTERN, _MAX_COUNT = 50, 8_192, 10_000
# The library fails to compile longer repetitions (0.2.8).
_MAX_REPEAT = 128
_SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
# Names of properties are told apart by this many characters.
_MAX_NAME = 64


class _Node:
    """What expressions are asked repeatedly, so that each function takes one look at each part."""

    @cached_property
    def size(self) -> int:
        """Number of parts and ranges."""
        match self:
            case Chars(ranges):
                return 1 + len(ranges)
            case Sequence(parts) | Either(parts):
                return 1 + sum(part.size for part in parts)
            case Repeat(part):
                return 1 + part.size
            case _:
                return 1

    @cached_property
    def has_anchor(self) -> bool:
        """Whether an anchor is left."""
        match self:
            case Sequence(parts) | Either(parts):
                return any(part.has_anchor for part in parts)
            case Repeat(part):
                return part.has_anchor
            case _:
                return isinstance(self, Anchor)

    @cached_property
    def width(self) -> tuple[int, int | None]:
        """The fewest and the most characters. Expressions without any string have (0, 0)."""
        match self:
            case Chars():
                return 1, 1
            case Sequence(parts):
                widths = [part.width for part in parts]
                highs = [high for _, high in widths if high is not None]
                return sum(low for low, _ in widths), sum(highs) if len(highs) == len(
                    widths
                ) else None
            case Either(parts):
                widths = [part.width for part in parts] or [(0, 0)]
                highs = [high for _, high in widths if high is not None]
                return min(low for low, _ in widths), max(highs) if len(highs) == len(
                    widths
                ) else None
            case Repeat(part, least, most):
                low, high = part.width
                return (
                    low * least,
                    0 if high == 0 else None if high is None or most is None else high * most,
                )
            case _:
                return 0, 0


@dataclass(frozen=True)
class Chars(_Node):
    """One character. Ranges of code points: sorted, inclusive, disjoint."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sequence(_Node):
    """Expressions one after the other."""

    parts: tuple["Expression", ...] = ()


@dataclass(frozen=True)
class Either(_Node):
    """One of several expressions."""

    options: tuple["Expression", ...]


@dataclass(frozen=True)
class Repeat(_Node):
    """An expression, repeated. `most` None: without limit."""

    part: "Expression"
    least: int
    most: int | None


@dataclass(frozen=True)
class Anchor(_Node):
    """`^` or `$`. `parse` leaves none."""

    sign: str


Expression: TypeAlias = Chars | Sequence | Either | Repeat | Anchor


def _chars(*ranges: tuple[int, int]) -> Chars:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return Chars(tuple(merged))


def _one_of(text: str) -> Chars:
    return _chars(*((ord(char), ord(char)) for char in text))


def _not(chars: Chars) -> Chars:
    starts = [0, *(high + 1 for _, high in chars.ranges)]
    ends = [*(low - 1 for low, _ in chars.ranges), _LAST]
    return Chars(tuple((a, b) for a, b in zip(starts, ends, strict=True) if a <= b))


def _both(left: Chars, right: Chars) -> Chars:
    pairs = ((max(a, c), min(b, d)) for a, b in left.ranges for c, d in right.ranges)
    return Chars(tuple((low, high) for low, high in pairs if low <= high))


ALL = _chars((0, _LAST))
ANY = Repeat(ALL, 0, None)
_DIGIT = _chars((48, 57))
_WORD = _chars((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE = _one_of(
    "\t\n\v\f\r \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
    "\u202f\u205f\u3000\ufeff"
)
_SETS = {
    "d": _DIGIT,
    "w": _WORD,
    "s": _SPACE,
    "D": _not(_DIGIT),
    "W": _not(_WORD),
    "S": _not(_SPACE),
}
_DOT = _not(_one_of("\n\r\u2028\u2029"))
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
# What a JSON string may contain as it is.
_SAFE = _not(_chars((0, 31), (34, 34), (92, 92)))
_ESCAPES = {'"': '"', "\\": "\\\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def parse(pattern: str) -> Expression:
    """Return the expression of all strings in which the pattern is found.

    Raises:
        ValueError: The pattern is invalid, or uses what cannot be served.
    """
    if len(pattern) > _MAX_PATTERN:
        raise ValueError(f"is longer than {_MAX_PATTERN} characters")
    reader = _PatternReader(pattern)
    found = reader.either(0)
    if reader.at < len(pattern):
        raise ValueError("has a ) without a (")
    return _whole(found, open_start=True, open_end=True)


class _PatternReader:
    """Reads the syntax of ECMA-262 that other dialects read alike."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, pattern: str) -> re.Match[str] | None:
        match = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match

    def either(self, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise ValueError(f"nests deeper than {_MAX_DEPTH} groups")
        options = [self.sequence(depth)]
        while self.take(r"\|"):
            options.append(self.sequence(depth))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def sequence(self, depth: int) -> Expression:
        parts = list[Expression]()
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self.repeated(self.atom(depth)))
        return Sequence(tuple(parts))

    def repeated(self, part: Expression) -> Expression:
        if (sign := self.take(r"[*+?]")) is not None:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign[0]]
        elif (bounds := self.take(r"\{([0-9]{1,9})(,?)([0-9]{0,9})\}")) is not None:
            least = int(bounds[1])
            most = int(bounds[3]) if bounds[3] else None if bounds[2] else least
        else:
            return part
        self.take(r"\?")  # a lazy quantifier matches the same strings
        if isinstance(part, Anchor) or self.take(r"[*+?]"):
            raise ValueError("repeats what cannot be repeated")
        if max(least, most or 0) > _MAX_COUNT:
            raise ValueError(f"repeats more than {_MAX_COUNT} times")
        if most is not None and most < least:
            raise ValueError("has a repetition whose bounds are out of order")
        return Repeat(part, least, most)

    def atom(self, depth: int) -> Expression:
        if self.take(r"\((\?:|\?P?<(?![=!])[^>]*>|(?!\?))"):
            inner = self.either(depth + 1)
            if not self.take(r"\)"):
                raise ValueError("has a ( without a )")
            return inner
        if self.take(r"\(\?<?[=!]"):
            raise ValueError("uses lookaround, which is not supported")
        if self.take(r"\(\?"):
            raise ValueError("uses flags of a group, which are not supported")
        if self.take(r"\["):
            return self.char_class()
        char = self.text[self.at]
        if char == "\\":
            return self.escape()
        self.at += 1
        if char in "^$":
            return Anchor(char)
        if char == ".":
            return _DOT
        if char in "*+?{":
            raise ValueError(f"has a {char} that repeats nothing")
        return _one_of(char)

    def escape(self, *, in_class: bool = False) -> Chars:
        if (
            code := self.take(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]+)\})")
        ) is not None:
            return self.code_point(int(code[1] or code[2] or code[3], 16))
        if (found := self.take(r"\\(.)")) is None:
            raise ValueError("ends with a \\")
        char = found[1]
        if char in _SETS:
            return _SETS[char]
        if char in _CONTROLS and not (char == "0" and self.take(r"[0-9]")):
            return _one_of(_CONTROLS[char])
        if char == "b" and in_class:
            return _one_of("\b")
        if char.isascii() and char.isalnum():
            raise ValueError(f"uses \\{char}, which is not supported")
        return _one_of(char)

    def code_point(self, code: int) -> Chars:
        if (
            0xD800 <= code < 0xDC00
            and (low := self.take(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")) is not None
        ):
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > _LAST:
            raise ValueError("has an escape beyond Unicode")
        return _chars((code, code))

    def char_class(self) -> Chars:
        is_negated = self.take(r"\^") is not None
        if self.take(r"\]") or self.take(r"\[:"):
            raise ValueError(
                "has a class that dialects read differently; escape its first character"
            )
        ranges = list[tuple[int, int]]()
        while not self.take(r"\]"):
            first = self.class_atom()
            if self.take(r"-(?!\])"):
                last = self.class_atom()
                (low, high), (start, end) = first.ranges[0], last.ranges[-1]
                is_set = len(first.ranges) > 1 or len(last.ranges) > 1
                if is_set or low != high or start != end:  # next to a set, a hyphen is a character
                    ranges += [*first.ranges, *last.ranges]
                    first = _one_of("-")
                elif start < low:
                    raise ValueError("has a class with an invalid range")
                else:
                    first = _chars((low, end))
            ranges += first.ranges
        return _not(_chars(*ranges)) if is_negated else _chars(*ranges)

    def class_atom(self) -> Chars:
        if self.at >= len(self.text):
            raise ValueError("has a [ without a ]")
        if self.text[self.at] == "\\":
            return self.escape(in_class=True)
        self.at += 1
        return _one_of(self.text[self.at - 1])


def _whole(node: Expression, *, open_start: bool, open_end: bool) -> Expression:
    """Resolve the anchors of an expression. An open side without an anchor may have any text before or after it."""
    if isinstance(node, Either):
        return Either(
            tuple(_whole(each, open_start=open_start, open_end=open_end) for each in node.options)
        )
    parts = list(node.parts) if isinstance(node, Sequence) else [node]
    if len(parts) == 1 and isinstance(parts[0], Sequence | Either):
        return _whole(parts[0], open_start=open_start, open_end=open_end)
    while parts and parts[0] == Anchor("^"):
        parts, open_start = parts[1:], False
    while parts and parts[-1] == Anchor("$"):
        parts, open_end = parts[:-1], False
    if len(parts) > 1:
        if isinstance(parts[0], Sequence | Either) and parts[0].has_anchor:
            parts[0], open_start = _whole(parts[0], open_start=open_start, open_end=False), False
        if isinstance(parts[-1], Sequence | Either) and parts[-1].has_anchor:
            parts[-1], open_end = _whole(parts[-1], open_start=False, open_end=open_end), False
    elif parts and isinstance(parts[0], Sequence | Either):
        return _whole(parts[0], open_start=open_start, open_end=open_end)
    if any(part.has_anchor for part in parts):
        raise ValueError("has ^ or $ in the middle, which is not supported")
    if not parts and open_start and open_end:
        return ANY
    return Sequence((*[ANY] * open_start, *parts, *[ANY] * open_end))


# ── lengths ──────────────────────────────────────────────────────────────────────────────────────


def bounded(node: Expression, least: int, most: int | None) -> Expression | None:
    """Return the strings of an expression that have `least` to `most` characters. None: it cannot be written."""
    low, high = node.width
    if least <= low and (most is None or (high is not None and high <= most)):
        return node
    found: Expression | None = None
    match node:
        case _ if max(least, most or 0) > _MAX_COUNT:
            pass
        case Chars():
            found = Either(())
        case Either(options):
            found = _bounded_either(options, least, most)
        case Repeat(part, 0, 1):
            found = _bounded_either((Sequence(), part), least, most)
        case Repeat(part) if part.width[0] == part.width[1]:
            found = _bounded_repeat(node, least, most)
        case Sequence(parts):
            found = _bounded_sequence(parts, least, most)
        case _:
            pass
    return found


def _bounded_either(
    options: tuple[Expression, ...], least: int, most: int | None
) -> Expression | None:
    found = [bounded(option, least, most) for option in options]
    return None if None in found else Either(tuple(each for each in found if each is not None))


def _bounded_repeat(node: Repeat, least: int, most: int | None) -> Expression:
    width = max(1, node.part.width[0])
    fewest = max(node.least, -(-least // width))
    limits = [
        limit for limit in (node.most, None if most is None else most // width) if limit is not None
    ]
    limit = min(limits, default=None)
    return Either(()) if limit is not None and fewest > limit else Repeat(node.part, fewest, limit)


def _bounded_sequence(
    parts: tuple[Expression, ...], least: int, most: int | None
) -> Expression | None:
    widths = [part.width for part in parts]
    varied = [index for index, (low, high) in enumerate(widths) if low != high]
    if len(varied) > 1:
        return None
    rest = sum(low for index, (low, _) in enumerate(widths) if index not in varied)
    if not varied or (most is not None and most < rest):
        return Either(())
    at = varied[0]
    inner = bounded(parts[at], max(0, least - rest), None if most is None else most - rest)
    return None if inner is None else Sequence((*parts[:at], inner, *parts[at + 1 :]))


# ── matching ─────────────────────────────────────────────────────────────────────────────────────


class Matcher:
    """Reads patterns once each, and matches whole texts in polynomial time. Both spend the budget."""

    def __init__(self, budget: Budget) -> None:
        self._spend = budget.spend
        self._expressions = dict[str, Expression]()

    def parse(self, pattern: str) -> Expression:
        """Return the expression of a pattern, as `parse` does."""
        if (found := self._expressions.get(pattern)) is None:
            self._spend(5 * len(pattern))
            found = self._expressions[pattern] = parse(pattern)
        return found

    def matches(self, node: Expression, text: str) -> bool:
        """Return whether an expression matches a text."""
        return len(text) in self._ends(node, text, {0})

    def _ends(self, node: Expression, text: str, starts: Set[int]) -> Set[int]:
        self._spend(1 + len(starts))
        match node:
            case Chars(ranges):
                self._spend(len(starts) * len(ranges) // 8)
                return {
                    at + 1
                    for at in starts
                    if at < len(text) and any(low <= ord(text[at]) <= high for low, high in ranges)
                }
            case Sequence(parts):
                for part in parts:
                    starts = self._ends(part, text, starts)
            case Either(parts):
                return set[int]().union(*(self._ends(part, text, starts) for part in parts))
            case Repeat():
                return self._ends_of_repeat(node, text, starts)
            case _:
                pass
        return starts

    def _ends_of_repeat(self, node: Repeat, text: str, starts: Set[int]) -> Set[int]:
        # Positions only grow, so both loops reach a fixed point within the text's length.
        for _ in range(node.least):
            after = self._ends(node.part, text, starts)
            if after == starts:
                break
            starts = after
        reached, turns = set(starts), 0
        while starts and (node.most is None or turns < node.most - node.least):
            starts, turns = self._ends(node.part, text, starts) - reached, turns + 1
            reached |= starts
        return reached


def literal_prefix(node: Expression) -> str:
    """Return characters with which every string of an expression starts."""
    prefix = ""
    for part in node.parts if isinstance(node, Sequence) else (node,):
        match part:
            case Chars(((low, high),)) if low == high:
                prefix += chr(low)
            case _:
                return prefix
    return prefix


def other_than(names: Collection[str], depth: int = 0) -> Expression:
    """Return an expression of the strings that are none of these, except some that share 64 characters with one."""
    heads = dict[str, list[str]]()
    for name in filter(None, names):
        heads.setdefault(name[0], []).append(name[1:])
    options: list[Expression] = [] if "" in names else [Sequence()]
    options.append(Sequence((_not(_one_of("".join(heads))), ANY)))
    if depth < _MAX_NAME:
        options += [
            Sequence((_one_of(head), other_than(tails, depth + 1))) for head, tails in heads.items()
        ]
    return Either(tuple(options))


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def json_pattern(node: Expression) -> str | None:
    """Return a pattern of JSON strings' contents for the grammar library. None: the expression has no string.

    Raises:
        ValueError: The pattern would be too large.
    """
    # The library drops strings with an escape unless all have one.
    plain = _written(node, escapes=False)
    return _written(node, escapes=True) if plain is None else plain


def _written(node: Expression, *, escapes: bool) -> str | None:
    match node:
        case Chars():
            return _alternatives(_char_options(node, escapes=escapes))
        case Sequence(parts):
            texts = [_written(part, escapes=escapes) for part in parts]
            return None if None in texts else "".join(filter(None, texts))
        case Either(parts):
            found = (_written(part, escapes=escapes) for part in parts)
            return _alternatives(text for text in found if text is not None)
        case Repeat(part, least, most):
            text = _written(part, escapes=escapes)
            if not text or most == 0:
                return "" if least == 0 or text == "" else None
            text = text if isinstance(part, Chars) and not escapes else f"(?:{text})"
            if len(text) * (1 + max(least, most or 0) // _MAX_REPEAT) > MAX_GRAMMAR_BYTES:
                raise ValueError("repeats too much; use smaller repetition bounds")
            return "".join(text + sign for sign in _quantifiers(least, most))
        case _:
            return ""


def _quantifiers(least: int, most: int | None) -> Iterator[str]:
    """Return the quantifiers of copies of an expression that repeat it together."""
    while least > _MAX_REPEAT:
        yield f"{{{_MAX_REPEAT}}}"
        least, most = least - _MAX_REPEAT, None if most is None else most - _MAX_REPEAT
    while most is not None and most > _MAX_REPEAT:
        yield f"{{{least},{_MAX_REPEAT}}}"
        least, most = 0, most - _MAX_REPEAT
    bounds = f"{{{least},{'' if most is None else most}}}"
    yield _SIGNS.get((least, most), bounds)


def _alternatives(texts: Iterator[str]) -> str | None:
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < 2:
        return distinct[0] if distinct else None
    return f"(?:{'|'.join(distinct)})"


def _char_options(chars: Chars, *, escapes: bool) -> Iterator[str]:
    safe = _both(chars, _SAFE).ranges
    if safe:
        is_one = len(safe) == 1 and safe[0][0] == safe[0][1]
        text = "".join(
            _code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in safe
        )
        yield text if is_one else f"[{text}]"
    if not escapes:
        return
    for low, high in _both(chars, _chars((0, 31), (34, 34), (92, 92))).ranges:
        for char in map(chr, range(low, high + 1)):
            if char in _ESCAPES:
                yield rf"\\{_ESCAPES[char]}"
            elif not safe:
                yield rf"\\u{ord(char):04x}"


def _code(code: int) -> str:
    char = chr(code)
    if code > 126:
        return rf"\u{{{code:x}}}"
    return char if char.isalnum() or char in " !\"#%&',:;<=>@_`~" else f"\\{char}"


_DOT_OUTSIDE_CLASS = re.compile(r"(\\.|\[(?:\\.|[^\]\\])*\])|\.", re.DOTALL)


def without_line_breaks(regex: str) -> str:
    """Return a regular expression whose dots match no line break, for a library whose dots match everything."""
    return _DOT_OUTSIDE_CLASS.sub(lambda match: match[1] or r"[^\n\r\u2028\u2029]", regex)
