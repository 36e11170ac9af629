"""Anthropic's API: `/v1/messages`, as one body or streamed, and `/v1/messages/count_tokens`.

```
 message_start ──▶ content_block_start ─▶ content_block_delta, ... ─▶ content_block_stop ──▶ message_delta ──▶ message_stop
                   └──────────────── for each block: thinking, text, tool_use ─────────┘   └▶ error, at any time, ends the stream
```
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pydantic_core
from aiohttp import web

from tandem.frontend.answers import (
    AnthropicEvent,
    AnthropicMessage,
    AnthropicUsage,
    StopReason,
    TimingsField,
    TokenCount,
)
from tandem.frontend.apis import answering
from tandem.frontend.apis.anthropic_body import count_prompt, read_messages
from tandem.frontend.chat.openai_body import OpenAICall
from tandem.frontend.http.api_errors import anthropic_error
from tandem.frontend.http.edge import EDGE
from tandem.frontend.http.middleware import json_response
from tandem.frontend.http.sse import EventStream, encode, named_event
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.tool_calls import ReplyPart
from tandem.frontend.text.transcript import Ending, TextPiece
from tandem.wire.errors import ErrorInfo, error_from_info

# For each type of block: its text field, the type of its deltas, and the text field of a delta.
_TEXT, _THINKING = ("text", "text_delta", "text"), ("thinking", "thinking_delta", "thinking")
_INPUT = ("input", "input_json_delta", "partial_json")
_FIELDS = {"content": _TEXT, "reasoning_content": _THINKING, "tool_call": _INPUT}


async def messages(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/messages`."""
    return await answering.answer(request, read_messages, AnthropicWriter)


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of the prompt that `/v1/messages` would send to the model."""
    edge = request.app[EDGE]
    models = edge.backend.models()

    def count(data: dict[str, Any]) -> int:
        return count_prompt(models.choose(data.get("model")), edge.options, data)

    return json_response(TokenCount(await edge.read(await request.read(), count)))


class AnthropicWriter:
    """Writes the answer of one call, which has one generation. A `Writer`."""

    def __init__(self, call: OpenAICall, _options: FrontendOptions) -> None:
        self._call = call

    def body(self, pieces: Sequence[TextPiece]) -> bytes:
        """Return the answer as one message.

        Raises:
            TandemError: The generation was aborted. This API has no stop reason for that.
        """
        [piece] = pieces
        assert piece.ending is not None
        if piece.ending.error is not None:
            raise error_from_info(piece.ending.error)
        reader = _BlockReader(self._call)
        blocks: list[tuple[dict[str, Any], list[ReplyPart]]] = []
        for part, is_new in reader.read(piece):
            if is_new:
                blocks.append((_empty_block(part), []))
            blocks[-1][1].append(part)
        reason, sequence = reader.stop(piece.ending)
        return encode(
            AnthropicMessage(
                id=self._call.call_id,
                model=self._call.model_name,
                content=[block | _block_content(parts) for block, parts in blocks],
                stop_reason=reason,
                stop_sequence=sequence,
                usage=_usage(self._call, piece.cached_tokens, len(piece.token_ids)),
                timings=_timings(self._call),
            )
        )

    def sinks(self, events: EventStream) -> "list[_MessageEvents]":
        """Return the sink that writes the message to the stream."""
        return [_MessageEvents(events, self._call)]

    def trailer(self) -> bytes:
        """Return nothing: `message_stop` or `error` has already ended the stream."""
        return b""


class _BlockReader:
    """Splits the text of a message into parts of content blocks."""

    def __init__(self, call: OpenAICall) -> None:
        self._reply = call.make_reply() if call.make_reply is not None else None
        self._is_forced = call.generations[0].request.sampling.grammar is not None
        self._kind = ""  # kind of the open block
        self._held: list[ReplyPart] = []  # parts of an incomplete call
        self._has_calls = False

    def read(self, piece: TextPiece) -> Iterator[tuple[ReplyPart, bool]]:
        """Yield the next parts, each with a flag: True if it starts a new block."""
        if self._reply is None:
            parts = [ReplyPart("content", piece.text)] if piece.text else []
        else:
            parts = self._reply.push(piece.text)
            if piece.ending is not None:
                parts = [*parts, *self._reply.finish()]
        if not self._is_forced:
            parts = self._with_whole_calls(parts, is_last=piece.ending is not None)
        for part in parts:
            is_new = part.kind != self._kind or bool(part.call_id)
            self._kind = part.kind
            self._has_calls |= part.kind == "tool_call"
            yield part, is_new

    def stop(self, ending: Ending) -> tuple[StopReason, str | None]:
        """Return the stop reason, and the stop sequence that matched, if any."""
        if ending.reason == "length":
            return "max_tokens", None
        if isinstance(ending.matched, str):
            return "stop_sequence", ending.matched
        return "tool_use" if self._has_calls else "end_turn", None

    def _with_whole_calls(self, parts: Iterable[ReplyPart], *, is_last: bool) -> list[ReplyPart]:
        """Return the parts, each call merged into one part when it is complete.

        These calls are not constrained by a grammar. Clients fail on an input that is not a JSON object, and only
        a complete call shows whether it is one.
        """
        ready: list[ReplyPart] = []
        for part in parts:
            if self._held and (part.kind != "tool_call" or part.call_id):
                ready.append(_checked(self._held))
                self._held = []
            if part.kind == "tool_call":
                self._held.append(part)
            else:
                ready.append(part)
        if is_last and self._held:
            ready.append(_checked(self._held))
        return ready


def _checked(parts: Sequence[ReplyPart]) -> ReplyPart:
    """Merge a call's parts into one. If its arguments are not a JSON object, return it as text."""
    part = msgspec.structs.replace(parts[0], text="".join(each.text for each in parts))
    try:
        is_object = isinstance(pydantic_core.from_json(part.text), dict)
    except ValueError:
        is_object = False
    return part if is_object else ReplyPart("content", f"{part.name} {part.text}")


