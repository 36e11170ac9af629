"""Backends that answer at once, so that measurements show only the router's cost.

    python -m benchmarks.stubs http --port N [--event-bytes N]   an HTTP server
    python -m benchmarks.stubs nodes --port N M [N M ...]        Tandem nodes: prefill and decode alternate

The HTTP server answers a GET with its route's body, or an empty JSON object. A POST gets one fixed response, valid for
native and OpenAI clients and for routers that pass KV parameters. With `"stream": true` it gets one event per interval;
all streams get theirs at the same time, as from an engine's batch. The node stubs use the real wire protocol: prefill sends
the first token and the hand-off. Decode sends a token per pass of its loop, or per interval for requests of many tokens.
"""

import argparse
import asyncio
import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import uvloop
import zmq
from typing_extensions import override

from tandem.frontend.text.tokenizer import tokenizer_hash
from tandem.frontend.text.tokenizer_files import tokenizer_files
from tandem.node.command import default_cache_dir
from tandem.node.models.checkpoint import resolve_model
from tandem.wire.channel import Inbox, Peer
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Epoch, Finish, new_epoch
from tandem.wire.messages import (
    Cancel,
    ModelInfo,
    NodeInfo,
    NodeLoad,
    Ping,
    Pong,
    StartDecode,
    StartPrefill,
    ToEngine,
    TokenBatch,
    TokenDelta,
)

# Requests for at most this many tokens get one token per pass of the loop, longer ones one per interval.
MOST_UNPACED = 16
VOCAB_SIZE, FIRST_ID, NUM_IDS = 49_152, 1_000, 40_000
# High enough that admission never queues.
LOAD = NodeLoad(max_running=1 << 16)
EVENT_BYTES = 96
BACKLOG = 8192
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNKS = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_KV_PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [0],
    "remote_engine_id": "stub",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
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
        "meta_info": {"id": "0", "finish_reason": {"type": "length", "length": 4}},
        "kv_transfer_params": _KV_PARAMETERS,
    }
).encode()
MODELS = b'{"object": "list", "data": [{"id": "stub", "object": "model"}]}'


class Streams:
    """The open streams, with the number of events left for each."""

    def __init__(self, num_events: int, interval_s: float, event_bytes: int) -> None:
        self._num_events, self._interval_s = num_events, interval_s
        event = b"data: {}".ljust(event_bytes - 2) + b"\n\n"
        self._chunk = b"%x\r\n%s\r\n" % (len(event), event)
        self._left: dict[asyncio.WriteTransport, int] = {}

    def begin(self, transport: asyncio.WriteTransport) -> None:
        """Start a stream: send the headers now, and events from the next interval on."""
        transport.write(EVENTS)
        self._left[transport] = self._num_events

    def end(self, transport: asyncio.WriteTransport) -> None:
        """Remove the stream of a client that has disconnected."""
        self._left.pop(transport, None)

    async def run(self) -> None:
        """Write one event to every stream per interval."""
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self._interval_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            for transport, num_left in list(self._left.items()):
                transport.write(self._chunk if num_left > 1 else self._chunk + LAST_CHUNKS)
                self._left[transport] = num_left - 1
                if num_left <= 1:
                    del self._left[transport]


