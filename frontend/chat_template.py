"""Chat templates: messages to the text that a model was trained on.

Renders the model's own Jinja template in a sandbox, with the names and filters of transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from tandem.wire.errors import ConfigInvalid, InvalidRequest

Messages = Sequence[Mapping[str, object]]

# A template may raise these if messages have another shape than it expects.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks what to train on and renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    @override
    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A model's templates by name, compiled once.

    Args:
        sources: Template text by name. `tool_use`, if present, serves requests with tools.
        special_tokens: `bos_token` and the like, by name.

    Attributes:
        names: What the templates read, such as `enable_thinking`.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._templates = {
                name: environment.from_string(text) for name, text in sources.items()
            }
            trees = [environment.parse(text) for text in sources.values()]
            self.names = frozenset[str]().union(*map(find_undeclared_variables, trees))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigInvalid(f"the chat template is not valid Jinja: {error}") from error
        self._special_tokens = special_tokens
        # OpenAI's name for system messages since its reasoning models; templates may refuse it.
        self._knows_developer = any("developer" in text for text in sources.values())

    @property
    def is_missing(self) -> bool:
        """Whether a chat without tools has no template."""
        return "default" not in self._templates

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt's text.

        Args:
            messages: Each with a role and content, oldest first.
            tools: Function schemas as OpenAI names them.
            add_generation_prompt: End with the head of the assistant's turn.
            extra: More names for the template, such as `enable_thinking`. Ours win.
        """
        template = self._choose(has_tools=bool(tools))
        names = {
            **self._special_tokens,
            **(extra or {}),
            "messages": messages if self._knows_developer else _without_developer(messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(names)
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error

    def _choose(self, *, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if self.is_missing:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions or /generate, or start its nodes with "
                "--chat-template FILE"
            )
        return self._templates["default"]


def read_template(path: str) -> str:
    """Return the template in the file of `--chat-template`; raise `ConfigInvalid` if it holds none."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        ChatTemplate({"default": text}, {})
    except (OSError, UnicodeDecodeError, ConfigInvalid) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigInvalid(f"--chat-template {path}: {reason}") from error
    # SGLang also takes JSON files of its own kind, which would become the prompt as they are.
    if "messages" not in text:
        raise ConfigInvalid(f"--chat-template {path}: give a Jinja template, which names messages")
    return text


def _without_developer(messages: Messages) -> Messages:
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]
