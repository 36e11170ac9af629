"""A node that speaks the real wire and says what a test tells it: inbox in a thread, HTTP beside."""

import asyncio
import contextlib
import ssl
import threading
from collections import deque
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from tandem.wire.channel import Inbox, Peer, Waker, wait
from tandem.wire.errors import AdapterNotFound, PeerLost, TandemError
from tandem.wire.generation import (
    Finish,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    new_epoch,
)
from tandem.wire.messages import (
    AdapterChanged,
    CacheReport,
    Cancel,
    FlushCache,
    LoadAdapter,
    LoadedAdapter,
    ModelInfo,
    NodeInfo,
    NodeLoad,
    Ping,
    Pong,
    RequestFailed,
    ToEngine,
    TokenBatch,
    TokenDelta,
    UnloadAdapter,
)
from tandem.wire.prefixes import pack_names
from tests.http_server import HttpServer
from tests.patience import PATIENCE_S


def request(prompt_ids=(1, 2, 3), request_id="r1", **fields) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(request_id),
        prompt_ids=list(prompt_ids),
        sampling=SamplingParams(max_new_tokens=8),
        **fields,
    )


def delta(start, index, token_ids, reason=None, **fields) -> TokenDelta:
    return TokenDelta(
        request_id=start.request.request_id,
        attempt=start.attempt,
        index=index,
        token_ids=list(token_ids),
        finish=Finish(reason=reason) if reason else None,
        **fields,
    )


def logprobs(first: int, end: int) -> list[TokenLogprobs]:
    """Log-probabilities of some positions, each telling which it is."""
    return [
        TokenLogprobs(logprob=-float(position), top=[(position, -float(position))])
        for position in range(first, end)
    ]


