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
from frontend.generation import Answer, Generation, Piece
from frontend.logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter, Run
from frontend.middleware import error_body, json_response, public_info
from frontend.openai_body import OpenAICall, read_chat, read_completion
from frontend.sse import EventStream, event
from frontend.tokenizer import Tokenizer
from wire.errors import TandemError

Logprobs = dict[str, Any] | None


class Shape(Protocol):
    """How one route writes its choices."""

    whole: str
    chunk: str

    def writer(self, tokenizer: Tokenizer | None, num_top: int) -> LogprobWriter:
        """Return what writes the log-probabilities of one choice."""
        ...

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        """Return a choice of a whole answer."""
        ...

    def opening(self, index: int, echo: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """Return the choices, one a chunk, that stand before the first text."""
        ...

    def delta(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> list[dict[str, Any]]:
        """Return the choices, one a chunk, that add `text` and maybe end."""
        ...


class Completion:
    """`/v1/completions`."""

    whole = chunk = "text_completion"

    def writer(self, tokenizer: Tokenizer | None, num_top: int) -> LogprobWriter:
        """See `Shape`."""
        return CompletionLogprobs(tokenizer, num_top)

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        """See `Shape`."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int, echo: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """See `Shape`."""
        is_worth = echo or (logprobs is not None and logprobs["tokens"])
        return [self.choice(index, echo, None, logprobs)] if is_worth else []

    def delta(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> list[dict[str, Any]]:
        """See `Shape`. A delta that tells nothing is not worth a chunk."""
        is_worth = text or reason or logprobs
        return [self.choice(index, text, reason, logprobs)] if is_worth else []


class Chat:
    """`/v1/chat/completions`."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def writer(self, tokenizer: Tokenizer | None, num_top: int) -> LogprobWriter:
        """See `Shape`."""
        return ChatLogprobs(tokenizer, num_top)

    def choice(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        """See `Shape`."""
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self, index: int, echo: str, logprobs: Logprobs) -> list[dict[str, Any]]:
        """See `Shape`. A chat echoes nothing."""
        return [self._delta(index, {"role": "assistant", "content": echo}, None)]

    def delta(
        self, index: int, text: str, reason: str | None, logprobs: Logprobs = None
    ) -> list[dict[str, Any]]:
        """See `Shape`. The end has a chunk of its own."""
        is_worth = text or logprobs
        part = [self._delta(index, {"content": text}, None, logprobs)] if is_worth else []
        return part + ([self._delta(index, {}, reason)] if reason else [])

    def _delta(
        self, index: int, delta: dict[str, str], reason: str | None, logprobs: Logprobs = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


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
    choices = [_choice(call, shape, index, answer) for index, answer in enumerate(answers)]
    return json_response(
        _head(call, shape.whole) | {"choices": choices, "usage": _usage(call, answers)}
    )


def _choice(call: OpenAICall, shape: Shape, index: int, answer: Answer) -> dict[str, Any]:
    generation = call.generations[index]
    text = call.echoes[index] + answer.text
    logprobs = None
    if (writer := _writer(shape, generation)) is not None:
        logprobs = writer.write(
            _prompt_run(generation, answer), (answer.output_ids, answer.logprobs)
        )
    return shape.choice(index, text, _reason(answer), logprobs)


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
        self._writers = [_writer(shape, generation) for generation in call.generations]

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
        is_first = True
        try:
            async with aclosing(edge.run(self._call.generations[index])) as pieces:
                async for piece in pieces:
                    self._answers[index].add(piece)
                    opening = self._opening(index, piece) if is_first else []
                    await self._send(opening + self._delta(index, piece))
                    is_first = False
        except TandemError as error:
            if not self._stream.is_started:
                raise
            await self._send_error(index, error)

    def _opening(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        writer, generation = self._writers[index], self._call.generations[index]
        logprobs = writer.write(_prompt_run(generation, piece)) if writer is not None else None
        return self._shape.opening(index, self._call.echoes[index], logprobs)

    def _delta(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        writer, run = self._writers[index], (piece.token_ids, piece.logprobs)
        logprobs = writer.write(run) if writer is not None and piece.token_ids else None
        return self._shape.delta(index, piece.text, _reason(piece), logprobs)

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
