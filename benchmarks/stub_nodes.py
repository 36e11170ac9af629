"""Nodes of ours that answer at once: a prefill and a decode that compute nothing and move nothing.

They speak the wire as real ones do: prefill sends the first token and the hand-off, decode the same token and one
more each pass, tokens of all requests in one message. A request for more than a few tokens is paced: one token
each beat, all in one message, as a batch's step. `python -m benchmarks.stub_nodes --port N M`.
"""

import argparse
import asyncio
import threading
import time
from collections import defaultdict

import msgspec
import uvloop

from benchmarks.stub_http import StubConnection
from tandem.frontend.tokenizer_files import tokenizer_files, tokenizer_hash
from tandem.node.checkpoint import resolve_model
from tandem.node.command import default_cache_dir
from tandem.wire.channel import Inbox, Peer, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Finish
from tandem.wire.ids import Epoch, new_epoch
from tandem.wire.messages import (
    Cancel,
    NodeLoad,
    Ping,
    Pong,
    StartDecode,
    StartPrefill,
    ToEngine,
    TokenBatch,
    TokenDelta,
)
from tandem.wire.node_info import ModelInfo, NodeInfo

# Up to here a request is answered as fast as passes go, beyond it one token a beat.
MOST_UNPACED = 16
VOCAB_SIZE = 49_152


class StubEngine:
    """One role's inbox, and the answers under way."""

    def __init__(self, interval_s: float) -> None:
        self.epoch: Epoch = new_epoch()
        self.inbox: Inbox[ToEngine] = Inbox("tcp://127.0.0.1:0", ToEngine)
        self._interval_s = interval_s
        self._beat_at_s = time.monotonic() + interval_s
        self._starts: dict[tuple[Peer, str], StartDecode] = {}
        self._next: dict[tuple[Peer, str], int] = {}

    @property
    def wait_s(self) -> float:
        """How long it may be left alone."""
        is_busy = any(not _is_paced(start) for start in self._starts.values())
        return 0.0 if is_busy else max(0.0, self._beat_at_s - time.monotonic())

    def run_once(self) -> None:
        """Read what came and answer, once."""
        deltas: dict[Peer, list[TokenDelta]] = defaultdict(list)
        while (envelope := self.inbox.receive()) is not None:
            self._read(envelope.peer, envelope.message, deltas)
        is_beat = time.monotonic() >= self._beat_at_s
        if is_beat:
            self._beat_at_s = time.monotonic() + self._interval_s
        for key, start in list(self._starts.items()):
            if is_beat or not _is_paced(start):
                deltas[key[0]].append(self._step(key, start))
        for peer, told in deltas.items():
            self._send(peer, TokenBatch(epoch=self.epoch, deltas=told))

    def _read(self, peer: Peer, message: ToEngine, deltas: dict[Peer, list[TokenDelta]]) -> None:
        if isinstance(message, Ping):
            self._send(peer, Pong(epoch=self.epoch, load=NodeLoad()))
        elif isinstance(message, StartPrefill):
            deltas[peer] += [_delta(message, 0), _delta(message, 1, "handed_off")]
        elif isinstance(message, StartDecode):
            self._starts[peer, message.request.request_id] = message
            self._next[peer, message.request.request_id] = 0
        elif isinstance(message, Cancel):
            self._starts.pop((peer, message.request_id), None)

    def _step(self, key: tuple[Peer, str], start: StartDecode) -> TokenDelta:
        index = self._next[key]
        self._next[key] = index + 1
        if index + 1 < start.request.sampling.max_new_tokens:
            return _delta(start, index)
        del self._starts[key], self._next[key]
        return _delta(start, index, "length")

    def _send(self, peer: Peer, message: TokenBatch | Pong) -> None:
        try:
            self.inbox.send(peer, message)
        except PeerLost:  # it stopped listening
            self._starts = {key: start for key, start in self._starts.items() if key[0] != peer}


def _is_paced(start: StartDecode) -> bool:
    return start.request.sampling.max_new_tokens > MOST_UNPACED


def _delta(start: StartPrefill | StartDecode, index: int, reason: str = "") -> TokenDelta:
    return TokenDelta(
        request_id=start.request.request_id,
        attempt=start.attempt,
        index=index,
        token_ids=[] if reason == "handed_off" else [1000 + 37 * index],
        finish=Finish(reason=reason) if reason else None,  # type: ignore[arg-type]
    )


def _routes(role: str, engine: StubEngine, files: dict[str, str]) -> dict[str, bytes]:
    model = ModelInfo(
        name="stub",
        fingerprint="stub",
        context_length=8192,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[2],
        tokenizer_hash=tokenizer_hash(files),
    )
    info = NodeInfo(
        role=role,
        version="stub",
        epoch=engine.epoch,
        engine_port=engine.inbox.port,
        bootstrap_port=1 if role == "prefill" else None,
        max_prompt_tokens=8000,
        model=model,
    )
    return {
        "/server_info": msgspec.json.encode(info),
        "/tokenizer": msgspec.json.encode({"files": files}),
    }


async def _serve(ports: list[int], routes: list[dict[str, bytes]]) -> None:
    loop = asyncio.get_running_loop()
    for port, each in zip(ports, routes, strict=True):
        await loop.create_server(lambda each=each: StubConnection(each), "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.Event().wait()


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stub_nodes")
    parser.add_argument("--ports", type=int, nargs=2, required=True, help="prefill's, decode's")
    parser.add_argument("--model", default=None, help="whose tokenizer it is")
    parser.add_argument("--interval-ms", type=float, default=100, help="between two beats")
    args = parser.parse_args()
    files = tokenizer_files(resolve_model(args.model, default_cache_dir() / "models"))
    engines = [StubEngine(args.interval_ms / 1000) for _ in range(2)]
    routes = [
        _routes(role, engine, files)
        for role, engine in zip(("prefill", "decode"), engines, strict=True)
    ]
    http = threading.Thread(target=lambda: uvloop.run(_serve(args.ports, routes)), daemon=True)
    http.start()
    while True:
        wait([engine.inbox for engine in engines], min(engine.wait_s for engine in engines))
        for engine in engines:
            engine.run_once()


if __name__ == "__main__":
    main()
