"""Incremental parser of a list of calls in Python's syntax, such as `[f(city="Rome", days=2), g()]`. Pure.

A call is returned when it is complete, because Python's literals have to be converted to JSON.
"""

import ast
import json
import re

from typing_extensions import override

from tandem.frontend.replies.call_scanner import MAX_DEPTH, MAX_HEAD, CallBegin, ScanEvent

_CLOSERS = {"(": ")", "[": "]", "{": "}"}
# Models write JSON's literals as well.
_LITERALS = {"true": True, "false": False, "null": None}
_RUN = re.compile(r"""[^"'()\[\]{}\\\n]+""")


class PythonScanner:
    """Parses a list of calls from its opening bracket on. A `Scanner`."""

    def __init__(self) -> None:
        self.rest: str | None = None
        self.is_broken = False
        self._held = list[str]()
        self._call = list[str]()  # text of the open call
        self._open = list[str]()  # closing brackets of all open brackets
        self._quote = ""  # quote of the open string
        self._is_escaped = self._has_call = False

    @property
    def held(self) -> str:
        """As in `Scanner`."""
        return "".join(self._held)

    def push(self, text: str) -> list[ScanEvent]:
        """As in `Scanner`."""
        events: list[ScanEvent] = []
        at = 0
        while at < len(text) and self.rest is None:
            run = None if self._is_escaped or len(self._open) < 2 else _RUN.match(text, at)
            taken = run[0] if run is not None else text[at]
            at += len(taken)
            self._held.append(taken)
            if run is not None:
                self._call.append(taken)
            elif not self._take(taken, events):
                self.rest, self.is_broken = text[at:], True
            elif not self._open:
                self.rest, self._held = text[at:], []
        return events

    def end(self) -> list[ScanEvent]:
        """As in `Scanner`."""
        if self.rest is None:
            self.rest, self.is_broken = "", bool(self._open)
        return []

    def _take(self, char: str, events: list[ScanEvent]) -> bool:
        """Take one character. False: the text is no list of calls."""
        if not self._open:
            self._open = ["]"]
            return char == "["
        if self._quote:
            return self._in_string(char)
        if len(self._open) == 1:
            return self._between(char)
        if char in _CLOSERS:
            self._open.append(_CLOSERS[char])
        elif char in ")]}":
            if self._open.pop() != char:
                return False
        elif char in "\"'":
            self._quote = char
        self._call.append(char)
        if len(self._open) == 1:
            return self._end_call(events)
        return len(self._open) <= MAX_DEPTH

    def _in_string(self, char: str) -> bool:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""
        # Models write raw line breaks into strings.
        self._call.append("\\n" if char == "\n" else char)
        return True

    def _between(self, char: str) -> bool:
        """Take a character of the list outside of a call's parentheses."""
        has_name = bool(self._call)
        if char == "]":
            self._open.pop()
            return self._has_call and not has_name
        if char.isspace() or char == ",":
            return not has_name
        if char == "(" and has_name:
            self._open.append(")")
        elif not (char.isalnum() or char in "_.-"):
            return False
        self._call.append(char)
        return len(self._call) <= MAX_HEAD

    def _end_call(self, events: list[ScanEvent]) -> bool:
        text, self._call = "".join(self._call), []
        name, _, arguments = text.partition("(")
        try:
            events += [CallBegin(name), _arguments(f"f({arguments}")]
        except (RecursionError, MemoryError, SyntaxError, TypeError, ValueError):
            return False
        self._held, self._has_call = [], True
        return True


def _arguments(call: str) -> str:
    tree = _Literals().visit(ast.parse(call, mode="eval")).body
    if (
        not isinstance(tree, ast.Call)
        or tree.args
        or any(each.arg is None for each in tree.keywords)
    ):
        raise ValueError("the arguments of a call must have names")
    values = {str(each.arg): ast.literal_eval(each.value) for each in tree.keywords}
    return json.dumps(values, ensure_ascii=False, allow_nan=False)


class _Literals(ast.NodeTransformer):
    """Replaces JSON's literals by Python's."""

    @override
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_LITERALS[node.id]) if node.id in _LITERALS else node
