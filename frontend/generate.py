"""The native API: `POST|PUT /generate`, with SGLang's answers and events.

What may be in a body is in `frontend/native_body.py`.
"""

import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from frontend.body import read_json
from frontend.edge import EDGE, Edge, side_by_side
from frontend.generation import Answer, Ending, Generation, Piece, failed
from frontend.logprobs import NativeLogprobs, native_logprobs
from frontend.middleware import json_response, public_info
from frontend.native_body import NativeCall, read_call
from frontend.sse import EventStream, event
from wire.errors import TandemError


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer `/generate`.

    Raises:
        TandemError: Nothing was sent yet.
    """
    started = time.perf_counter()
    edge = request.app[EDGE]
    call = await read_call(edge.backend.model(), read_json(await request.read()))
    if call.is_stream:
        return await _stream(request, edge, call, started)
    answers = await edge.answers(call.generations)
    elapsed_s = time.perf_counter() - started
    results = [
        _whole(call, generation, answer, elapsed_s)
        for generation, answer in zip(call.generations, answers, strict=True)
    ]
    return json_response(results if call.is_list else results[0])


def _whole(
    call: NativeCall, generation: Generation, answer: Answer, elapsed_s: float
) -> dict[str, Any]:
    logprobs = native_logprobs(generation, has_text=call.has_text_in_logprobs)
    if logprobs is not None:
        logprobs.add((answer.output_ids, answer.logprobs), answer.prompt_logprobs)
    return _result(generation, answer, logprobs, elapsed_s)


def finish_reason(ending: Ending | None, num_tokens: int) -> dict[str, object] | None:
    """Return an ending as SGLang writes it; None while running."""
    if ending is None:
        return None
    if ending.reason == "stop":
        return {"type": "stop", "matched": ending.matched}
    if ending.reason == "length":
        return {"type": "length", "length": num_tokens}
    assert ending.error is not None
    return {
        "type": "abort",
        "message": ending.error.message,
        "status_code": ending.error.status,
        "err_type": ending.error.code,
    }


def _result(
    generation: Generation, answer: Answer, logprobs: NativeLogprobs | None, elapsed_s: float
) -> dict[str, Any]:
    num_tokens = len(answer.output_ids)
    meta: dict[str, Any] = {
        "id": generation.request.request_id,
        "finish_reason": finish_reason(answer.ending, num_tokens),
        "prompt_tokens": len(generation.request.prompt_ids),
        "completion_tokens": num_tokens,
        "cached_tokens": answer.cached_tokens,
    }
    if logprobs is not None:
        meta |= logprobs.fields()
    if answer.ending is not None:
        meta["e2e_latency"] = elapsed_s
    return {"text": answer.text, "output_ids": answer.output_ids, "meta_info": meta}


async def _stream(
    request: web.Request, edge: Edge, call: NativeCall, started: float
) -> web.StreamResponse:
    async with EventStream(request, edge.options.stall_timeout_s) as stream:
        await side_by_side(
            [
                _Events(edge, stream, call, index, started).send_all()
                for index in range(len(call.generations))
            ]
        )
        return await stream.finish()


class _Events:
    """Sends the events of one generation: all so far each time, or only what is new."""

    def __init__(
        self, edge: Edge, stream: EventStream, call: NativeCall, index: int, started: float
    ) -> None:
        self._edge, self._stream = edge, stream
        self._generation, self._started = call.generations[index], started
        self._label = {"index": index} if call.is_list else {}
        self._is_incremental = edge.options.incremental_streaming_output
        self._answer = Answer.empty()
        self._logprobs = native_logprobs(self._generation, has_text=call.has_text_in_logprobs)

    async def send_all(self) -> None:
        """Send every event, an error after the first one included.

        Raises:
            TandemError: Nothing was sent yet.
        """
        try:
            async with aclosing(self._edge.run(self._generation)) as pieces:
                async for piece in pieces:
                    await self._send(piece)
        except TandemError as error:
            if not self._stream.is_started:
                raise
            await self._send(Piece("", [], ending=failed(public_info(error))))

    async def _send(self, piece: Piece) -> None:
        self._answer.add(piece)
        if self._logprobs is not None:
            if self._is_incremental:
                self._logprobs.clear()
            self._logprobs.add((piece.token_ids, piece.logprobs), piece.prompt_logprobs)
        elapsed_s = time.perf_counter() - self._started
        result = _result(self._generation, self._answer, self._logprobs, elapsed_s)
        if self._is_incremental:
            result |= {"text": piece.text, "output_ids": piece.token_ids}
        await self._stream.send(event(result | self._label))
