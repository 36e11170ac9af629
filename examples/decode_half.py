#!/usr/bin/env python
"""An independent decode half that receives the KV of a prompt from a prefill node.

It is written from docs/protocol.md alone. It supports protocol version 1, transport `tcp` and prefill nodes
with one rank. It has no model: it prints the first token and keeps the pages.

    pip install msgpack pyzmq xxhash
    python examples/decode_half.py http://127.0.0.1:7000 1 2 3 4 5 6 7 8

The numbers are token ids. If the cluster has a secret, set it as TANDEM_CLUSTER_KEY.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import xxhash
import zmq
from zmq.utils import z85

BEAT_S, BUSY_S, CONNECT_S, LANDED_S, RELEASED_S, HANDSHAKE_S = 0.5, 10.0, 5.0, 120.0, 10.0, 5.0
_ANY = dict.fromkeys(("page_size", "num_layers", "num_kv_heads", "head_dim", "itemsize"), 1)


class LinkLost(Exception):
    """The link could not be opened, or it was lost. `answer` is prefill's message; empty if it sent none."""

    def __init__(self, why: str, answer: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.answer = answer or {}


class PagePool:
    """Memory of `num_pages` pages with the layout of prefill's pages."""

    def __init__(self, layout: dict[str, Any], num_pages: int) -> None:
        self.layout = {"dtype": "", **layout, "num_pages": num_pages, "strips": []}
        self.page_size: int = layout["page_size"]
        heads, dim = layout["num_kv_heads"], layout["head_dim"]
        alike = {"num_kv_heads": heads, "key_dim": dim, "value_dim": dim}
        layers = layout.get("layers") or [alike] * layout["num_layers"]
        # For each slab (K or V of a layer): offset in a page, number of heads, bytes per token and head.
        self._slabs: list[tuple[int, int, int]] = []
        self.page_bytes = 0
        for layer, name in itertools.product(layers, ("key_dim", "value_dim")):
            token_bytes = layer[name] * layout["itemsize"]
            if size := layer["num_kv_heads"] * self.page_size * token_bytes:
                self._slabs.append((self.page_bytes, layer["num_kv_heads"], token_bytes))
                self.page_bytes += size
        self.memory = bytearray(self.page_bytes * num_pages)

    def checksum(self, page: int, num_tokens: int) -> int:
        """Return the checksum of the first `num_tokens` tokens of a page."""
        written = bytearray()
        for begin, heads, token_bytes in self._slabs:
            for head in range(heads):
                at = page * self.page_bytes + begin + head * self.page_size * token_bytes
                written += self.memory[at : at + num_tokens * token_bytes]
        return xxhash.xxh3_64_intdigest(written)


@dataclass(eq=False)
class _Peer:
    secret: bytes
    rooms: dict[int, int] = field(default_factory=dict)  # the room that may write each page
    reading: dict[socket.socket, int | None] = field(default_factory=dict)


class Receiver:
    """Receives bytes from admitted peers into permitted pages, with one thread per stream."""

    def __init__(self, pool: PagePool, host: str) -> None:
        self._pool, self._host = pool, host
        self._peers: dict[str, _Peer] = {}
        self._changed = threading.Condition()
        self.num_violations = 0
        self._server = socket.create_server((host, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def admit(self) -> tuple[str, dict[str, Any]]:
        """Admit a new peer; return its name and the offer to send to it."""
        name, secret = secrets.token_hex(8), secrets.token_bytes(32)
        with self._changed:
            self._peers[name] = _Peer(secret)
        port = self._server.getsockname()[1]
        descriptor = {"host": self._host, "port": port, "peer": name, "secret": secret.hex()}
        return name, {"name": "tcp", "descriptor": descriptor}

    def permit(self, peer: str, room: int, pages: Sequence[int]) -> None:
        """Permit writes of a room to these pages."""
        with self._changed:
            self._peers[peer].rooms.update(dict.fromkeys(pages, room))

    def revoke(self, peer: str, room: int) -> None:
        """End the permission of a room. When this returns, no stream writes to its pages."""
        with self._changed:
            known = self._peers[peer]
            known.rooms = {page: each for page, each in known.rooms.items() if each != room}
            self._stop(known, lambda reads: reads == room)

    def fence(self, peer: str) -> None:
        """Disconnect a peer. When this returns, none of its writes can arrive any more."""
        with self._changed:
            if known := self._peers.pop(peer, None):
                known.rooms.clear()
                for stream in known.reading:
                    _shut(stream)
                self._stop(known, lambda reads: reads is not None)

    def _stop(self, peer: _Peer, matches: Callable[[int | None], bool]) -> None:
        for stream in [each for each, reads in peer.reading.items() if matches(reads)]:
            _shut(stream)
        self._changed.wait_for(lambda: not any(map(matches, peer.reading.values())))

    def close(self) -> None:
        """Fence all peers and stop listening."""
        for peer in list(self._peers):
            self.fence(peer)
        _shut(self._server)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with stream, contextlib.suppress(OSError, EOFError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.settimeout(HANDSHAKE_S)
            challenge = secrets.token_bytes(16)
            stream.sendall(challenge)
            reader = stream.makefile("rb")
            answer = _read(reader, 48)
            with self._changed:
                peer = self._peers.get(answer[:16].decode("latin-1"))
                secret = peer.secret if peer else bytes(32)
                proof = hashlib.blake2b(challenge, key=secret, digest_size=32).digest()
                if peer is None or not secrets.compare_digest(proof, answer[16:]):
                    return
                peer.reading[stream] = None
            stream.settimeout(None)
            try:
                stream.sendall(b"\x02")
                while self._take_batch(stream, reader, peer):
                    stream.sendall(b"\x01")
                stream.sendall(b"\x00")
            finally:
                with self._changed:
                    del peer.reading[stream]

    def _take_batch(self, stream: socket.socket, reader: io.BufferedIOBase, peer: _Peer) -> bool:
        """Read one batch into memory; return whether it was permitted."""
        room, num_copies = struct.unpack("<qq", _read(reader, 16))
        is_few = 0 < num_copies <= 8192
        copies = list(struct.iter_unpack("<qq", _read(reader, 16 * num_copies))) if is_few else []
        with self._changed:
            if not copies or not self._may_write(peer, room, copies):
                self.num_violations += 1
                return False
            peer.reading[stream] = room
        try:
            for offset, size in copies:
                view = memoryview(self._pool.memory)[offset : offset + size]
                if reader.readinto(view) < size:
                    raise EOFError
        finally:
            with self._changed:
                peer.reading[stream] = None
                self._changed.notify_all()
        return True

    def _may_write(self, peer: _Peer, room: int, copies: Sequence[tuple[int, int]]) -> bool:
        pool_bytes, page_bytes = len(self._pool.memory), self._pool.page_bytes
        if sum(max(1, size) for _, size in copies) > pool_bytes:
            return False
        if any(at < 0 or size < 1 or at + size > pool_bytes for at, size in copies):
            return False
        touched = (range(at // page_bytes, -(-(at + size) // page_bytes)) for at, size in copies)
        return all(peer.rooms.get(page) == room for pages in touched for page in pages)


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)


def _read(reader: io.BufferedIOBase, size: int) -> bytes:
    if len(data := reader.read(size)) < size:
        raise EOFError
    return data


@dataclass(frozen=True)
class RoomOutcome:
    """How a room ended: `landed`, `corrupted`, `released` or `withdrawn`. `message` is prefill's last message."""

    room: int
    kind: str
    message: dict[str, Any]


@dataclass
class _Room:
    pages: list[int]
    have_tokens: int
    deadline_s: float
    is_withdrawn: bool = False


class DecodeHalf:
    """A link to one bootstrap port, and the pages granted over it. Not thread-safe.

    Args:
        secret: The cluster's secret; empty if it has none.
        layout: Layout of our pages, as in the protocol; None adopts prefill's fingerprint and layout.
        host: Address at which prefill reaches our transport.

    Raises:
        LinkLost: No answer, or prefill refuses the link.
    """

    def __init__(
        self,
        address: str,
        num_pages: int,
        *,
        secret: str = "",
        fingerprint: str = "",
        layout: dict[str, Any] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.epoch, self._rooms = secrets.randbits(63), dict[int, _Room]()
        self._theirs, self._heard_s, self._beat_s = 0, 0.0, 0.0
        self.free = list(range(num_pages))  # the caller adds the pages of landed rooms
        try:
            self._link(address, secret, host, fingerprint, layout or _ANY)
        except LinkLost as lost:
            if layout or not lost.answer.get("layout"):
                raise
            self._link(address, secret, host, lost.answer["fingerprint"], lost.answer["layout"])

    def grant(self, room: int, num_tokens: int, have_tokens: int = 0) -> list[int]:
        """Grant pages for the prompt's tokens from `have_tokens` on; return the pages in order."""
        num_pages = -(-(num_tokens - have_tokens) // self.pool.page_size)
        if num_pages > len(self.free):
            raise MemoryError(f"{num_pages} pages are needed, {len(self.free)} are free")
        pages, self.free = self.free[:num_pages], self.free[num_pages:]
        self.receiver.permit(self._peer, room, pages)
        self._rooms[room] = _Room(pages, have_tokens, time.monotonic() + LANDED_S)
        self._send("Grant", room=room, page_ids=pages, have_tokens=have_tokens)
        return pages

    def withdraw(self, room: int) -> None:
        """Withdraw a room's grant. Its pages become free only with its outcome."""
        if (known := self._rooms.get(room)) and not known.is_withdrawn:
            known.is_withdrawn, known.deadline_s = True, time.monotonic() + RELEASED_S
            self._send("Withdraw", room=room)

    def poll(self, timeout_s: float) -> list[RoomOutcome]:
        """Wait up to `timeout_s` for rooms to end; return their outcomes.

        Raises:
            LinkLost: All grants have ended, and their pages are free.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            while not (ended := self._receive_outcomes()):
                self._keep_alive()
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    return []
                self._socket.poll(int(1000 * min(left_s, BEAT_S / 5)))
        except LinkLost:
            self.close()
            raise
        return ended

    def close(self) -> None:
        """Close the link and fence prefill. All granted pages are then free."""
        self._socket.close(linger=0)
        self.receiver.close()
        self.free += [page for room in self._rooms.values() for page in room.pages]
        self._rooms.clear()

    def _receive_outcomes(self) -> list[RoomOutcome]:
        ended = []
        while (message := _receive(self._socket)) is not None:
            self._heard_s = time.monotonic()
            if message["type"] in ("Refused", "Welcome", "Redirect"):
                raise LinkLost(
                    message.get("error", {}).get("message", "prefill violated the protocol")
                )
            is_last = (
                message["type"] in ("Landed", "Released") and message.get("epoch") == self._theirs
            )
            if is_last and (room := self._rooms.pop(message.get("room", -1), None)) is not None:
                ended.append(self._end(message, room))
        return ended

    def _end(self, message: dict[str, Any], room: _Room) -> RoomOutcome:
        self.receiver.revoke(self._peer, message["room"])
        kind = "released"
        if message["type"] == "Landed":
            kind = "landed" if self._is_whole(message, room) else "corrupted"
        if room.is_withdrawn:
            kind = "withdrawn"
        if kind != "landed":
            self.free += room.pages
        return RoomOutcome(message["room"], kind, message)

    def _is_whole(self, message: dict[str, Any], room: _Room) -> bool:
        sums, sum_of = message.get("checksums", []), self.pool.checksum
        size, end = self.pool.page_size, room.have_tokens + self.pool.page_size * len(room.pages)
        left = [(message.get("end_token") or end) - at for at in range(room.have_tokens, end, size)]
        if not sums or min(left, default=1) < 1:
            return not sums
        pages = zip(room.pages, left, strict=True)
        return list(sums) == [sum_of(page, min(size, n)) for page, n in pages]

    def _keep_alive(self) -> None:
        now_s = time.monotonic()
        if now_s - self._heard_s > BUSY_S:
            raise LinkLost("prefill sent no message within the timeout")
        for number, room in self._rooms.items():
            if now_s >= room.deadline_s:
                if room.is_withdrawn:
                    raise LinkLost("prefill did not answer Withdraw")
                self.withdraw(number)
        if now_s >= self._beat_s:
            self._beat_s = now_s + BEAT_S
            self._send("LinkPing")

    def _link(
        self, address: str, secret: str, host: str, fingerprint: str, layout: dict[str, Any]
    ) -> None:
        self.pool = PagePool(layout, len(self.free))
        self.receiver = Receiver(self.pool, host)
        self._peer, offer = self.receiver.admit()
        self._socket = _dealer(address, secret)
        try:
            self._hello(fingerprint, offer)
        except BaseException:
            self.close()
            raise

    def _hello(self, fingerprint: str, offer: dict[str, Any]) -> None:
        deadline_s = time.monotonic() + CONNECT_S
        if not self._socket.poll(int(1000 * CONNECT_S), zmq.POLLOUT):
            raise LinkLost("no answer from the bootstrap port, or its key differs from ours")
        self._send("Hello", fingerprint=fingerprint, layout=self.pool.layout, offers=[offer])
        message: dict[str, Any] = {"type": "LinkPing"}
        while message["type"] == "LinkPing":
            if time.monotonic() >= deadline_s:
                raise LinkLost("prefill did not answer Hello")
            self._socket.poll(int(1000 * BEAT_S))
            self._send("LinkPing")
            message = _receive(self._socket) or message
        if message["type"] != "Welcome":
            raise LinkLost(
                message.get("error", {}).get("message", f"unexpected {message['type']}"), message
            )
        heads = message.get("num_heads")
        if message.get("more_addresses") or heads not in (None, self.pool.layout["num_kv_heads"]):
            raise LinkLost("this half supports only prefill nodes with one rank")
        if message.get("protocol", 1) != 1 or message["transport"] != "tcp":
            raise LinkLost("prefill chose a protocol version or transport that was not offered")
        self._theirs, self._heard_s, self._beat_s = message["epoch"], time.monotonic(), 0

    def _send(self, kind: str, **fields: Any) -> None:
        try:
            self._socket.send(
                msgpack.packb({"type": kind, "epoch": self.epoch, **fields}), zmq.NOBLOCK
            )
        except zmq.ZMQError as error:
            raise LinkLost(f"no connection to prefill: {error}") from error


def _dealer(address: str, secret: str) -> "zmq.Socket[bytes]":
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    options = {zmq.LINGER: 0, zmq.IMMEDIATE: 1, zmq.IPV6: 1, zmq.MAXMSGSIZE: 16 << 20}
    options |= {zmq.HEARTBEAT_IVL: 500, zmq.HEARTBEAT_TIMEOUT: 1500, zmq.HEARTBEAT_TTL: 1500}
    for option, value in options.items():
        dealer.setsockopt(option, value)
    if secret:
        salt = b"tandem-cluster"
        stretched = hashlib.scrypt(secret.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=32)
        seed = hashlib.blake2b(stretched, digest_size=32, person=b"tandem-curve").digest()
        dealer.curve_serverkey = zmq.curve_public(z85.encode(seed))
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    dealer.connect(address)
    return dealer


def _receive(dealer: "zmq.Socket[bytes]") -> dict[str, Any] | None:
    """Return the next message, or None if there is none. Skip invalid frames."""
    while True:
        try:
            message = msgpack.unpackb(dealer.recv(zmq.NOBLOCK), strict_map_key=False)
        except zmq.Again:
            return None
        except (ValueError, msgpack.UnpackException):
            continue
        if isinstance(message, dict) and isinstance(message.get("type"), str):
            return message


def main() -> None:
    """Let a prefill node compute a prompt, and receive its KV."""
    url, prompt_ids = sys.argv[1], [int(each) for each in sys.argv[2:]]
    secret = os.environ.get("TANDEM_CLUSTER_KEY", "")
    with urllib.request.urlopen(f"{url}/server_info", timeout=10) as answer:
        info = json.load(answer)
    host = socket.gethostbyname(urllib.parse.urlsplit(url).hostname or "")
    engine = _dealer(f"tcp://{host}:{info['engine_port']}", secret)
    with socket.create_connection((host, info["bootstrap_port"])) as probe:
        own, _ = probe.getsockname()
    half = DecodeHalf(f"tcp://{host}:{info['bootstrap_port']}", 256, secret=secret, host=own)
    room = secrets.randbits(63)
    pages = half.grant(room, len(prompt_ids))
    # Do what a router does: start the prefill half of the room.
    request = {"request_id": secrets.token_hex(12), "prompt_ids": prompt_ids, "sampling": {}}
    engine.poll(int(1000 * CONNECT_S), zmq.POLLOUT)
    engine.send(msgpack.packb({"type": "StartPrefill", "request": request, "room": room}))
    while not (ended := half.poll(BEAT_S)):
        engine.send(
            msgpack.packb({"type": "Ping"}), zmq.NOBLOCK
        )  # without it, prefill counts us as lost
    print(f"{ended[0].kind} in pages {pages}: {ended[0].message}")
    half.close()
    engine.close()


if __name__ == "__main__":
    main()
