"""The native API: `POST|PUT /generate`, with SGLang's answers and events.

What may be in a body is in `frontend/native_body.py`.
"""

import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from aiohttp import web

from tandem.frontend.caller import asked_by
from tandem.frontend.edge import EDGE, Edge, side_by_side
from tandem.frontend.generation import Answer, Generation
from tandem.frontend.limits import within_time
from tandem.frontend.logprobs import NativeLogprobs, native_logprobs
from tandem.frontend.middleware import json_response, public_info
from tandem.frontend.native_body import NativeCall, read_call
from tandem.frontend.session import with_session
from tandem.frontend.sse import EventStream, encode
from tandem.frontend.transcript import Ending, Piece, failed
from tandem.wire.errors import TandemError


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer `/generate`.

    Raises:
        TandemError: Nothing was sent yet.
    """
    started = time.perf_counter()
    edge = request.app[EDGE]
    model, headers = edge.backend.model(), request.headers
    call = await edge.read(
        await request.read(), lambda data: read_call(model, with_session(headers, data))
    )
    call = replace(call, generations=asked_by(request, call.generations))
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
    meta = _meta(generation, answer.cached_tokens, answer.ending, len(answer.output_ids))
    if logprobs is not None:
        meta |= logprobs.fields()
    if answer.ending is not None:
        meta["e2e_latency"] = elapsed_s
    result: dict[str, Any] = {
        "text": answer.text,
        "output_ids": answer.output_ids,
        "meta_info": meta,
    }
    if generation.timings.is_wanted:
        result["timings"] = generation.report()
    return result


def _meta(
    generation: Generation, cached_tokens: int, ending: Ending | None, num_tokens: int
) -> dict[str, Any]:
    by_tier = generation.timings.cached_by_tier
    device = cached_tokens - sum(by_tier.values())
    return {
        "id": generation.request.request_id,
        "finish_reason": finish_reason(ending, num_tokens),
        "prompt_tokens": len(generation.request.prompt_ids),
        "cached_tokens": cached_tokens,
        **({"cached_tokens_details": {"device": device, **by_tier}} if by_tier else {}),
        # Last: `_Events` ends it with another number.
        "completion_tokens": num_tokens,
    }


async def _stream(
    request: web.Request, edge: Edge, call: NativeCall, started: float
) -> web.StreamResponse:
    async with EventStream(request, edge.options.stall_timeout_s, edge.outbox) as stream:
        await side_by_side(
            [
                _Events(edge, stream, call, index, started).send_all()
                for index in range(len(call.generations))
            ]
        )
        return await stream.finish()


class _Events:
    """Sends the events of one generation: all so far each time, or only what is new.

    What events repeat is kept as the bytes it is sent as, so that an ordinary token costs joining
    them. It is the generation's `Outlet`.
    """

    __slots__ = (
        "_cached_tokens",
        "_edge",
        "_generation",
        "_ids",
        "_is_incremental",
        "_label",
        "_logprobs",
        "_meta_head",
        "_num_tokens",
        "_started",
        "_stream",
        "_text",
    )

    def __init__(
        self, edge: Edge, stream: EventStream, call: NativeCall, index: int, started: float
    ) -> None:
        self._edge, self._stream = edge, stream
        self._generation, self._started = call.generations[index], started
        self._label = b',"index":%d' % index if call.is_list else b""
        self._is_incremental = edge.options.incremental_streaming_output
        # JSON, without quotes and brackets.
        self._text, self._ids = bytearray(), bytearray()
        self._num_tokens = self._cached_tokens = 0
        self._meta_head = b""
        self._logprobs = native_logprobs(self._generation, has_text=call.has_text_in_logprobs)

    async def send_all(self) -> None:
        """Send every event, an error after the first one included.

        Raises:
            TandemError: Nothing was sent yet.
        """
        try:
            async with (
                within_time(self._stream.request),
                aclosing(self._edge.run(self._generation, self)) as pieces,
            ):
                async for piece in pieces:
                    await self._send(piece)
        except TandemError as error:
            if not self._stream.is_started:
                raise
            await self._send(Piece("", [], ending=failed(public_info(error))))

    def has_room(self) -> bool:
        """See `Outlet`."""
        return self._stream.has_room()

    def write(self, text: str, token_ids: Sequence[int]) -> None:
        """See `Outlet`."""
        self._add(text, token_ids)
        self._stream.send_now(self._event(b"%b%d}" % (self._meta_head, self._num_tokens)))

    async def _send(self, piece: Piece) -> None:
        self._add(piece.text, piece.token_ids)
        self._cached_tokens = max(self._cached_tokens, piece.cached_tokens)
        meta = _meta(self._generation, self._cached_tokens, piece.ending, self._num_tokens)
        self._meta_head = encode(_meta(self._generation, self._cached_tokens, None, 0))[:-2]
        if self._logprobs is not None:
            if self._is_incremental:
                self._logprobs.clear()
            self._logprobs.add((piece.token_ids, piece.logprobs), piece.prompt_logprobs)
            meta |= self._logprobs.fields()
        if piece.ending is not None:
            meta["e2e_latency"] = time.perf_counter() - self._started
            if self._generation.timings.is_wanted:
                self._label += b',"timings":%b' % encode(self._generation.report())
        await self._stream.send(self._event(encode(meta)))

    def _event(self, meta: bytes) -> bytes:
        return b"".join(
            (
                b'data: {"text":"',
                self._text,
                b'","output_ids":[',
                self._ids,
                b'],"meta_info":',
                meta,
                self._label,
                b"}\n\n",
            )
        )

    def _add(self, text: str, token_ids: Sequence[int]) -> None:
        if self._is_incremental:
            self._text.clear()
            self._ids.clear()
        self._text += encode(text)[1:-1]
        for token_id in token_ids:
            self._ids += b",%d" % token_id if self._ids else b"%d" % token_id
        self._num_tokens += len(token_ids)
