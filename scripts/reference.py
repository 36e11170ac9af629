#!/usr/bin/env python3
"""Write the pages of docs/reference from what they describe: the parsers, the routes, the errors.

scripts/reference.py             write them
scripts/reference.py --check     say which are not current, and fail
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.error_remedies import NOT_OVER_HTTP, OTHER_ERRORS, REMEDIES
from tandem.frontend.app import FrontendOptions, route_table
from tandem.frontend.body import UNSUPPORTED, UNSUPPORTED_IN_CHATS
from tandem.frontend.openapi import document
from tandem.node.flags import MEANINGLESS
from tandem.parsers import parsers
from tandem.router.arguments import IGNORED_FLAGS
from tandem.wire.errors import TandemError, errors_by_code

# Errors that nothing else here imports: a page must not depend on what a process has imported by chance.
for module in ("tandem.engine.errors", "tandem.node.life", "tandem.router.nodes_api"):
    import_module(module)

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Written by scripts/reference.py; do not edit. -->\n\n"
_DEFAULT = re.compile(r" ?\(default: ([^()]*)\)$")


# Flags that several commands share are listed once, under these titles.
SHARED = {
    "Routers and nodes": ("prefill", "decode", "serve", "lb"),
    "Nodes": ("prefill", "decode", "serve"),
    "Prefill and decode nodes": ("prefill", "decode"),
}
UP = ", [tandem lb](#tandem-lb); each flag goes to the processes that have it"
Row = tuple[str, tuple[str, str, str]]


def command_line() -> str:
    """Return the page of all commands and flags. A flag that several commands share is listed once."""
    text = (
        f"{MADE}# Command line\n\nEvery command and its flags, as `tandem COMMAND --help-all` prints them. A flag takes one "
        "value unless its help says otherwise. Boolean flags take none.\n"
    )
    rows = {name: _rows(parser) for name, parser in parsers().items()}
    taken: dict[str, list[Row]] = {name: [] for name in rows}
    for title, names in SHARED.items():
        shared = [row for row in rows[names[0]] if all(row in rows[name] for name in names)]
        new = [row for row in shared if row not in taken[names[0]]]
        text += _section(title, f"{', '.join(f'`{name}`' for name in names)} share:", new)
        text += f"\n{_without_effect(title)}" if title == "Nodes" else ""
        for name in names:
            taken[name] += new
    taken["up"] = [row for name in taken for row in rows[name] if taken[name]]
    for name, parser in parsers().items():
        own = [row for row in rows[name] if row not in taken[name]]
        about = " ".join((parser.description or "").split())
        titles = [title for title, names in SHARED.items() if name in names or name == "up"]
        links = ", ".join(f"[{each}](#{each.lower().replace(' ', '-')})" for each in titles)
        about += f"\n\nAlso: {links}{UP * (name == 'up')}." if titles else ""
        text += _section(f"tandem {name}", about, own)
        text += f"\n{_without_effect(name)}" if name == "lb" else ""
        if parser.epilog and "\n" in parser.epilog.strip():
            text += f"\n```text\n{parser.epilog.strip()}\n```\n"
    return text


def _rows(parser: argparse.ArgumentParser) -> list[Row]:
    """Return the flags of a parser, each with the title of its group."""
    untitled = {"options", "positional arguments"}
    return [
        ("" if group.title in untitled else group.title or "", _flag_row(action))
        for group in parser._action_groups  # argparse names no other way
        for action in group._group_actions
        if _is_told(action)
    ]


def _section(title: str, about: str, rows: list[Row]) -> str:
    text = f"\n## {title}\n\n{about}\n"
    for group in dict.fromkeys(group for group, _ in rows):
        text += f"\n**{group}**\n" if group else ""
        text += _table(("flag", "default", ""), [row for of, row in rows if of == group])
    return text


def _is_told(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and "--help" not in action.option_strings


def _flag_row(action: argparse.Action) -> tuple[str, str, str]:
    said = _help(action)
    default = (
        "" if action.default in (None, False, [], "", argparse.SUPPRESS) else str(action.default)
    )
    if match := _DEFAULT.search(said):
        default, said = match[1], said[: match.start()]
    value = "" if action.nargs == 0 else f" {_value(action)}"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    names = (
        names and names[:-1] + f"{value}`" if value and names else names or f"`{action.metavar}`"
    )
    return names, f"`{default}`" if default else "", said


def _help(action: argparse.Action) -> str:
    return " ".join(((action.help or "") % {**vars(action), "prog": ""}).split())


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices:
        return "|".join(map(str, action.choices))
    name = str(action.metavar or action.dest.upper())
    return {"+": f"{name} [{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _without_effect(name: str) -> str:
    flags = ", ".join(f"`{flag}`" for flag in IGNORED_FLAGS)
    if name == "Nodes":
        flags = "; ".join(f"`{flag}` ({why})" for flag, why in MEANINGLESS.items())
    return f"Accepted from commands of other servers, without effect: {flags}.\n"


def http_api() -> str:
    """Return the page of all routes, from the OpenAPI document."""
    described = document(route_table(FrontendOptions()), has_keys=False)
    schemas = described["components"]["schemas"]
    text = (
        f"{MADE}# HTTP API\n\nThe routes of the router, and of every node. The same for programs is at `/openapi.json` of a "
        "running server, and for people at its `/docs`. Unknown fields are ignored, but for [some](#fields-that-are-refused) "
        "that would change the answer; null is the same as absent. "
        "Errors are [a page of their own](errors.md); keys, TLS and limits are [another](../http.md).\n"
    )
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            if method == "put":
                continue  # the same as POST, which says so
            also = " (or PUT)" if "put" in methods else ""
            text += f"\n## {method.upper()} {path}\n\n{operation['summary']}{also}\n"
            text += _body(operation, schemas) + _answers(operation)
    text += (
        _refused_fields() + _operators_routes() + "\n## Schemas\n\nWhat the routes above name.\n"
    )
    for name in _named(text, schemas):
        text += f"\n### {name}\n{_fields(schemas[name], schemas)}"
    return text


def _refused_fields() -> str:
    names = ", ".join(f"`{name}`" for name in sorted(UNSUPPORTED))
    in_chats = " and ".join(f"`{name}`" for name in sorted(UNSUPPORTED_IN_CHATS))
    return (
        "\n## Fields that are refused\n\nSGLang, vLLM or OpenAI have these fields, and they would change the answer. They are "
        "not supported here, and a request that sets one of them gets a 400 that names it. Null, false and what is empty "
        f"set nothing.\n\n{names}; in a chat {in_chats}; `best_of` other than `n`; in `structured_outputs` `structural_tag`, "
        "`whitespace_pattern`, `disable_any_whitespace` and `disable_additional_properties`.\n\nFields of theirs that cannot change the answer, such as `user`, `metadata` "
        "and `store`, are ignored.\n"
    )


def _operators_routes() -> str:
    rows = [
        (
            "`GET /nodes`, `POST /nodes`, `DELETE /nodes/{id}`",
            "router",
            "[membership](../membership.md#looking-adding-removing)",
        ),
        ("`GET /drain`, `POST /drain`", "node", "[operations](../operations.md#draining)"),
        ("`POST /role`", "node", "[operations](../operations.md#changing-the-role)"),
        (
            "`POST /flush_cache`, `POST /abort_request` with `abort_all`",
            "both",
            "[threat model](../threat-model.md#what-is-for-operators)",
        ),
    ]
    return "\n## Routes of operators\n" + _table(("route", "of", "told in"), rows)


def _body(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    [content] = operation["requestBody"]["content"].values()
    return "\n**Body**\n" + _fields(content["schema"], schemas)


def _answers(operation: Mapping[str, Any]) -> str:
    rows = [
        (status, answer["description"], ", or events of ".join(_names(answer)))
        for status, answer in operation["responses"].items()
    ]
    return "\n**Answers**\n" + _table(("status", "when", "body"), rows)


def _names(answer: Mapping[str, Any]) -> Iterator[str]:
    for media, content in answer["content"].items():
        schema = content["schema"]
        if media == "text/event-stream":
            schema = schema["properties"]["data"]["contentSchema"]
        yield _kind(schema) if "$ref" in schema else media


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    rows = [
        (f"`{name}`", _kind(field), _default(field), field.get("description", ""))
        for name, field in _properties(schema, schemas).items()
    ]
    return _table(("field", "type", "default", ""), rows) if rows else f"\n{_kind(schema)}\n"


def _properties(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return _properties(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    found: dict[str, Any] = {}
    for part in schema.get("allOf", ()):
        found |= _properties(part, schemas)
    return found | schema.get("properties", {})


def _default(field: Mapping[str, Any]) -> str:
    default = field.get("default")
    return "" if default in (None, "", [], {}) else f"`{json.dumps(default)}`"


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        kinds = dict.fromkeys(_kind(option) for option in options if option.get("type") != "null")
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        kind = " or ".join(each for each in kind if each != "null")
    if kind == "array" and schema.get("items"):
        return f"list of {_kind(schema['items'])}"
    return str(kind) + _bounds(schema)


def _bounds(schema: Mapping[str, Any]) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    said = {
        (True, True): f", {low} to {high}",
        (True, False): f", {low} or more",
        (False, True): f", up to {high}",
    }
    return said.get((low is not None, high is not None), "")


def _named(text: str, schemas: Mapping[str, Any]) -> list[str]:
    """Return the schemas that a text names, and those that they name, by name."""
    found: set[str] = set()
    new = {name for name in schemas if f"(#{name.lower()})" in text}
    while new - found:
        found |= new
        fields = "".join(_fields(schemas[name], schemas) for name in sorted(new))
        new = {name for name in schemas if f"(#{name.lower()})" in fields}
    return sorted(found)


def errors() -> str:
    """Return the page of all error codes."""
    text = (
        f"{MADE}# Errors\n\nEvery error over HTTP has one shape, on OpenAI's routes and on the others:\n\n"
        '```json\n{"error": {"message": "…", "type": "…", "param": null, "code": "out_of_pages"}}\n```\n\n'
        "The code is below. *Retry* says whether the same request may succeed if it is sent again; 429 and 503 come with "
        "`Retry-After`. Between nodes the router retries by itself ([replay](../replay.md)); what a client sees is what was "
        "left. `tandem docs CODE` shows one of these sections.\n"
    )
    known = {
        code: (error.status, error.is_retryable, _meaning(error), REMEDIES[code])
        for code, error in errors_by_code().items()
        if code not in NOT_OVER_HTTP | OTHER_ERRORS.keys()
    } | OTHER_ERRORS
    order = sorted(known, key=lambda code: (known[code][0], code))
    rows = []
    for code in order:
        status, is_retryable, _, _ = known[code]
        rows.append((f"[{code}](#{code})", str(status), "yes" if is_retryable else "no"))
    text += _table(("code", "status", "retry"), rows)
    for code in order:
        status, is_retryable, meaning, remedy = known[code]
        helps = "a retry may help" if is_retryable else "a retry does not help"
        text += f"\n## {code}\n\nStatus {status}; {helps}. {meaning}\n\n**What to do**: {remedy}\n"
    return text


def _meaning(error: type[TandemError]) -> str:
    return " ".join((error.__doc__ or "").partition("\n\n")[0].split())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n" + "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": command_line,
    "http-api.md": http_api,
    "errors.md": errors,
}


def stale() -> list[str]:
    """Return the names of pages that are not what would be written now."""
    paths = {FOLDER / name: make for name, make in PAGES.items()}
    return [
        path.name for path, make in paths.items() if not path.exists() or path.read_text() != make()
    ]


def main() -> int:
    """Write the pages, or check them."""
    if "--check" in sys.argv[1:]:
        names = stale()
        for name in names:
            print(f"docs/reference/{name} is not current: run scripts/reference.py")
        return int(bool(names))
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
