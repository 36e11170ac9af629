"""Real nodes as nodes under test: what they are over HTTP, and requests over the link to their engines."""

import contextlib
import os
import secrets
import time
import urllib.parse
import urllib.request

import msgspec

from tandem.wire.channel import DEFAULT_HEARTBEAT, Link, heartbeat_of, tcp_address
from tandem.wire.errors import PeerLost
from tandem.wire.generation import GenerateRequest, RequestId, Room, SamplingParams
from tandem.wire.hosts import resolve
from tandem.wire.keys import ChannelKey, operator_key, reader_key
from tandem.wire.messages import (
    Cancel,
    FromEngine,
    NodeInfo,
    Ping,
    RequestFailed,
    StartDecode,
    StartPrefill,
    ToEngine,
    TokenBatch,
)

HTTP_TIMEOUT_S = 10.0
CONNECT_S = 10.0


class Node:
    """A node at a URL, and a link to its engine. The cluster's secret is TANDEM_CLUSTER_KEY, as nodes read it.

    Attributes:
        info: What it is.
        errors: By room, the code of the error that a request ended with.
        ended: Rooms whose requests got a token.
    """

    def __init__(self, url: str, role: str) -> None:
        secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
        self.key = ChannelKey.from_secret(secret) if secret else None
        headers = {"Authorization": f"Bearer {reader_key(operator_key(secret))}"} if secret else {}
        request = urllib.request.Request(f"{url.rstrip('/')}/server_info", headers=headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310
            self.info = msgspec.json.decode(answer.read(), type=NodeInfo)
        assert self.info.role == role, f"{url} is a {self.info.role} node"
        interval_ms = self.info.heartbeat_interval_ms
        self.beat = heartbeat_of(interval_ms) if interval_ms else DEFAULT_HEARTBEAT
        self.host = resolve(urllib.parse.urlsplit(url).hostname or "")
        address = tcp_address(self.host, self.info.engine_port)
        self._link: Link[FromEngine] = Link(address, FromEngine, self.key, self.beat)
        self._next_ping_s = 0.0
        self._rooms: dict[RequestId, Room] = {}
        self.errors: dict[Room, str] = {}
        self.ended: set[Room] = set()

    def keep_alive(self) -> None:
        """Ping the engine, and read what it sends."""
        now_s = time.monotonic()
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.beat.interval_s
            with contextlib.suppress(PeerLost):
                self._link.send(Ping())
        while (message := self._link.receive()) is not None:
            if isinstance(message, RequestFailed):
                self.errors[self._rooms[message.request_id]] = message.error.code
            if isinstance(message, TokenBatch):
                self.ended |= {self._rooms[delta.request_id] for delta in message.deltas}

    def close(self) -> None:
        """Close the link: the node then cancels what is left."""
        self._link.close()

    def _request(self, room: Room, num_tokens: int) -> GenerateRequest:
        # No two alike, or the node would find the prompt in its cache.
        draw = secrets.SystemRandom()
        prompt = [draw.randrange(self.info.model.vocab_size) for _ in range(num_tokens)]
        name = RequestId(secrets.token_hex(12))
        self._rooms[name] = room
        sampling = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
        return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling)

    def _send(self, message: ToEngine) -> None:
        deadline_s = time.monotonic() + CONNECT_S
        while True:
            try:
                return self._link.send(message)
            except PeerLost:
                assert time.monotonic() < deadline_s, (
                    f"the engine does not answer: {self._link.refusal}"
                )
                time.sleep(0.01)


class PrefillNode(Node):
    """A prefill node at a URL; see `PrefillUnderTest`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "prefill")
        assert self.info.bootstrap_port, "the node reports no bootstrap port"
        self.port = self.info.bootstrap_port

    def start(self, room: Room, num_tokens: int) -> None:
        """Have it compute a prompt of so many tokens and push it in a room."""
        self._send(StartPrefill(request=self._request(room, num_tokens), room=room))

    def content(self, num_tokens: int) -> None:
        """Its pages are not known: what lands is compared with the checksums."""
        del num_tokens


class DecodeNode(Node):
    """A decode node at a URL; see `DecodeUnderTest`."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "decode")
        self.page_size = self.info.load.page_size
        assert self.page_size, "the node reports no page_size in its load"

    def start(self, room: Room, num_tokens: int, host: str, port: int) -> None:
        """Have it take over a prompt of so many tokens in a room, from the prefill at this port."""
        request = self._request(room, num_tokens)
        self._send(
            StartDecode(request=request, room=room, bootstrap_host=host, bootstrap_port=port)
        )

    def cancel(self, room: Room) -> None:
        """Give the request up."""
        (name,) = (name for name, each in self._rooms.items() if each == room)
        self._send(Cancel(request_id=name))

    def outcome(self, room: Room) -> str:
        """Return `landed` once a token came, or the code of the error; empty before."""
        return self.errors.get(room, "landed" if room in self.ended else "")
