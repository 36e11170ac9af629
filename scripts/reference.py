#!/usr/bin/env python3
"""Generate the pages of docs/reference from the parsers, the routes and the errors.

scripts/reference.py             write the pages
scripts/reference.py --check     report outdated pages, and fail
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
from tandem.cli.completion import parsers
from tandem.frontend.apis.anthropic_body import UNSUPPORTED_IN_MESSAGES
from tandem.frontend.apis.responses_body import REFUSED as UNSUPPORTED_IN_RESPONSES
from tandem.frontend.app import FrontendOptions, route_table
from tandem.frontend.chat.body import UNSUPPORTED, UNSUPPORTED_IN_CHATS, UNSUPPORTED_IN_INFERENCE
from tandem.frontend.http.api_errors import ANTHROPIC_STATUSES, ERROR_TYPES, OPENAI_CODES
from tandem.frontend.http.openapi import document
from tandem.node.flags import FLAGS_WITHOUT_EFFECT
from tandem.router.arguments import IGNORED_FLAGS
from tandem.wire.errors import TandemError, errors_by_code

# Imported only so that their errors are listed too.
for module in ("tandem.engine.errors", "tandem.node.life.life", "tandem.router.nodes.api"):
    import_module(module)

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
MADE = "<!-- Written by scripts/reference.py; do not edit. -->\n\n"
_DEFAULT = re.compile(r" ?\(default: ([^()]*)\)$")
# A bound this large means no bound.
_LARGEST = 2**63
# If routes share fewer fields than this, each route lists them.
_LEAST_SHARED = 3
_PAGE = re.compile(r"docs/(?:reference/)?([a-z][\w-]*)\.md((?:#[\w-]+)?)")

# Flags that several commands share are listed once, under these titles.
SHARED = {
    "Routers and nodes": ("prefill", "decode", "serve", "lb"),
    "Nodes": ("prefill", "decode", "serve"),
    "Prefill and decode nodes": ("prefill", "decode"),
}
Row = tuple[str, tuple[str, str, str]]


def command_line() -> str:
    """Return the page of all commands and flags. A flag that several commands share is listed once."""
    text = (
        f"{MADE}# Command line\n\nEvery command and its flags. `tandem COMMAND --help` shows the most important flags with examples, "
        "`--help-all` shows all. The column *flag* shows the value that a flag needs, if any. The column *meaning* notes flags "
        "that may be repeated.\n"
    )
    rows = {name: _rows(parser) for name, parser in parsers().items()}
    sections = {
        "All commands": [row for row in rows["top"] if all(row in of for of in rows.values())]
    }
    text += _section("All commands", "", sections["All commands"])
    for title, names in SHARED.items():
        shared = [row for row in rows[names[0]] if all(row in rows[name] for name in names)]
        sections[title] = _without(shared, sections.values())
        text += _section(title, f"Flags of {_codes(names)}:", sections[title])
        text += f"\n{_without_effect(title)}" if title == "Nodes" else ""
    flags_of_lb = {"tandem lb": _without(rows["lb"], sections.values())}
    for name, parser in parsers().items():
        known = sections | flags_of_lb if name == "up" else sections
        titles = [title for title in known if name == "up" or name in SHARED.get(title, ())]
        about = " ".join((parser.description or "").split())
        about += _also(rows[name], known, titles) + _more(parser.epilog or "")
        text += _section(f"tandem {name}", about, _without(rows[name], known.values()))
        text += f"\n{_without_effect(name)}" if name == "lb" else ""
    return text


def _without(rows: Iterable[Row], others: Iterable[Iterable[Row]]) -> list[Row]:
    """Return the rows whose flags are in none of `others`, regardless of group."""
    listed = {flag for other in others for _, flag in other}
    return [row for row in rows if row[1] not in listed]


def _also(rows: Iterable[Row], sections: Mapping[str, list[Row]], titles: Iterable[str]) -> str:
    """Return the sentence that names the sections of flags that a command shares, with exceptions."""
    text, own = "", [flag for _, flag in rows]
    titles = [title for title in titles if title in SHARED or title == "tandem lb"]
    if titles:
        text = f" Also the flags of {', '.join(map(_link, titles))}"
        names = {name for flag in own for name in flag[0].split(", ")}
        lacking = [
            _name(flag)
            for title in titles
            for _, flag in sections[title]
            if names.isdisjoint(flag[0].split(", "))
        ]
        text += f", except {_codes(lacking)}." if lacking else "."
    for title in (title for title in SHARED if title not in titles):
        flags = [_name(flag) for _, flag in sections[title] if flag in own]
        text += f" From {_link(title)}: {_codes(flags)}." if flags else ""
    return text


def _name(flag: tuple[str, str, str]) -> str:
    return flag[0].split(",")[0].split()[0].strip("`")


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _link(title: str) -> str:
    return f"[{title}](#{title.lower().replace(' ', '-')})"


def _more(epilog: str) -> str:
    """Return links to the pages that a help text's epilog names."""
    pages = [_page_link(page) for page in _PAGE.finditer(epilog.partition("More:")[2])]
    return f" More: {', '.join(pages)}." if pages else ""