class StubConnection(asyncio.Protocol):
    """One HTTP connection. Pipelining is not supported.

    Args:
        routes: Response bodies of GET requests, by path.
    """

    def __init__(self, routes: Mapping[str, bytes], streams: Streams | None = None) -> None:
        self._routes, self._streams = routes, streams
        self._received = b""
        self._transport: asyncio.Transport

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transport is of a different class

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._streams is not None:
            self._streams.end(self._transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            _, found, length = head.partition(b"content-length:")
            whole = end + 4 + (int(length.split(b"\r\n", 1)[0]) if found else 0)
            if b"transfer-encoding: chunked" in head:
                whole = self._received.find(b"\r\n0\r\n\r\n", end) + 7
                if whole < 7:
                    return
            if len(self._received) < whole:
                return
            body, self._received = self._received[end + 4 : whole], self._received[whole:]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get"):
            path = head.split(b" ", 2)[1].decode()
            self._send(self._routes.get(path, b"{}"))
        elif self._streams is not None and b'"stream":true' in body.replace(b" ", b""):
            self._streams.begin(self._transport)
        else:
            self._send(ANSWER)

    def _send(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


async def serve_http(
    routes: Mapping[int, Mapping[str, bytes]], streams: Streams | None = None
) -> None:
    """Serve each port's routes until cancelled."""
    loop = asyncio.get_running_loop()
    for port, of_port in routes.items():
        await loop.create_server(
            lambda of_port=of_port: StubConnection(of_port, streams),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=BACKLOG,
        )
    await (asyncio.Event().wait() if streams is None else streams.run())


class StubEngine:
    """One node stub: its inbox and its unfinished answers."""

    def __init__(self, role: str, interval_s: float) -> None:
        self.role, self.epoch = role, new_epoch()
        self.inbox: Inbox[ToEngine] = Inbox("tcp://127.0.0.1:0", ToEngine)
        self._interval_s = interval_s
        self._beat_at_s = time.monotonic() + interval_s
        self._starts: dict[tuple[Peer, str], StartDecode] = {}
        self._next: dict[tuple[Peer, str], int] = {}

    @property
    def has_work(self) -> bool:
        """Whether an answer is unfinished."""
        return bool(self._starts)

    @property
    def wait_s(self) -> float:
        """Seconds until `run_once` must be called again while an answer is unfinished."""
        is_busy = any(not _is_paced(start) for start in self._starts.values())
        return 0.0 if is_busy else max(0.0, self._beat_at_s - time.monotonic())

    def run_once(self) -> None:
        """Handle all received messages, then send the next tokens of the answers."""
        batches = defaultdict[Peer, TokenBatch](lambda: TokenBatch(epoch=self.epoch, deltas=[]))
        while (envelope := self.inbox.receive()) is not None:
            self._read(envelope.peer, envelope.message, batches)
        is_beat = time.monotonic() >= self._beat_at_s
        if is_beat:
            self._beat_at_s = time.monotonic() + self._interval_s
        for key, start in list(self._starts.items()):
            if is_beat or not _is_paced(start):
                self._step(key, start, batches[key[0]])
        for peer, batch in batches.items():
            self._send(peer, batch)

    def _read(self, peer: Peer, message: ToEngine, batches: dict[Peer, TokenBatch]) -> None:
        if isinstance(message, Ping):
            self._send(peer, Pong(epoch=self.epoch, load=LOAD))
        elif isinstance(message, StartPrefill):
            batches[peer].deltas.extend([_delta(message, 0), _delta(message, 1, "handed_off")])
        elif isinstance(message, StartDecode):
            self._starts[peer, message.request.request_id] = message
            self._next[peer, message.request.request_id] = 0
        elif isinstance(message, Cancel):
            self._starts.pop((peer, message.request_id), None)

    def _step(self, key: tuple[Peer, str], start: StartDecode, batch: TokenBatch) -> None:
        index = self._next[key]
        self._next[key] = index + 1
        if index + 1 < start.request.sampling.max_new_tokens:
            # The compact form that real nodes use for ordinary tokens.
            batch.streams.append(start.stream)
            batch.indexes.append(index)
            batch.token_ids.append(_token(index))
            return
        del self._starts[key], self._next[key]
        batch.deltas.append(_delta(start, index, "length"))

    def _send(self, peer: Peer, message: TokenBatch | Pong) -> None:
        try:
            self.inbox.send(peer, message)
        except PeerLost:  # the peer has disconnected
            self._starts = {key: start for key, start in self._starts.items() if key[0] != peer}


def _is_paced(start: StartDecode) -> bool:
    return start.request.sampling.max_new_tokens > MOST_UNPACED


def _token(index: int) -> int:
    return FIRST_ID + 37 * index % NUM_IDS


def _delta(start: StartPrefill | StartDecode, index: int, reason: str = "") -> TokenDelta:
    return TokenDelta(
        request_id=start.request.request_id,
        attempt=start.attempt,
        index=index,
        token_ids=[] if reason == "handed_off" else [_token(index)],
        finish=Finish(reason=reason) if reason else None,  # type: ignore[arg-type]
    )


def run_nodes(ports: Sequence[int], interval_s: float) -> None:
    """Run node stubs, alternately prefill and decode, until stopped. They neither compute nor transfer."""
    files = tokenizer_files(resolve_model(None, default_cache_dir() / "models"))
    roles = itertools.cycle(("prefill", "decode"))
    engines = [StubEngine(role, interval_s) for role, _ in zip(roles, ports, strict=False)]
    routes = {port: _routes(engine, files) for port, engine in zip(ports, engines, strict=True)}
    threading.Thread(target=lambda: uvloop.run(serve_http(routes)), daemon=True).start()
    poller, busy = zmq.Poller(), list[StubEngine]()
    of_socket = {engine.inbox.socket: engine for engine in engines}
    for socket in of_socket:
        poller.register(socket, zmq.POLLIN)
    while True:
        wait_s = min((engine.wait_s for engine in busy), default=interval_s)
        # Run only nodes that have work. A pass over hundreds of nodes would make the router wait for its answers.
        readable = [of_socket[socket] for socket, _ in poller.poll(int(wait_s * 1000))]
        for engine in {*readable, *busy}:
            engine.run_once()
        busy = [engine for engine in engines if engine.has_work]


def _routes(engine: StubEngine, files: dict[str, str]) -> dict[str, bytes]:
    model = ModelInfo(
        name="stub",
        fingerprint="stub",
        context_length=8192,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[2],
        tokenizer_hash=tokenizer_hash(files),
    )
    info = NodeInfo(
        role=engine.role,
        version="stub",
        epoch=Epoch(engine.epoch),
        engine_port=engine.inbox.port,
        bootstrap_port=1 if engine.role == "prefill" else None,
        max_prompt_tokens=8000,
        model=model,
    )
    return {
        "/server_info": msgspec.json.encode(info),
        "/tokenizer": msgspec.json.encode({"files": files}),
    }


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stubs")
    parser.add_argument("kind", choices=["http", "nodes"])
    parser.add_argument(
        "--port",
        type=int,
        nargs="+",
        required=True,
        help="http: one port; nodes: alternately ports of prefill and decode nodes",
    )
    parser.add_argument("--events", type=int, default=50, help="events per HTTP stream")
    parser.add_argument(
        "--event-bytes", type=int, default=EVENT_BYTES, help="size of each event in bytes"
    )
    parser.add_argument(
        "--interval-ms", type=float, default=100, help="interval between events of a stream"
    )
    args = parser.parse_args()
    interval_s = args.interval_ms / 1000
    if args.kind == "nodes":
        run_nodes(args.port, interval_s)
    else:
        streams = Streams(args.events, interval_s, args.event_bytes)
        uvloop.run(serve_http({args.port[0]: {"/v1/models": MODELS}}, streams))


if __name__ == "__main__":
    main()
