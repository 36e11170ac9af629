"""Real nodes under test: their description over HTTP, and requests over the link to their engines."""

import contextlib
import os
import secrets
import time
import urllib.parse
import urllib.request

import msgspec

from tandem.wire.channel import DEFAULT_HEARTBEAT, Link, heartbeat_of, tcp_address
from tandem.wire.errors import PeerLost
from tandem.wire.generation import GenerateRequest, RequestId, SamplingParams
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
    TokenBatch,
)

HTTP_TIMEOUT_S = CONNECT_S = 10.0


class Node:
    """A node at a URL, and a link to its engine.

    Attributes:
        outcomes: By room, `landed` once a token came, or the code of the error.
    """

    def __init__(self, url, role):
        secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
        self.key = ChannelKey.from_secret(secret) if secret else None
        headers = {"Authorization": f"Bearer {reader_key(operator_key(secret))}"} if secret else {}
        request = urllib.request.Request(f"{url.rstrip('/')}/server_info", headers=headers)
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
            self.info = msgspec.json.decode(answer.read(), type=NodeInfo)
        assert self.info.role == role, f"{url} is a {self.info.role} node"
        interval_ms = self.info.heartbeat_interval_ms
        self.beat = heartbeat_of(interval_ms) if interval_ms else DEFAULT_HEARTBEAT
        self.host = resolve(urllib.parse.urlsplit(url).hostname or "")
        address = tcp_address(self.host, self.info.engine_port)
        self._link = Link(address, FromEngine, self.key, self.beat)
        self._next_ping_s, self._rooms, self.outcomes = 0.0, {}, {}

    def keep_alive(self):
        """Ping the engine, and read what it sends."""
        now_s = time.monotonic()
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.beat.interval_s
            with contextlib.suppress(PeerLost):
                self._link.send(Ping())
        while (message := self._link.receive()) is not None:
            if isinstance(message, RequestFailed):
                self.outcomes[self._rooms[message.request_id]] = message.error.code
            if isinstance(message, TokenBatch):
                for delta in message.deltas:
                    self.outcomes.setdefault(self._rooms[delta.request_id], "landed")

    def close(self):
        """Close the link: the node then cancels what is left."""
        self._link.close()

    def _request(self, room, num_tokens):
        # No two alike, or the node would find the prompt in its cache.
        draw = secrets.SystemRandom()
        prompt = [draw.randrange(self.info.model.vocab_size) for _ in range(num_tokens)]
        name = RequestId(secrets.token_hex(12))
        self._rooms[name] = room
        sampling = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True)
        return GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling)

    def _send(self, message):
        deadline_s = time.monotonic() + CONNECT_S
        while True:
            try:
                return self._link.send(message)
            except PeerLost:
                refusal = self._link.refusal
                assert time.monotonic() < deadline_s, f"the engine does not answer: {refusal}"
                time.sleep(0.01)


class PrefillNode(Node):
    """A prefill node at a URL."""

    def __init__(self, url):
        super().__init__(url, "prefill")
        self.port = self.info.bootstrap_port
        assert self.port, "the node reports no bootstrap port"

    def start(self, room, num_tokens):
        self._send(StartPrefill(request=self._request(room, num_tokens), room=room))

    def content(self, _num_tokens):
        """Its pages are not known: what lands is compared with the checksums."""


class DecodeNode(Node):
    """A decode node at a URL."""

    def __init__(self, url):
        super().__init__(url, "decode")
        self.page_size = self.info.load.page_size
        assert self.page_size, "the node reports no page_size in its load"

    def start(self, room, num_tokens, host, port):
        request = self._request(room, num_tokens)
        start = StartDecode(request=request, room=room, bootstrap_host=host, bootstrap_port=port)
        self._send(start)

    def cancel(self, room):
        (name,) = (name for name, each in self._rooms.items() if each == room)
        self._send(Cancel(request_id=name))

    def outcome(self, room):
        return self.outcomes.get(room, "")
