"""OpenAI's `/v1/responses`: items instead of messages, typed events instead of chunks. Responses are not stored.

```
 TextPiece ──▶ parts of a Reply ──▶ Items: one for each run of reasoning or text, and for each call ──▶ events
```
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from msgspec.structs import asdict

from tandem.frontend.answers import ResponseObject
from tandem.frontend.apis import answering
from tandem.frontend.apis.responses_body import ResponsesCall, read_responses
from tandem.frontend.http.api_errors import response_error
from tandem.frontend.http.sse import EventStream, encode, named_event
from tandem.frontend.options import FrontendOptions
from tandem.frontend.replies.tool_calls import ReplyPart
from tandem.frontend.text.transcript import Ending, TextPiece
from tandem.wire.errors import ErrorInfo

OutputItem = dict[str, Any]


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/responses`."""

    def writer_of(call: ResponsesCall, _options: FrontendOptions) -> "ResponsesWriter":
        return ResponsesWriter(call)

    return await answering.answer(request, read_responses, writer_of)


class Items:
    """Builds the output items of one answer from its parts, and the events that announce them.

    Attributes:
        output: The items so far, as in the final response. The last one may still be open.
    """

    def __init__(self) -> None:
        self.output: list[OutputItem] = []
        self._kind, self._number = "", -1

    def push(self, part: ReplyPart) -> list[OutputItem]:
        """Return the events of a part, after the closing events of the previous item if it starts a new one."""
        events: list[OutputItem] = []
        number = part.index if part.kind == "tool_call" else -1
        if (part.kind, number) != (self._kind, self._number):
            events += self.close("completed")
            events += self._open(part)
            self._kind, self._number = part.kind, number
        if part.text:
            events.append(self._append(part.text))
        return events

    def close(self, status: str) -> list[OutputItem]:
        """Close the open item, if any, and return its final events."""
        if not self._kind:
            return []
        item, kind = self.output[-1], self._kind
        item["status"], self._kind = status, ""
        at = {"item_id": item["id"], "output_index": len(self.output) - 1}
        done = {"type": "response.output_item.done", "output_index": at["output_index"]}
        if kind == "tool_call":
            arguments = {"arguments": item["arguments"], "name": item["name"]}
            last = {"type": "response.function_call_arguments.done", **at, **arguments}
            return [last, {**done, "item": dict(item)}]
        part = dict(item["content"][0])
        name, extra = _EVENTS[kind]
        return [
            {"type": f"{name}.done", **at, "content_index": 0, "text": part["text"], **extra},
            {"type": "response.content_part.done", **at, "content_index": 0, "part": part},
            {**done, "item": _copy(item)},
        ]

    def _open(self, part: ReplyPart) -> list[OutputItem]:
        item = _new_item(part)
        self.output.append(item)
        index = len(self.output) - 1
        added = {"type": "response.output_item.added", "output_index": index, "item": _copy(item)}
        if part.kind == "tool_call":
            return [added]
        content = _new_content(part.kind)
        item["content"] = [content]
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        return [added, {"type": "response.content_part.added", **at, "part": dict(content)}]

    def _append(self, text: str) -> OutputItem:
        item = self.output[-1]
        at = {"item_id": item["id"], "output_index": len(self.output) - 1}
        if self._kind == "tool_call":
            item["arguments"] += text
            return {"type": "response.function_call_arguments.delta", **at, "delta": text}
        item["content"][0]["text"] += text
        name, extra = _EVENTS[self._kind]
        return {"type": f"{name}.delta", **at, "content_index": 0, "delta": text, **extra}


# The event name of each kind of text, and its additional fields.
_EVENTS: dict[str, tuple[str, OutputItem]] = {
    "content": ("response.output_text", {"logprobs": []}),
    "reasoning_content": ("response.reasoning_text", {}),
}


def _new_item(part: ReplyPart) -> OutputItem:
    number, status = secrets.token_hex(12), {"status": "in_progress"}
    if part.kind == "tool_call":
        call = {"call_id": part.call_id, "name": part.name, "arguments": ""}
        return {"type": "function_call", "id": f"fc_{number}", **call, **status}
    if part.kind == "reasoning_content":
        return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [], **status}
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [], **status}


def _new_content(kind: str) -> OutputItem:
    if kind == "reasoning_content":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: OutputItem) -> OutputItem:
    content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    return {**item, **content}


