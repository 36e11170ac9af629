"""Tool calls that a client forces with `tool_choice`: the grammar of the answer and its parser.

```
 tool_choice        grammar of the answer                        parser of the answer
 "none", "auto"     none                                         `ParsedReply` in `replies/parser.py`
 "required"         [{"name": ..., "parameters": {...}}, ...]    `ForcedCalls`: a call for each entry
 {"function": ...}  the parameters' schema                       `ForcedCall`: the arguments of one call
```

The grammar makes a forced call well-formed and valid against its schema, regardless of the model's own format. A schema
that is not strict is held without what cannot be served.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.frontend.chat.grammars import Parameters, forced_call, forced_calls
from tandem.frontend.replies.formats import ReasoningMarks
from tandem.frontend.replies.tool_calls import AfterReasoning, ForcedCall, ForcedCalls, Reply
from tandem.frontend.schemas.budget import Budget
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Grammar

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A client's choice of tools.

    Attributes:
        tools: Tools passed to the template.
        is_forced: Whether the answer must be a call.
        name: The tool that must be called. Empty: none, or any tool.
        is_parallel: Whether the answer may have several calls.
    """

    tools: Sequence[Tool]
    is_forced: bool = False
    name: str = ""
    is_parallel: bool = True

    @property
    def has_strict(self) -> bool:
        """Whether a tool is strict."""
        return any(_is_strict(tool) for tool in self.tools)

    @property
    def parameters(self) -> dict[str, Parameters]:
        """The parameters of each tool, by name."""
        return {_name(tool): Parameters(_parameters(tool), _is_strict(tool)) for tool in self.tools}

    def grammar(self, budget: Budget) -> Grammar:
        """Return the grammar of a forced call.

        Raises:
            InvalidRequest: The schemas are too large, or that of a strict tool cannot be served.
        """
        if self.name:
            return forced_call(self.name, self.parameters[self.name], budget)
        return forced_calls(self.parameters, budget, is_parallel=self.is_parallel)

    def reply(self, first: int | None, reasoning: ReasoningMarks | None = None) -> Reply:
        """Return the parser of an answer that follows the grammar.

        Args:
            first: As in `new_call`.
            reasoning: Marks of the reasoning that may precede the call. None: there is none.
        """
        forced = ForcedCall(self.name, first) if self.name else ForcedCalls(first)
        return forced if reasoning is None else AfterReasoning(reasoning, forced)


def read_choice(tools: Sequence[Tool], choice: object, *, is_parallel: bool) -> ToolChoice:
    """Read `tool_choice` and `parallel_tool_calls`. `tools` must already be checked."""
    if choice is None or choice == "auto":
        return ToolChoice(tools)
    if choice == "none":
        return ToolChoice([])
    forced = ToolChoice(
        tools,
        is_forced=True,
        name="" if choice == "required" else _chosen_name(choice),
        is_parallel=is_parallel,
    )
    names = forced.parameters.keys()
    if not forced.name and not names:
        raise InvalidRequest("tool_choice: 'required' requires tools, and the body has none")
    if forced.name and forced.name not in names:
        raise InvalidRequest(f"tool_choice: {forced.name!r} is not in tools")
    return forced


def _chosen_name(choice: object) -> str:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise InvalidRequest(
                "tool_choice: must be 'none', 'auto', 'required', or "
                '{"type": "function", "function": {"name": ...}}'
            )


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _is_strict(tool: Tool) -> bool:
    return tool["function"].get("strict") is True


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}
