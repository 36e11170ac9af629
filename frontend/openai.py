"""OpenAI's API: `/v1/completions` and `/v1/chat/completions`, answered whole or streamed.

What may be in a body is in `frontend/openai_body.py`. The two routes differ only in the shape of
a choice, which `Completion` and `Chat` hold.
"""

import time
from contextlib import aclosing
from typing import Any, Protocol

from aiohttp import web

from frontend.body import read_json
from frontend.edge import EDGE, Edge, side_by_side
from frontend.generation import Answer, Piece
from frontend.middleware import error_body, json_response, public_info
from frontend.openai_body import OpenAICall, read_chat, read_completion
from frontend.sse import EventStream, event
from wire.errors import TandemError


class Shape(Protocol):
    """How one route writes its choices."""

    whole: str
    chunk: str

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        ...

    def opening(self, index: int, echo: str) -> list[dict[str, Any]]:
        """Return the choices, one a chunk, that stand before the first text."""
        ...

    def delta(self, index: int, text: str, reason: str | None) -> list[dict[str, Any]]:
        """Return the choices, one a chunk, that add `text` and maybe end."""
        ...


class Completion:
    """`/v1/completions`."""

    whole = chunk = "text_completion"

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """See `Shape`."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int, echo: str) -> list[dict[str, Any]]:
        """See `Shape`."""
        return [self.choice(index, echo, None)] if echo else []

    def delta(self, index: int, text: str, reason: str | None) -> list[dict[str, Any]]:
        """See `Shape`. A delta without text is not worth a chunk."""
        return [self.choice(index, text, reason)] if text or reason else []


class Chat:
    """`/v1/chat/completions`."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """See `Shape`."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int, echo: str) -> list[dict[str, Any]]:
        """See `Shape`."""
        return [self._delta(index, {"role": "assistant", "content": echo}, None)]

    def delta(self, index: int, text: str, reason: str | None) -> list[dict[str, Any]]:
        """See `Shape`. The end has a chunk of its own."""
        text_part = [self._delta(index, {"content": text}, None)] if text else []
        return text_part + ([self._delta(index, {}, reason)] if reason else [])

    def _delta(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


async def completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/completions`.

    Raises:
        TandemError: Nothing was sent yet.
    """
    edge = request.app[EDGE]
    call = await read_completion(edge.backend.model(), read_json(await request.read()))
    return await _answer(request, edge, call, Completion())


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer `/v1/chat/completions`.

    Raises:
        TandemError: Nothing was sent yet.
    """
    edge = request.app[EDGE]
    call = await read_chat(edge.backend.model(), read_json(await request.read()))
    return await _answer(request, edge, call, Chat())


async def _answer(
    request: web.Request, edge: Edge, call: OpenAICall, shape: Shape
) -> web.StreamResponse:
    if call.is_stream:
        async with EventStream(request, edge.options.stall_timeout_s) as stream:
            return await _Chunks(call, shape, stream).send_all(edge)
    answers = await edge.answers(call.generations)
    pairs = enumerate(zip(call.echoes, answers, strict=True))
    return json_response(
        _head(call, shape.whole)
        | {
            "choices": [
                shape.choice(index, echo + answer.text, _reason(answer))
                for index, (echo, answer) in pairs
            ],
            "usage": _usage(call, answers),
        }
    )


def _head(call: OpenAICall, kind: str) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "object": kind,
        "created": int(time.time()),
        "model": call.model_name,
    }


def _reason(part: Answer | Piece) -> str | None:
    return part.ending.reason if part.ending is not None else None


def _usage(call: OpenAICall, answers: list[Answer]) -> dict[str, Any]:
    num_output = sum(len(answer.output_ids) for answer in answers)
    return {
        "prompt_tokens": call.num_prompt_tokens,
        "completion_tokens": num_output,
        "total_tokens": call.num_prompt_tokens + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in answers)},
    }


class _Chunks:
    """Sends one call's chunks: for each choice an opening, its text, its end; then the usage."""

    def __init__(self, call: OpenAICall, shape: Shape, stream: EventStream) -> None:
        self._call = call
        self._shape = shape
        self._stream = stream
        self._head = _head(call, shape.chunk)
        self._answers = [Answer.empty() for _ in call.generations]

    async def send_all(self, edge: Edge) -> web.StreamResponse:
        """Send everything; return the response for aiohttp."""
        await side_by_side(
            [self._send_choice(edge, index) for index in range(len(self._call.generations))]
        )
        if self._call.usage.include_usage:
            usage = _usage(self._call, self._answers)
            await self._stream.send(event(self._head | {"choices": [], "usage": usage}))
        return await self._stream.finish()

    async def _send_choice(self, edge: Edge, index: int) -> None:
        opening = self._shape.opening(index, self._call.echoes[index])
        try:
            async with aclosing(edge.run(self._call.generations[index])) as pieces:
                async for piece in pieces:
                    self._answers[index].add(piece)
                    await self._send(opening + self._shape.delta(index, piece.text, _reason(piece)))
                    opening = []
        except TandemError as error:
            if not self._stream.is_started:
                raise
            await self._send_error(index, error)

    async def _send(self, choices: list[dict[str, Any]]) -> None:
        if not choices:
            return
        options = self._call.usage
        extra: dict[str, Any] = {"usage": None} if options.include_usage else {}
        if options.continuous_usage_stats:
            extra = {"usage": _usage(self._call, self._answers)}
        events = [event(self._head | {"choices": [choice]} | extra) for choice in choices]
        await self._stream.send(b"".join(events))

    async def _send_error(self, index: int, error: TandemError) -> None:
        """End a choice that has begun. Clients of OpenAI's raise on the field `error`."""
        choices = self._shape.delta(index, "", "abort")
        body = error_body(public_info(error))
        await self._stream.send(event(self._head | {"choices": choices} | body))
