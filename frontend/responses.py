"""OpenAI's `/v1/responses`: items in place of messages, typed events in place of chunks, stored conversations.

```
 Piece ──▶ Reply's parts ──▶ Items: an item for each run of thoughts or text, and for each call ──▶ events
```
"""

import hashlib
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from tandem.frontend import answering
from tandem.frontend.answers import ResponseObject
from tandem.frontend.edge import EDGE
from tandem.frontend.keys import key_of
from tandem.frontend.middleware import error_body, json_response
from tandem.frontend.options import FrontendOptions
from tandem.frontend.response_store import ResponseStore, Stored, Wanted
from tandem.frontend.responses_body import ResponsesCall, read_responses
from tandem.frontend.sse import EventStream, encode, named_event
from tandem.frontend.tool_calls import Part, message
from tandem.frontend.transcript import Ending, Piece
from tandem.wire.errors import ErrorInfo, InvalidRequest

Item = dict[str, Any]


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/responses`."""
    edge, owner = request.app[EDGE], _owner(request)
    past: list[dict[str, Any]] = []
    raw = await request.read()
    if b'"previous_response_id"' in raw:
        named = await edge.read(raw, lambda data: data.get("previous_response_id"))
        if named is not None:
            if not isinstance(named, str):
                raise InvalidRequest("previous_response_id: must be a string")
            past = (await edge.responses.find(Wanted(owner, named))).messages

    def writer_of(call: ResponsesCall, _options: FrontendOptions) -> "ResponsesWriter":
        return ResponsesWriter(call, edge.responses, owner)

    return await answering.answer(request, partial(read_responses, past=past), writer_of)


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response."""
    found = await _stored(request, "get")
    return web.Response(body=bytes(found.response), content_type="application/json")


async def delete_response(request: web.Request) -> web.Response:
    """Forget a stored response."""
    await _stored(request, "delete")
    response_id = request.match_info["id"]
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _stored(request: web.Request, action: Any) -> Stored:
    wanted = Wanted(_owner(request), request.match_info["id"], action)
    return await request.app[EDGE].responses.find(wanted)


def _owner(request: web.Request) -> str:
    """Return a digest of the client's key; empty where clients need none."""
    has_keys = bool(request.app[EDGE].options.http.api_keys)
    return hashlib.sha256(key_of(request)).hexdigest() if has_keys else ""


class Items:
    """The items of one answer, from its parts, and the events that tell of them.

    Attributes:
        done: The items so far, as the whole answer has them; the last one may be open.
    """

    def __init__(self) -> None:
        self.done: list[Item] = []
        self._kind, self._number = "", -1

    def push(self, part: Part) -> list[Item]:
        """Return the events of a part. Those of the item before it come first."""
        events: list[Item] = []
        number = part.index if part.kind == "tool_call" else -1
        if (part.kind, number) != (self._kind, self._number):
            events += self.close("completed")
            events += self._open(part)
            self._kind, self._number = part.kind, number
        if part.text:
            events.append(self._grow(part.text))
        return events

    def close(self, status: str) -> list[Item]:
        """Return the events of the end of the open item, if there is one."""
        if not self._kind:
            return []
        item, kind = self.done[-1], self._kind
        item["status"], self._kind = status, ""
        at = {"item_id": item["id"], "output_index": len(self.done) - 1}
        done = {"type": "response.output_item.done", "output_index": at["output_index"]}
        if kind == "tool_call":
            arguments = {"arguments": item["arguments"], "name": item["name"]}
            ended = {"type": "response.function_call_arguments.done", **at, **arguments}
            return [ended, {**done, "item": dict(item)}]
        part = dict(item["content"][0])
        name, extra = _EVENTS[kind]
        return [
            {"type": f"{name}.done", **at, "content_index": 0, "text": part["text"], **extra},
            {"type": "response.content_part.done", **at, "content_index": 0, "part": part},
            {**done, "item": _copy(item)},
        ]

    def _open(self, part: Part) -> list[Item]:
        item = _new_item(part)
        self.done.append(item)
        index = len(self.done) - 1
        added = {"type": "response.output_item.added", "output_index": index, "item": _copy(item)}
        if part.kind == "tool_call":
            return [added]
        content = _new_content(part.kind)
        item["content"] = [content]
        at = {"item_id": item["id"], "output_index": index, "content_index": 0}
        return [added, {"type": "response.content_part.added", **at, "part": dict(content)}]

    def _grow(self, text: str) -> Item:
        item = self.done[-1]
        at = {"item_id": item["id"], "output_index": len(self.done) - 1}
        if self._kind == "tool_call":
            item["arguments"] += text
            return {"type": "response.function_call_arguments.delta", **at, "delta": text}
        item["content"][0]["text"] += text
        name, extra = _EVENTS[self._kind]
        return {"type": f"{name}.delta", **at, "content_index": 0, "delta": text, **extra}


# The events of each kind of text, and what else they have.
_EVENTS: dict[str, tuple[str, Item]] = {
    "content": ("response.output_text", {"logprobs": []}),
    "reasoning_content": ("response.reasoning_text", {}),
}


def _new_item(part: Part) -> Item:
    number, status = secrets.token_hex(12), {"status": "in_progress"}
    if part.kind == "tool_call":
        call = {"call_id": part.call_id, "name": part.name, "arguments": ""}
        return {"type": "function_call", "id": f"fc_{number}", **call, **status}
    if part.kind == "reasoning_content":
        return {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [], **status}
    return {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [], **status}


def _new_content(kind: str) -> Item:
    if kind == "reasoning_content":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: Item) -> Item:
    content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    return {**item, **content}


class ResponsesWriter:
    """Writes the answer of one call. A `Writer`, and the `StreamSink` of its one generation."""

    def __init__(self, call: ResponsesCall, store: ResponseStore, owner: str) -> None:
        self._call, self._store, self._owner = call, store, owner
        self.generation = call.generations[0]
        self._created_at = int(time.time())
        self._reply = call.chat.make_reply() if call.chat.make_reply is not None else None
        self._items, self._parts = Items(), list[Part]()
        self._num_output = self._num_cached = self._sequence = 0
        self._events: EventStream | None = None

    def whole(self, pieces: Sequence[Piece]) -> bytes:
        """Return the response."""
        [piece] = pieces
        self._take(piece)
        response = self._ended(piece.ending)
        self._keep(response)
        return encode(response)

    def sinks(self, events: EventStream) -> "list[ResponsesWriter]":
        """Return itself: a response is one generation."""
        self._events = events
        return [self]

    def summary(self) -> bytes:
        """Return nothing: the last event tells of the end."""
        return b""

    def write(self, piece: Piece) -> bool:
        """Send the events of a piece."""
        events: list[Item] = []
        if not self._sequence:
            begun = self._response("in_progress")
            kinds = ("response.created", "response.in_progress")
            events += [{"type": kind, "response": begun} for kind in kinds]
        events += self._take(piece)
        if piece.ending is not None:
            events += self._items.close(_status(piece.ending))
            response = self._ended(piece.ending)
            events.append({"type": f"response.{response.status}", "response": response})
            self._keep(response)
        return self._send(events) if events else True

    async def drain(self) -> bool:
        """Wait for the client."""
        assert self._events is not None
        return await self._events.drain()

    def write_failure(self, error: ErrorInfo) -> None:
        """Send the end of a response that an error cut short."""
        detail = error_body(error).error
        failed = self._response("failed", error={"code": "server_error", "message": detail.message})
        self._send([{"type": "response.failed", "response": failed}])

    def _send(self, events: Sequence[Item]) -> bool:
        assert self._events is not None
        sent = []
        for each in events:
            sent.append(named_event(each["type"], {**each, "sequence_number": self._sequence}))
            self._sequence += 1
        return self._events.put(b"".join(sent))

    def _take(self, piece: Piece) -> list[Item]:
        """Take in a piece; return its events."""
        self._num_output += len(piece.token_ids)
        self._num_cached = max(self._num_cached, piece.cached_tokens)
        if self._reply is None:
            parts = [Part("content", piece.text)] if piece.text else []
        else:
            parts = self._reply.push(piece.text)
            if piece.ending is not None:
                parts = [*parts, *self._reply.finish()]
        if piece.ending is not None and not parts and not self._items.done:
            parts = [Part("content", "")]  # an answer without text is a message, too
        self._parts += parts
        return [event for part in parts for event in self._items.push(part)]

    def _ended(self, ending: Ending | None) -> ResponseObject:
        status = _status(ending)
        self._items.close(status)
        is_cut = ending is not None and ending.reason == "length"
        details = {"reason": "max_output_tokens"} if is_cut else None
        return self._response(status, incomplete_details=details, usage=self._usage())

    def _usage(self) -> Item:
        num_input = self._call.chat.num_prompt_tokens
        thoughts = "".join(part.text for part in self._parts if part.kind == "reasoning_content")
        tokenizer = self.generation.tokenizer
        num_thoughts = len(tokenizer.encode(thoughts, False)) if thoughts and tokenizer else 0
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": min(num_thoughts, self._num_output)},
            "total_tokens": num_input + self._num_output,
        }

    def _keep(self, response: ResponseObject) -> None:
        if not self._call.body.store:
            return
        answer = message(self._parts)
        messages = [*self._call.messages, answer | {"content": answer["content"] or ""}]
        stored = Stored(msgspec.Raw(encode(response)), messages)
        self._store.put(self._owner, response.id, stored)

    def _response(self, status: str, **changes: Any) -> ResponseObject:
        body, sampling = self._call.body, self.generation.request.sampling
        asked = body.text.format
        schema = {} if asked.schema_ is None else {"name": "schema", "schema": asked.schema_}
        choice = body.tool_choice
        return ResponseObject(
            id=self._call.chat.call_id,
            created_at=self._created_at,
            status=status,
            model=self._call.chat.model_name,
            output=[_copy(item) for item in self._items.done],
            instructions=body.instructions or None,
            previous_response_id=body.previous_response_id or None,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata,
            parallel_tool_calls=body.parallel_tool_calls,
            reasoning={"effort": body.reasoning.effort, "summary": body.reasoning.summary},
            store=body.store,
            temperature=sampling.temperature,
            text={"format": {"type": asked.type, **schema}},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump() for tool in body.tools],
            top_p=sampling.top_p,
            **changes,
        )


def _status(ending: Ending | None) -> str:
    return "completed" if ending is not None and ending.reason == "stop" else "incomplete"