class FakeEngine:
    """An engine's inbox. Pings are answered; everything else is handed to the test in order.

    Attributes:
        disk: Digest of the adapter at each path.
        is_loading: Whether changes of adapters are handed to the test too, which answers them with `change`.
    """

    def __init__(self, load=None) -> None:
        self.epoch = new_epoch()
        self.load = load or NodeLoad()
        self.disk: dict[str, str] = {}
        self.is_loading = False
        self._loop = asyncio.get_running_loop()
        self._inbox: Inbox[ToEngine] = Inbox("tcp://127.0.0.1:0", ToEngine)
        self.address, self.port = self._inbox.address, self._inbox.port
        self._received: asyncio.Queue = asyncio.Queue()
        self._seen: deque = deque()
        self._peer: Peer | None = None
        self._peers: dict[tuple[str, int], Peer] = {}
        self._outgoing: deque = deque()
        self._cached: dict[str, CacheReport] = {}
        self._waker, self._is_closing = Waker(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing:
            wait([self._inbox], 5, self._waker)
            while (envelope := self._inbox.receive()) is not None:
                message, self._peer = envelope.message, envelope.peer
                if isinstance(message, Ping):
                    self._outgoing.append((self._peer, Pong(epoch=self.epoch, load=self.load)))
                    self._tell_changes(message)
                    continue
                if isinstance(message, LoadAdapter | UnloadAdapter):
                    if not self.is_loading:
                        self.change(message)
                        continue
                elif not isinstance(message, Cancel | FlushCache):
                    self._peers[message.request.request_id, message.attempt] = self._peer
                self._loop.call_soon_threadsafe(self._received.put_nowait, message)
            while self._outgoing:
                peer, message = self._outgoing.popleft()
                with contextlib.suppress(PeerLost):
                    self._inbox.send(peer or self._peer, message)
        self._inbox.close()

    def _tell_changes(self, ping: Ping) -> None:
        for tier, position in ({"": ping.prefix_position} | ping.tier_positions).items():
            cached = self._cached.get(tier)
            if cached is not None and position not in (-1, cached.position):
                self._outgoing.append((self._peer, cached))

    def change(self, change) -> None:
        """Load or unload an adapter, as a node does."""
        adapters, answer = (
            self.load.adapters,
            AdapterChanged(epoch=self.epoch, number=change.number),
        )
        if isinstance(change, UnloadAdapter):
            adapters = [each for each in adapters if each.id != change.adapter]
        elif change.digest in {"", self.disk.get(change.path)} and change.path in self.disk:
            loaded = LoadedAdapter(id=f"{change.name}@{self.disk[change.path]}", path=change.path)
            adapters = [each for each in adapters if each != loaded] + [loaded]
            answer = msgspec.structs.replace(answer, adapter=loaded.id)
        else:
            error = AdapterNotFound(change.name, change.path).info()
            answer = msgspec.structs.replace(answer, error=error)
        self.load = msgspec.structs.replace(self.load, adapters=adapters)
        self.send(Pong(epoch=self.epoch, load=self.load))
        self.send(answer)

    async def next(self, kind):
        """Return the next message, which is of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            message = await self._received.get()
        assert isinstance(message, kind), message
        return message

    def is_idle(self) -> bool:
        return self._received.empty()

    def send(self, message, start=None) -> None:
        """Send to the edge worker that sent `start`, else to the one last heard of."""
        peer = start and self._peers.get((start.request.request_id, start.attempt))
        self._outgoing.append((peer, message))
        self._waker.wake()

    def say(self, start, index, token_ids, reason=None, **fields) -> None:
        """Send tokens of one attempt."""
        deltas = [delta(start, index, token_ids, reason, **fields)]
        self.send(TokenBatch(epoch=self.epoch, deltas=deltas), start)

    def fail(self, start, error: TandemError) -> None:
        self.send(
            RequestFailed(
                epoch=self.epoch,
                request_id=start.request.request_id,
                attempt=start.attempt,
                error=error.info(),
            ),
            start,
        )

    def tell_cached(self, names, tier="") -> None:
        """Have these blocks cached, or in a tier, from now on."""
        position = self._cached[tier].position + 1 if tier in self._cached else 1
        self._cached[tier] = CacheReport(
            epoch=self.epoch, position=position, is_whole=True, tier=tier, added=pack_names(names)
        )

    def close(self) -> None:
        self._is_closing = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()


class FakeNode:
    """An engine and the HTTP by which a router finds it. Crashes, and comes back, when told."""

    def __init__(
        self, role: str, fingerprint="model-a", tokenizer_files=None, refusal="", **info
    ) -> None:
        self.refusal, self.raw_info = refusal, b""
        self.role, self.fingerprint, self._extra = role, fingerprint, info
        self._tokenizer_files = tokenizer_files or {}
        self.num_polls = self.num_tokenizer_fetches = 0
        self.serves_tokenizer = asyncio.Event()
        self.serves_tokenizer.set()
        self.keys_shown: set[str] = set()
        self.engine = FakeEngine()
        self.url = ""

    def info(self) -> NodeInfo:
        fields = {
            "role": self.role,
            "version": "test",
            "epoch": self.engine.epoch,
            "engine_port": self.engine.port,
            "bootstrap_port": 8998 if self.role == "prefill" else None,
            "model": ModelInfo(
                name="m",
                fingerprint=self.fingerprint,
                context_length=100,
                vocab_size=50,
                eos_token_ids=[2],
            ),
        }
        return NodeInfo(**fields | self._extra)

    def now_says(self, **fields) -> None:
        """Report this of itself from here on, over HTTP, and over its link that it drains."""
        self._extra |= fields
        if "is_draining" in fields:
            is_draining = fields["is_draining"]
            self.engine.load = msgspec.structs.replace(self.engine.load, is_draining=is_draining)

    def now_has(self, tokenizer_files, model) -> None:
        """Serve another model, in another life."""
        self._tokenizer_files = tokenizer_files
        self.restart_engine()
        self.now_says(model=model)

    def restart_engine(self) -> None:
        self.engine.close()
        disk, self.engine = self.engine.disk, FakeEngine()
        self.engine.disk = disk

    async def _server_info(self, request) -> web.Response:
        self.num_polls += 1
        self.keys_shown.add(request.headers.get("Authorization", ""))
        if self.raw_info:
            return web.Response(body=self.raw_info)
        if self.refusal:
            return web.json_response({"error": {"message": self.refusal}}, status=503)
        known = msgspec.to_builtins(self.info())
        return web.json_response(known | {"a_field_of_the_future": 1})

    async def _tokenizer(self, _request) -> web.Response:
        self.num_tokenizer_fetches += 1
        await self.serves_tokenizer.wait()
        return web.json_response({"files": self._tokenizer_files})

    @contextlib.asynccontextmanager
    async def serving(
        self, tls: ssl.SSLContext | None = None, port: int = 0
    ) -> AsyncIterator["FakeNode"]:
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/tokenizer", self._tokenizer)
        server = await HttpServer.start(app, port, tls)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
        try:
            yield self
        finally:
            self.engine.close()
            await server.stop()
