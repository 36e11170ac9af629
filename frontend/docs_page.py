"""The page at `/docs`: an OpenAPI document made readable, without scripts or anything from elsewhere."""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8886; border-radius: .4rem; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer } b { display: inline-block; min-width: 3.5rem }
code, pre { font: 14px/1.4 ui-monospace, monospace } pre { overflow: auto; background: #8881; padding: .6rem }
td { padding: .1rem 1rem .1rem 0; vertical-align: top } :root { color-scheme: light dark }
"""
# What the page may load: nothing, from nowhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(document: Mapping[str, Any]) -> str:
    """Return the page of a document as `frontend/openapi.py` makes it."""
    info = document["info"]
    title = escape(f"{info['title']} {info['version']}")
    operations = "".join(_operations(document["paths"]))
    schemas = "".join(
        _folded(f"<code id='{escape(name)}'>{escape(name)}</code>", _json(schema))
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    keys = "<p>Send <code>Authorization: Bearer KEY</code>.</p>" if "security" in document else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(info['description'])} "
        f"The same for programs: <a href=openapi.json>openapi.json</a>.</p>{keys}"
        f"<h2>Routes</h2>{operations}<h2>Schemas</h2>{schemas}</html>"
    )


def _operations(paths: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
            yield _folded(head, _body(operation) + _answers(operation["responses"]))


def _body(operation: Mapping[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    [(media, content)] = operation["requestBody"]["content"].items()
    return f"<p>Takes {escape(media)}:</p>{_json(content['schema'])}"


def _answers(responses: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(status)}<td>{escape(answer['description'])}<td>{_media(answer)}"
        for status, answer in responses.items()
    )
    return f"<p>Answers:</p><table>{rows}</table>"


def _media(answer: Mapping[str, Any]) -> str:
    return "<br>".join(
        f"{escape(media)} <a href='#{escape(_name(content))}'>{escape(_name(content))}</a>"
        for media, content in answer["content"].items()
    )


def _name(content: Mapping[str, Any]) -> str:
    schema = content["schema"]
    event = schema.get("properties", {}).get("data", {}).get("contentSchema", {})
    return str((schema | event).get("$ref", "")).rpartition("/")[2]


def _folded(head: str, body: str) -> str:
    return f"<details><summary>{head}</summary>{body}</details>"


def _json(value: object) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2))}</pre>"
