"""Chat templates: render messages to the prompt text that a model was trained on.

The model's Jinja template runs in a sandbox, with the variables and filters of transformers.
`template_forms.py` decides in which form a template takes the parts of a message.
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

from tandem.frontend.text.template_forms import Messages, forms_of
from tandem.wire.errors import ConfigInvalid, InvalidRequest

__all__ = ["ChatTemplate", "Messages", "read_template"]

# Errors that a template may raise if messages do not have the expected structure.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks training targets and renders its content."""

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
    # Jinja's built-in filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Template:
    """One compiled template.

    Attributes:
        forms: The forms in which it takes the parts of messages.
    """

    def __init__(self, jinja: jinja2.Template, special_tokens: Mapping[str, str]) -> None:
        self._jinja, self._special_tokens = jinja, special_tokens
        self.forms = forms_of(self.render)

    def render(
        self, messages: Messages, tools: object, extra: Mapping[str, object] | None = None
    ) -> str:
        """Return the text of messages that have the template's forms."""
        names = {**self._special_tokens, "add_generation_prompt": False, **(extra or {})}
        names |= {"messages": messages, "tools": tools or None, "documents": None}
        try:
            return self._jinja.render(names)
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"the chat template rejected the messages: {error}") from error


class ChatTemplate:
    """The compiled templates of a model, by name.

    Args:
        sources: Template text by name. Requests with tools use `tool_use` if it exists.
        special_tokens: Special tokens by name, such as `bos_token`.

    Attributes:
        names: Variables that the templates read, such as `enable_thinking`.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            compiled = {name: environment.from_string(text) for name, text in sources.items()}
            trees = [environment.parse(text) for text in sources.values()]
            self.names = frozenset[str]().union(*map(find_undeclared_variables, trees))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigInvalid(f"the chat template is not valid Jinja: {error}") from error
        self._templates = {
            name: _Template(jinja, special_tokens) for name, jinja in compiled.items()
        }

    @property
    def is_missing(self) -> bool:
        """Whether the model has no default template."""
        return "default" not in self._templates

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text.

        Args:
            messages: Messages in OpenAI's format, oldest first.
            tools: Function schemas in OpenAI's format.
            add_generation_prompt: Whether to end with the header of the assistant's turn.
            extra: Additional variables, such as `enable_thinking`. They do not override the arguments above.
        """
        template = self._choose(has_tools=bool(tools))
        extra = {**(extra or {}), "add_generation_prompt": add_generation_prompt}
        return template.render(template.forms.apply(messages), tools, extra)

    def _choose(self, *, has_tools: bool) -> _Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if self.is_missing:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions or /generate, or start the nodes with "
                "--chat-template FILE"
            )
        return self._templates["default"]


def read_template(path: str) -> str:
    """Return the template in the file of `--chat-template`.

    Raises:
        ConfigInvalid: The file cannot be read, or is not a chat template.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
        ChatTemplate({"default": text}, {})
    except (OSError, UnicodeDecodeError, ConfigInvalid) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigInvalid(f"--chat-template {path}: {reason}") from error
    # SGLang also accepts JSON files in its own format, which Jinja would render unchanged as the prompt.
    if "messages" not in text:
        raise ConfigInvalid(
            f"--chat-template {path}: not a chat template; use a Jinja template that reads messages"
        )
    return text
