"""OpenAI's API: `/v1/completions` and `/v1/chat/completions`, answered whole or streamed.

What may be in a body is in `frontend/openai_body.py`. The two routes differ only in the shape of
a choice: `frontend/openai_shapes.py`.
"""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from tandem.frontend.caller import asked_by
from tandem.frontend.edge import EDGE, Edge, side_by_side
from tandem.frontend.generation import Answer, Generation
from tandem.frontend.limits import within_time
from tandem.frontend.logprobs import LogprobWriter, Run
from tandem.frontend.middleware import error_body, json_response, public_info
from tandem.frontend.openai_body import OpenAICall, read_chat, read_completion
from tandem.frontend.openai_shapes import Chat, Completion, Logprobs, Shape
from tandem.frontend.reply import Reply, message
from tandem.frontend.session import with_session
from tandem.frontend.sse import EventStream, encode, event
from tandem.frontend.transcript import Outlet, Piece
from tandem.wire.errors import TandemError


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/completions`.

    Raises:
        TandemError: Nothing was sent yet.
    """
    edge = request.app[EDGE]
    model, headers = edge.backend.model(), request.headers
    call = await edge.read(
        await request.read(), lambda data: read_completion(model, with_session(headers, data))
    )
    return await _answer(request, edge, call, Completion())


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/chat/completions`.

    Raises:
        TandemError: Nothing was sent yet.
    """
    edge = request.app[EDGE]
    model, headers, formats = edge.backend.model(), request.headers, edge.options.reply_formats
    call = await edge.read(
        await request.read(), lambda data: read_chat(model, with_session(headers, data), formats)
    )
    return await _answer(request, edge, call, Chat())


async def _answer(
    request: web.Request, edge: Edge, call: OpenAICall, shape: Shape
) -> web.StreamResponse:
    call = replace(call, generations=asked_by(request, call.generations))
    if call.is_stream:
        async with EventStream(request, edge.options.stall_timeout_s, edge.outbox) as stream:
            return await _Chunks(call, shape, stream).send_all(edge)
    answers = await edge.answers(call.generations)
    choices = [_choice(call, shape, index, answer) for index, answer in enumerate(answers)]
    num_output = sum(len(answer.output_ids) for answer in answers)
    num_cached = sum(answer.cached_tokens for answer in answers)
    return json_response(
        _head(call, shape.whole)
        | {"choices": choices, "usage": _usage(call, num_output, num_cached)}
        | _timings(call)
    )


def _timings(call: OpenAICall) -> dict[str, Any]:
    """Return where the time went, where that was asked: of one choice, or a list of all."""
    if not call.generations[0].timings.is_wanted:
        return {}
    reports = [generation.report() for generation in call.generations]
    return {"timings": reports if len(reports) > 1 else reports[0]}


def _choice(call: OpenAICall, shape: Shape, index: int, answer: Answer) -> dict[str, Any]:
    generation = call.generations[index]
    text = call.echoes[index] + answer.text
    logprobs = None
    if (writer := _writer(shape, generation)) is not None:
        logprobs = writer.write(
            _prompt_run(generation, answer), (answer.output_ids, answer.logprobs)
        )
    choice = shape.choice(index, text, _reason(answer), logprobs)
    if call.make_reply is not None:
        reply = call.make_reply()
        choice["message"] = message([*reply.push(text), *reply.finish()])
        choice["finish_reason"] = _reason(answer, reply)
    return choice


def _writer(shape: Shape, generation: Generation) -> LogprobWriter | None:
    wanted = generation.request.logprobs
    return None if wanted is None else shape.writer(generation.tokenizer, wanted.num_top)


def _prompt_run(generation: Generation, part: Answer | Piece) -> Run:
    """Return what came of the prompt: of all of it, where it is echoed, else of nothing."""
    return generation.request.prompt_ids, part.prompt_logprobs


def _head(call: OpenAICall, kind: str) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "object": kind,
        "created": int(time.time()),
        "model": call.model_name,
    }


def _reason(part: Answer | Piece, reply: Reply | None = None) -> str | None:
    if part.ending is None:
        return None
    if reply is not None and part.ending.reason == "stop":
        return reply.finish_reason
    return part.ending.reason


def _usage(call: OpenAICall, num_output: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": call.num_prompt_tokens,
        "completion_tokens": num_output,
        "total_tokens": call.num_prompt_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class _Chunks:
    """Sends one call's chunks: for each choice an opening, its text, its end; then the usage.

    Attributes:
        stream: Where they go.
    """

    def __init__(self, call: OpenAICall, shape: Shape, stream: EventStream) -> None:
        self._call = call
        self.stream = stream
        self._head = _head(call, shape.chunk)
        self._choices = [
            _Choice(self, call, shape, index) for index in range(len(call.generations))
        ]

    async def send_all(self, edge: Edge) -> web.StreamResponse:
        """Send everything; return the response for aiohttp."""
        await side_by_side([self._send_choice(edge, choice) for choice in self._choices])
        if self._call.usage.include_usage:
            await self.stream.send(event(self._head | {"choices": [], "usage": self.usage()}))
        if timings := _timings(self._call):
            await self.stream.send(event(self._head | {"choices": []} | timings))
        return await self.stream.finish()

    def usage(self) -> dict[str, Any]:
        """Return the usage of all choices so far."""
        num_output = sum(choice.num_tokens for choice in self._choices)
        num_cached = sum(choice.cached_tokens for choice in self._choices)
        return _usage(self._call, num_output, num_cached)

    def chunk(self, choice: dict[str, Any], usage: object) -> bytes:
        """Return one choice as an event.

        Args:
            usage: Told where the call wants it with every chunk.
        """
        options = self._call.usage
        extra: dict[str, object] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            extra = {"usage": usage}
        return event(self._head | {"choices": [choice]} | extra)

    async def _send_choice(self, edge: Edge, choice: "_Choice") -> None:
        try:
            async with (
                within_time(self.stream.request),
                aclosing(edge.run(choice.generation, choice.outlet())) as pieces,
            ):
                async for piece in pieces:
                    if parts := choice.take(piece):
                        usage = self.usage()
                        await self.stream.send(b"".join(self.chunk(part, usage) for part in parts))
        except TandemError as error:
            if not self.stream.is_started:
                raise
            body = error_body(public_info(error))
            await self.stream.send(event(self._head | {"choices": choice.cut_short()} | body))


# Stands for what changes from chunk to chunk, to see where that lies. No text has it: it is escaped.
_TEXT, _USAGE = "\0text", b'"\\0usage"'


class _Choice:
    """What one choice has told so far, and how its next part looks. Its generation's `Outlet`.

    Attributes:
        num_tokens, cached_tokens: For the usage.
    """

    __slots__ = (
        "_chunks",
        "_echo",
        "_frame",
        "_has_usage",
        "_index",
        "_is_opened",
        "_reply",
        "_shape",
        "_stream",
        "_writer",
        "cached_tokens",
        "generation",
        "num_tokens",
    )

    def __init__(self, chunks: _Chunks, call: OpenAICall, shape: Shape, index: int) -> None:
        self.generation = call.generations[index]
        self.num_tokens = self.cached_tokens = 0
        self._chunks, self._shape, self._index = chunks, shape, index
        self._stream = chunks.stream
        self._echo = call.echoes[index]
        self._writer = _writer(shape, self.generation)
        self._reply = call.make_reply() if call.make_reply is not None else None
        self._is_opened = False
        self._has_usage = call.usage.continuous_usage_stats
        # Of an ordinary chunk: before its text, up to its usage, to its end.
        self._frame: tuple[bytes, bytes, bytes] | None = None

    def outlet(self) -> Outlet | None:
        """Return where ordinary tokens may go; None where their text is read first."""
        return self if self._reply is None else None

    def has_room(self) -> bool:
        """See `Outlet`."""
        return self._stream.has_room()

    def write(self, text: str, token_ids: Sequence[int]) -> None:
        """See `Outlet`."""
        self.num_tokens += len(token_ids)
        if not text:
            return
        if self._frame is None:
            self._frame = self._make_frame()
        before, between, end = self._frame
        usage = encode(self._chunks.usage()) if self._has_usage else b""
        self._stream.send_now(b"%b%b%b%b%b" % (before, encode(text), between, usage, end))

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """Return the choices, one a chunk, that a piece makes."""
        self.num_tokens += len(piece.token_ids)
        self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        opening = [] if self._is_opened else self._opening(piece)
        self._is_opened = True
        logprobs = None
        if self._writer is not None and piece.token_ids:
            logprobs = self._writer.write((piece.token_ids, piece.logprobs))
        if self._reply is not None:
            return opening + self._read(self._reply, piece, logprobs)
        return opening + self._shape.delta(self._index, piece.text, _reason(piece), logprobs)

    def _read(self, reply: Reply, piece: Piece, logprobs: Logprobs) -> list[dict[str, Any]]:
        """Return the choices that the reader of a reply makes of a piece."""
        parts = reply.push(piece.text)
        if piece.ending is not None:
            parts = [*parts, *reply.finish()]
        choices = [
            {"index": self._index, "delta": part.delta(), "logprobs": None, "finish_reason": None}
            for part in parts
        ]
        if logprobs is not None:
            # They are of tokens: what a reader holds back, or turns into calls, has none of its own.
            choices += self._shape.delta(self._index, "", None, logprobs)
        return choices + self._shape.delta(self._index, "", _reason(piece, reply))

    def cut_short(self) -> list[dict[str, Any]]:
        """Return the end of a choice that has begun. Clients of OpenAI's raise on `error` beside it."""
        return self._shape.delta(self._index, "", "abort")

    def _opening(self, piece: Piece) -> list[dict[str, Any]]:
        logprobs = None
        if self._writer is not None:
            logprobs = self._writer.write(_prompt_run(self.generation, piece))
        return self._shape.opening(self._index, self._echo, logprobs)

    def _make_frame(self) -> tuple[bytes, bytes, bytes]:
        (choice,) = self._shape.delta(self._index, _TEXT, None)
        before, _, rest = self._chunks.chunk(choice, msgspec.Raw(_USAGE)).partition(encode(_TEXT))
        between, _, end = rest.partition(_USAGE)
        return before, between, end