class ResponsesWriter:
    """Writes the answer of one call. A `Writer`, and the `StreamSink` of its one generation."""

    def __init__(self, call: ResponsesCall) -> None:
        self._call = call
        self.generation = call.generations[0]
        self._created_at = int(time.time())
        self._reply = call.chat.make_reply() if call.chat.make_reply is not None else None
        self._items, self._parts = Items(), list[ReplyPart]()
        self._num_output = self._num_cached = self._sequence = 0
        self._events: EventStream | None = None

    def body(self, pieces: Sequence[TextPiece]) -> bytes:
        """Return the response."""
        [piece] = pieces
        self._take(piece)
        return encode(self._finished(piece.ending))

    def sinks(self, events: EventStream) -> "list[ResponsesWriter]":
        """Return the writer itself, because a response is one generation."""
        self._events = events
        return [self]

    def trailer(self) -> bytes:
        """Return nothing: the generation's last event ends the stream."""
        return b""

    def write(self, piece: TextPiece) -> bool:
        """Send the events of a piece."""
        events: list[OutputItem] = []
        if not self._sequence:
            response = self._response("in_progress")
            kinds = ("response.created", "response.in_progress")
            events += [{"type": kind, "response": response} for kind in kinds]
        events += self._take(piece)
        if piece.ending is not None:
            events += self._items.close(_status(piece.ending))
            response = self._finished(piece.ending)
            events.append({"type": f"response.{response.status}", "response": response})
        return self._send(events) if events else True

    async def drain(self) -> None:
        """Wait while the client does not read."""
        assert self._events is not None
        await self._events.drain()

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the final event of a response that failed."""
        failed = self._response("failed", error=response_error(error))
        self._send([{"type": "response.failed", "response": failed}])

    def _send(self, events: Sequence[OutputItem]) -> bool:
        assert self._events is not None
        encoded = []
        for each in events:
            encoded.append(named_event(each["type"], {**each, "sequence_number": self._sequence}))
            self._sequence += 1
        return self._events.put(b"".join(encoded))

    def _take(self, piece: TextPiece) -> list[OutputItem]:
        """Add a piece and return its events."""
        self._num_output += len(piece.token_ids)
        self._num_cached = max(self._num_cached, piece.cached_tokens)
        if self._reply is None:
            parts = [ReplyPart("content", piece.text)] if piece.text else []
        else:
            parts = self._reply.push(piece.text)
            if piece.ending is not None:
                parts = [*parts, *self._reply.finish()]
        self._parts += parts
        shown = self._call.chat.visible(parts)
        if piece.ending is not None and not shown and not self._items.output:
            shown = [ReplyPart("content", "")]  # an answer without text still has one message
        return [event for part in shown for event in self._items.push(part)]

    def _finished(self, ending: Ending | None) -> ResponseObject:
        status = _status(ending)
        self._items.close(status)
        is_truncated = ending is not None and ending.reason == "length"
        details = {"reason": "max_output_tokens"} if is_truncated else None
        return self._response(status, incomplete_details=details, usage=self._usage())

    def _usage(self) -> OutputItem:
        num_input = self._call.chat.num_prompt_tokens
        reasoning = "".join(part.text for part in self._parts if part.kind == "reasoning_content")
        tokenizer = self.generation.tokenizer
        num_reasoning = len(tokenizer.encode(reasoning, False)) if reasoning and tokenizer else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, self._num_output)},
            "total_tokens": num_input + self._num_output,
        }

    def _response(self, status: str, **changes: Any) -> ResponseObject:
        body, sampling = self._call.body, self.generation.request.sampling
        text_format = body.text.format
        schema = {}
        if text_format.schema_ is not None:
            schema = {"name": "schema", "schema": text_format.schema_}
        choice = body.tool_choice
        return ResponseObject(
            id=self._call.chat.call_id,
            created_at=self._created_at,
            status=status,
            model=self._call.chat.model_name,
            output=[_copy(item) for item in self._items.output],
            instructions=body.instructions or None,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning={"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            temperature=sampling.temperature,
            text={"format": {"type": text_format.type, **schema}},
            tool_choice=choice if isinstance(choice, str) else asdict(choice),
            tools=[asdict(tool) for tool in body.tools],
            top_p=sampling.top_p,
            **changes,
        )


def _status(ending: Ending | None) -> str:
    return "completed" if ending is not None and ending.reason == "stop" else "incomplete"
