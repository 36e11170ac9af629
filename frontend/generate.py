"""The native API: `POST|PUT /generate`, with SGLang's answers and events.

What may be in a body is in `frontend/native_body.py`.
"""

import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from frontend.body import read_json
from frontend.edge import EDGE, Edge, side_by_side
from frontend.generation import Answer, Ending, Generation, failed
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
        _result(generation, answer, elapsed_s)
        for generation, answer in zip(call.generations, answers, strict=True)
    ]
    return json_response(results if call.is_list else results[0])


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


def _result(generation: Generation, answer: Answer, elapsed_s: float) -> dict[str, Any]:
    num_tokens = len(answer.output_ids)
    meta: dict[str, Any] = {
        "id": generation.request.request_id,
        "finish_reason": finish_reason(answer.ending, num_tokens),
        "prompt_tokens": len(generation.request.prompt_ids),
        "completion_tokens": num_tokens,
        "cached_tokens": answer.cached_tokens,
    }
    if answer.ending is not None:
        meta["e2e_latency"] = elapsed_s
    return {"text": answer.text, "output_ids": answer.output_ids, "meta_info": meta}


async def _stream(
    request: web.Request, edge: Edge, call: NativeCall, started: float
) -> web.StreamResponse:
    async with EventStream(request, edge.options.stall_timeout_s) as stream:
        await side_by_side(
            [
                _stream_one(edge, stream, generation, index if call.is_list else None, started)
                for index, generation in enumerate(call.generations)
            ]
        )
        return await stream.finish()


async def _stream_one(
    edge: Edge, stream: EventStream, generation: Generation, index: int | None, started: float
) -> None:
    """Send the events of one generation: all so far each time, or only what is new."""
    is_incremental = edge.options.incremental_streaming_output
    answer = Answer.empty()

    async def send(text: str, token_ids: list[int]) -> None:
        result = _result(generation, answer, time.perf_counter() - started)
        if is_incremental:
            result |= {"text": text, "output_ids": token_ids}
        if index is not None:
            result["index"] = index
        await stream.send(event(result))

    try:
        async with aclosing(edge.run(generation)) as pieces:
            async for piece in pieces:
                answer.add(piece)
                await send(piece.text, piece.token_ids)
    except TandemError as error:
        if not stream.is_started:
            raise
        answer.ending = failed(public_info(error))
        await send("", [])