def _empty_block(part: ReplyPart) -> dict[str, Any]:
    """Return the empty block that a part starts."""
    if part.kind == "tool_call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}
    if part.kind == "reasoning_content":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _block_content(parts: Sequence[ReplyPart]) -> dict[str, Any]:
    """Return the text or input field of a block."""
    text = "".join(part.text for part in parts)
    field, _, _ = _FIELDS[parts[0].kind]
    if parts[0].kind != "tool_call":
        return {field: text}
    try:
        # A forced call may be truncated. Clients parse a truncated stream in the same way.
        return {field: pydantic_core.from_json(text, allow_partial=True)}
    except ValueError:  # no character yet, or half a surrogate pair
        return {field: {}}


def _usage(call: OpenAICall, num_cached: int, num_output: int) -> AnthropicUsage:
    return AnthropicUsage(call.num_prompt_tokens - num_cached, num_cached, num_output)


def _timings(call: OpenAICall) -> TimingsField:
    [generation] = call.generations
    return generation.report() if generation.timings.is_requested else msgspec.UNSET


def _event(event: AnthropicEvent) -> bytes:
    return named_event(event.type, event)


class _MessageEvents:
    """Sends a message as events. A `StreamSink`."""

    def __init__(self, events: EventStream, call: OpenAICall) -> None:
        [self.generation] = call.generations
        self._events, self.drain = events, events.drain
        self._call, self._reader = call, _BlockReader(call)
        self._num_tokens = self._cached_tokens = 0
        self._index = -1  # index of the open block
        self._is_started = False

    def write(self, piece: TextPiece) -> bool:
        """Send the events of a piece. An empty piece sends nothing and returns True."""
        self._num_tokens += len(piece.token_ids)
        self._cached_tokens = max(self._cached_tokens, piece.cached_tokens)
        events = b"".join(self._events_of(piece))
        return not events or self._events.put(events)

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the `error` event of a message that failed."""
        self._events.put(named_event("error", anthropic_error(error, self._call.call_id)))

    def _events_of(self, piece: TextPiece) -> Iterator[bytes]:
        if not self._is_started:
            self._is_started = True
            yield self._start()
        for part, is_new in self._reader.read(piece):
            if is_new:
                yield self._block_stop()
                self._index += 1
                block = _empty_block(part)
                yield _event(
                    AnthropicEvent(
                        type="content_block_start", index=self._index, content_block=block
                    )
                )
            _, kind, field = _FIELDS[part.kind]
            delta = {"type": kind, field: part.text}
            yield _event(AnthropicEvent(type="content_block_delta", index=self._index, delta=delta))
        if piece.ending is not None:
            yield from self._end(piece.ending)

    def _start(self) -> bytes:
        message = AnthropicMessage(
            id=self._call.call_id,
            model=self._call.model_name,
            content=[],
            usage=_usage(self._call, self._cached_tokens, 0),
        )
        return _event(AnthropicEvent(type="message_start", message=message))

    def _block_stop(self) -> bytes:
        if self._index < 0:
            return b""
        return _event(AnthropicEvent(type="content_block_stop", index=self._index))

    def _end(self, ending: Ending) -> Iterator[bytes]:
        if ending.error is not None:
            yield named_event("error", anthropic_error(ending.error, self._call.call_id))
            return
        yield self._block_stop()
        reason, sequence = self._reader.stop(ending)
        yield _event(
            AnthropicEvent(
                type="message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=_usage(self._call, self._cached_tokens, self._num_tokens),
                timings=_timings(self._call),
            )
        )
        yield _event(AnthropicEvent(type="message_stop"))
