"""A backend that answers at once: what a router costs shows best in front of nothing.

Every GET gets its route's body, or an empty JSON object. A POST gets one canned answer that native and
OpenAI clients, and routers that pass KV parameters on, all understand; with `"stream": true` it gets events,
one each interval, all streams in one go as the step of an engine's batch. As a program, a server of its own:
`python -m benchmarks.stub_http --port N`.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping
from typing import cast

import uvloop
from typing_extensions import override

EVENT = b'data: {"text": " stub", "output_ids": [7], "meta_info": {"id": "0", "finish_reason": null}}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
LAST_CHUNKS = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER = json.dumps(
    {
        "id": "0",
        "object": "text_completion",
        "created": 0,
        "model": "stub",
        "text": " one two three four",
        "output_ids": [1, 2, 3, 4],
        "choices": [
            {"index": 0, "text": " one two three four", "logprobs": None, "finish_reason": "length"}
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12},
        "meta_info": {
            "id": "0",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 8,
            "completion_tokens": 4,
            "cached_tokens": 0,
            "e2e_latency": 0.0,
        },
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [0],
            "remote_engine_id": "stub",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
        },
    }
).encode()


def whole(body: bytes) -> bytes:
    """Return a response with a JSON body."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


class Streams:
    """Streams under way, and how many events each still gets."""

    def __init__(self, num_events: int, interval_s: float) -> None:
        self._num_events, self._interval_s = num_events, interval_s
        self._left: dict[asyncio.WriteTransport, int] = {}

    def begin(self, transport: asyncio.WriteTransport) -> None:
        """Answer with events from the next beat on."""
        transport.write(EVENTS)
        self._left[transport] = self._num_events

    def end(self, transport: asyncio.WriteTransport) -> None:
        """The client is gone."""
        self._left.pop(transport, None)

    async def run(self) -> None:
        """Write to all of them, beat by beat."""
        while True:
            await asyncio.sleep(self._interval_s)
            for transport, num_left in list(self._left.items()):
                transport.write(CHUNK if num_left > 1 else CHUNK + LAST_CHUNKS)
                self._left[transport] = num_left - 1
                if num_left <= 1:
                    del self._left[transport]


class StubConnection(asyncio.Protocol):
    """One connection; requests come one after the other.

    Args:
        routes: Bodies of GETs by their path.
    """

    def __init__(self, routes: Mapping[str, bytes], streams: Streams | None = None) -> None:
        self._routes, self._streams = routes, streams
        self._received = b""
        self._transport: asyncio.Transport | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's is none of asyncio's classes

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        assert self._transport is not None
        if self._streams is not None:
            self._streams.end(self._transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            _, found, length = head.partition(b"content-length:")
            whole_length = end + 4 + (int(length.split(b"\r\n", 1)[0]) if found else 0)
            if b"transfer-encoding: chunked" in head:
                whole_length = self._received.find(b"\r\n0\r\n\r\n", end) + 7
                if whole_length < 7:
                    return
            if len(self._received) < whole_length:
                return
            body, self._received = (
                self._received[end + 4 : whole_length],
                self._received[whole_length:],
            )
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        if head.startswith(b"get"):
            path = head.split(b" ", 2)[1].decode()
            self._transport.write(whole(self._routes.get(path, b"{}")))
        elif self._streams is not None and b'"stream":true' in body.replace(b" ", b""):
            self._streams.begin(self._transport)
        else:
            self._transport.write(whole(ANSWER))


async def _serve(port: int, streams: Streams) -> None:
    routes = {"/v1/models": b'{"object": "list", "data": [{"id": "stub", "object": "model"}]}'}
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: StubConnection(routes, streams), "127.0.0.1", port)
    await streams.run()


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stub_http")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--events", type=int, default=50, help="of each stream")
    parser.add_argument("--interval-ms", type=float, default=100, help="between two of them")
    args = parser.parse_args()
    uvloop.run(_serve(args.port, Streams(args.events, args.interval_ms / 1000)))


if __name__ == "__main__":
    main()