def _page_link(page: re.Match[str]) -> str:
    name, anchor = page.groups()
    return f"[{name}]({'' if f'{name}.md' in PAGES else '../'}{name}.md{anchor})"


def _rows(parser: argparse.ArgumentParser) -> list[Row]:
    """Return the flags of a parser, each with the title of its group."""
    untitled = {"options", "positional arguments"}
    return [
        ("" if group.title in untitled else group.title or "", _flag_row(action))
        for group in parser._action_groups  # argparse has no public API for this
        for action in group._group_actions
        if _is_documented(action)
    ]


def _section(title: str, about: str, rows: list[Row]) -> str:
    text = f"\n## {title}\n" + (f"\n{about}\n" if about else "")
    cells: list[tuple[str, ...]] = []
    for group in dict.fromkeys(group for group, _ in rows):
        cells += [(f"**{group}**", "", "")] if group else []
        cells += [row for of, row in rows if of == group]
    return text + (_table(("flag", "default", "meaning"), cells) if cells else "")


def _is_documented(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and "--help" not in action.option_strings


def _flag_row(action: argparse.Action) -> tuple[str, str, str]:
    meaning = _PAGE.sub(_page_link, _help(action))
    default = "" if action.nargs == 0 or not action.default else str(action.default)
    default = "" if default in ("[]", argparse.SUPPRESS) else default
    if match := _DEFAULT.search(meaning):
        default, meaning = match[1], meaning[: match.start()]
    value = "" if action.nargs == 0 else f" {_value(action)}"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    names = names[:-1] + f"{value}`" if names else f"`{_value(action)}`"
    return names, f"`{default}`" if default else "", meaning


def _help(action: argparse.Action) -> str:
    return " ".join(((action.help or "") % {**vars(action), "prog": ""}).split())


def _value(action: argparse.Action) -> str:
    if action.metavar is None and action.choices:
        return f"{{{','.join(map(str, action.choices))}}}"
    name = str(action.metavar or action.dest.upper()).replace("|", " or ")
    return {"+": f"{name} [{name} ...]", "?": f"[{name}]"}.get(str(action.nargs), name)


def _without_effect(name: str) -> str:
    flags = ", ".join(f"`{flag}`" for flag in IGNORED_FLAGS)
    if name == "Nodes":
        flags = "; ".join(f"`{flag}` ({why})" for flag, why in FLAGS_WITHOUT_EFFECT.items())
    return f"Accepted for compatibility with other servers, without effect: {flags}.\n"


def http_api() -> str:
    """Return the page of all routes, generated from the OpenAPI document."""
    described = document(route_table(FrontendOptions()), has_keys=False)
    schemas = described["components"]["schemas"]
    text = (
        f"{MADE}# HTTP API\n\nThe routes of the router and of every node. A running server has their OpenAPI document at `/openapi.json` and "
        "an interactive page at `/docs`. See also [keys, TLS and limits](../http.md).\n"
    )
    text += _routes(described["paths"]) + _other_routes()
    text += _bodies(described["paths"], schemas) + _refused_fields()
    text += "\n## Schemas\n\nEach field with its type, and its default in brackets if it has one.\n"
    for name in _named(text, schemas):
        text += f"\n### {name}\n\n{_fields(schemas[name], schemas)}\n"
    return text


def _routes(paths: Mapping[str, Any]) -> str:
    """Return the table of routes; routes with equal summary and answer share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for path, methods in paths.items():
        for method, operation in methods.items():
            key = (operation["summary"], _answer(operation["responses"]))
            rows.setdefault(key, []).append(f"`{method.upper()} {path}`")
    table = _table(
        ("route", "task", "answer"), [(", ".join(names), *key) for key, names in rows.items()]
    )
    return (
        f"\n## Routes\n{table}\nOther answers are an [Error](#error); [errors](errors.md) lists their statuses and codes. "
        "The last event of a stream is `[DONE]`. Routes of `/v1/messages` use Anthropic's error format and send no `[DONE]`.\n"
    )


def _answer(responses: Mapping[str, Any]) -> str:
    """Return the schema names of an answer, and the other statuses that share its schema."""
    names = dict.fromkeys(_names(responses["200"]))
    also = [
        status
        for status, answer in responses.items()
        if status != "200" and next(_names(answer)) in names
    ]
    return ", events: ".join(names) + "".join(f"; {status} too" for status in also)


# Their vendors document these bodies.
FOREIGN = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses")


def _bodies(paths: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return a table of fields for each set of routes that share them, aliases left out."""
    sharing: dict[tuple[str, str, str], list[str]] = {}
    operations = {path: next(iter(methods.values())) for path, methods in paths.items()}
    by_summary = {each["summary"]: path for path, each in reversed(operations.items())}
    for path in [path for path in reversed(by_summary.values()) if path not in FOREIGN]:
        body = operations[path].get("requestBody")
        [content] = body["content"].values() if body else [{"schema": {}}]
        for name, field in _properties(content["schema"], schemas).items():
            row = (f"`{name}`", _kind(field), _default(field))
            sharing.setdefault(row, []).append(f"`{path}`")
    tables: dict[tuple[str, ...], list[tuple[str, str, str]]] = {}
    for row, routes in sharing.items():
        tables.setdefault(tuple(routes), []).append(row)
    for routes in [routes for routes, rows in tables.items() if len(rows) < _LEAST_SHARED]:
        rows = tables.pop(routes)
        for route in routes:
            tables[(route,)] = rows + tables.get((route,), [])
    text = "\n## Bodies\n\nnull is the same as absent. Unknown fields are ignored, except [some](#fields-that-are-refused). "
    text += "`/v1/messages` has Anthropic's bodies and `/v1/responses` OpenAI's: see [features](../features.md#anthropics-api).\n"
    for routes, rows in sorted(tables.items(), key=lambda table: len(table[0]), reverse=True):
        text += f"\n### {', '.join(routes)}\n" + _table(("field", "type", "default"), rows)
    return text


def _refused_fields() -> str:
    names = ", ".join(f"`{name}`" for name in sorted(UNSUPPORTED))
    in_chats = _codes(sorted(UNSUPPORTED_IN_CHATS))
    in_inference = _codes(sorted(UNSUPPORTED_IN_INFERENCE))
    in_messages = _codes(sorted(UNSUPPORTED_IN_MESSAGES))
    in_responses = _codes(sorted(UNSUPPORTED_IN_RESPONSES))
    return (
        "\n## Fields that are refused\n\nSGLang, vLLM, OpenAI or Anthropic support these fields, but Tandem does not. Because they would change the "
        "answer, a request that sets one gets a 400 that names the field. Null, false and empty values are accepted.\n\n"
        f"{names}; in a chat {in_chats}; for `/inference/v1/generate` {in_inference}; in a message {in_messages}, and sampling parameters and "
        f"grammars of the other APIs; for `/v1/responses` {in_responses}; `best_of` other than `n`; in `structured_outputs` "
        "`whitespace_pattern`, `disable_any_whitespace` and `disable_additional_properties`.\n"
    )


def _other_routes() -> str:
    rows = [
        (
            "`GET /nodes`, `POST /nodes`, `DELETE /nodes/{id}`",
            "router",
            "[membership](../membership.md#looking-adding-removing)",
        ),
        ("`GET /overview`", "router", "[dashboard](../dashboard.md#get-overview)"),
        ("`GET /drain`, `POST /drain`", "node", "[operations](../operations.md#draining)"),
        ("`POST /role`", "node", "[operations](../operations.md#changing-the-role)"),
        (
            "`POST /update_weights_from_disk`",
            "node",
            "[operations](../operations.md#updating-the-weights)",
        ),
    ]
    return (
        _table(("other routes", "server", "page"), rows)
        + "\nRoutes that affect other clients need the [operator key](../threat-model.md#what-is-for-operators).\n"
    )


def _names(answer: Mapping[str, Any]) -> Iterator[str]:
    for media, content in answer["content"].items():
        schema = content["schema"]
        if media == "text/event-stream":
            schema = schema["properties"]["data"]["contentSchema"]
        yield _kind(schema) if "$ref" in schema else f"`{media}`"


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    fields = [
        f"`{name}` {_kind(field)}" + (f" ({default})" if (default := _default(field)) else "")
        for name, field in _properties(schema, schemas).items()
    ]
    return "; ".join(fields) + "." if fields else f"{_kind(schema)}."


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
        kinds = [*dict.fromkeys(_kind(each) for each in options if each.get("type") != "null")]
        kinds.sort(key=len)
        if len(kinds) == 2 and kinds[1] == f"list of {kinds[0]}":
            kinds[1] = "list"
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
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [
        f" {sign} {schema[key]}"
        for key, sign in signs.items()
        if key in schema and schema[key] <= _LARGEST
    ]
    return ",".join(bounds)


def _named(text: str, schemas: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the schemas that a text refers to, directly or indirectly."""
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
        f"{MADE}# Errors\n\nEvery error over HTTP has this format, except on routes of `/v1/messages`, which use Anthropic's:\n\n"
        '```json\n{"error": {"message": "…", "type": "…", "param": null, "code": "out_of_pages"}}\n```\n\n'
        "Each section gives the status, the meaning and the remedy. *Retry*: the same request may succeed if it is sent again. 429, "
        "503 and 529 have the header `Retry-After`. The router itself [retries](../replay.md) after failures of nodes.\n"
    )
    rows = [(str(status), *map("`{}`".format, types)) for status, types in ERROR_TYPES.items()]
    text += _table(("status", "`type`", "`type` on routes of `/v1/messages`"), rows)
    codes = ", ".join(f"`{ours}` as `{theirs}`" for ours, theirs in OPENAI_CODES.items())
    statuses = ", ".join(f"`{code}` has {status}" for code, status in ANTHROPIC_STATUSES.items())
    text += f"\nClients get {codes}. On routes of `/v1/messages` {statuses}.\n"
    known = {
        code: (error.status, error.is_retryable, _meaning(error), REMEDIES[code])
        for code, error in errors_by_code().items()
        if code not in NOT_OVER_HTTP | OTHER_ERRORS.keys()
    } | OTHER_ERRORS
    for code in sorted(known, key=lambda code: (known[code][0], code)):
        status, is_retryable, meaning, remedy = known[code]
        retry = ", retry" if is_retryable else ""
        text += f"\n## {code}\n\n**{status}**{retry}: {meaning} {remedy}\n"
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
    """Return the names of outdated pages."""
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
