#!/usr/bin/env python
"""A decode half that is not Tandem's: it takes over the KV of a prompt from a prefill node.

It follows docs/protocol.md alone. It speaks version 1 and transport `tcp` to a prefill node of one
rank. There is no model behind it: it shows the first token and holds the pages.

    pip install msgpack pyzmq
    python examples/decode_half.py http://127.0.0.1:7000 1 2 3 4 5 6 7 8

The numbers are token ids. TANDEM_CLUSTER_KEY is the cluster's secret, if it has one.
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
import zmq
from zmq.utils import z85

BEAT_S, CONNECT_S, LANDED_S, RELEASED_S, HANDSHAKE_S = 0.5, 5.0, 120.0, 10.0, 5.0
_ANY = dict.fromkeys(("page_size", "num_layers", "num_kv_heads", "head_dim", "itemsize"), 1)


class LinkLost(Exception):
    """There is no link, or not any more. `answer` is prefill's message, if it gave one."""

    def __init__(self, why: str, answer: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.answer = answer or {}


# ── XXH3-64 with seed 0; see xxhash.com ──────────────────────────────────────────────────────────

_KEY = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_M64, _M32, _PRIME_32, _PRIME_64 = (1 << 64) - 1, (1 << 32) - 1, 0x9E3779B1, 0x9E3779B185EBCA87
_LANES = struct.Struct("<8Q")
_START = (
    *(0xC2B2AE3D, _PRIME_64, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, _PRIME_32),
)


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _fold(a: int, b: int) -> int:
    return a * b & _M64 ^ a * b >> 64


def xxh3_64(data: bytes) -> int:
    """Return the sum of 8 bytes, or of more than 240. No slab of a real model has fewer."""
    size, h = len(data), len(data) * _PRIME_64
    if size == 8:
        h = (_word(data, 0) << 32 & _M64 | _word(data, 0) >> 32) ^ _word(_KEY, 8) ^ _word(_KEY, 16)
        h ^= (h << 49 | h >> 15) & _M64 ^ (h << 24 | h >> 40) & _M64
        h = h * 0x9FB21C651E98DF25 & _M64
        h = (h ^ (h >> 35) + size) * 0x9FB21C651E98DF25 & _M64
        return h ^ h >> 28
    if size <= 240:
        raise ValueError(f"{size} bytes are fewer than this half can sum up")
    words = [lane ^ _word(_KEY, 11 + 8 * i) for i, lane in enumerate(_lanes(data))]
    h = (h + sum(_fold(words[i], words[i + 1]) for i in range(0, 8, 2))) & _M64
    h = (h ^ h >> 37) * 0x165667919E3779F9 & _M64
    return h ^ h >> 32


def _lanes(data: bytes) -> list[int]:
    lanes = list(_START)
    num_stripes = (len(data) - 1) // 64
    stripes = [(64 * number, number % 16 * 8) for number in range(num_stripes)]
    for number, (at, key_at) in enumerate([*stripes, (len(data) - 64, 121)], 1):
        keys = _LANES.unpack_from(_KEY, key_at)
        for i, (word, key) in enumerate(zip(_LANES.unpack_from(data, at), keys, strict=True)):
            lanes[i ^ 1] = lanes[i ^ 1] + word & _M64
            lanes[i] = lanes[i] + ((word ^ key) & _M32) * ((word ^ key) >> 32) & _M64
        if number % 16 == 0 and number <= num_stripes:
            keys = _LANES.unpack_from(_KEY, 128)
            lanes = [
                (n ^ n >> 47 ^ key) * _PRIME_32 & _M64 for n, key in zip(lanes, keys, strict=True)
            ]
    return lanes


class Pool:
    """Memory of `num_pages` pages, laid out as prefill's are."""

    def __init__(self, layout: dict[str, Any], num_pages: int) -> None:
        self.layout = {"dtype": "", **layout, "num_pages": num_pages, "strips": []}
        self.page_size: int = layout["page_size"]
        heads, dim = layout["num_kv_heads"], layout["head_dim"]
        alike = {"num_kv_heads": heads, "key_dim": dim, "value_dim": dim}
        layers = layout.get("layers") or [alike] * layout["num_layers"]
        # Where each slab begins in a page, its heads, and its bytes of one token in one head.
        self._slabs: list[tuple[int, int, int]] = []
        self.page_bytes = 0
        for layer, name in itertools.product(layers, ("key_dim", "value_dim")):
            token_bytes = layer[name] * layout["itemsize"]
            if size := layer["num_kv_heads"] * self.page_size * token_bytes:
                self._slabs.append((self.page_bytes, layer["num_kv_heads"], token_bytes))
                self.page_bytes += size
        self.memory = bytearray(self.page_bytes * num_pages)

    def checksum(self, room: int, page: int, num_tokens: int, one_in: int) -> int:
        """Return the sum of the first tokens of a page."""
        draw = xxh3_64(room.to_bytes(8, "little"))
        hashed = self._slabs[draw % min(one_in, len(self._slabs)) :: one_in]
        written = bytearray()
        for begin, heads, token_bytes in hashed:
            for head in range(heads):
                at = page * self.page_bytes + begin + head * self.page_size * token_bytes
                written += self.memory[at : at + num_tokens * token_bytes]
        return xxh3_64(bytes(written))


@dataclass(eq=False)
class _Peer:
    secret: bytes
    rooms: dict[int, int] = field(default_factory=dict)  # the room that may write a page
    reading: dict[socket.socket, int | None] = field(default_factory=dict)


class Receiver:
    """Takes bytes of admitted peers into open pages, one thread a stream."""

    def __init__(self, pool: Pool, host: str) -> None:
        self._pool, self._host = pool, host
        self._peers: dict[str, _Peer] = {}
        self._changed = threading.Condition()
        self.num_violations = 0
        self._server = socket.create_server((host, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def admit(self) -> tuple[str, dict[str, Any]]:
        """Return the name of a new peer, and an offer for it."""
        name, secret = secrets.token_hex(8), secrets.token_bytes(32)
        with self._changed:
            self._peers[name] = _Peer(secret)
        port = self._server.getsockname()[1]
        descriptor = {"host": self._host, "port": port, "peer": name, "secret": secret.hex()}
        return name, {"name": "tcp", "descriptor": descriptor}

    def permit(self, peer: str, room: int, pages: Sequence[int]) -> None:
        """Open pages for a room."""
        with self._changed:
            self._peers[peer].rooms.update(dict.fromkeys(pages, room))

    def revoke(self, peer: str, room: int) -> None:
        """Close the pages of a room. After it nobody reads into them."""
        with self._changed:
            known = self._peers[peer]
            known.rooms = {page: each for page, each in known.rooms.items() if each != room}
            self._stop(known, lambda reads: reads == room)

    def fence(self, peer: str) -> None:
        """Cut a peer off. After it no write of it can arrive any more."""
        with self._changed:
            if known := self._peers.pop(peer, None):
                known.rooms.clear()
                for stream in known.reading:
                    _shut(stream)
                self._stop(known, lambda reads: reads is not None)

    def _stop(self, peer: _Peer, is_meant: Callable[[int | None], bool]) -> None:
        for stream in [each for each, reads in peer.reading.items() if is_meant(reads)]:
            _shut(stream)
        self._changed.wait_for(lambda: not any(map(is_meant, peer.reading.values())))

    def close(self) -> None:
        """Fence everybody and stop listening."""
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
        """Read one batch into memory; False: it is not allowed."""
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
class Outcome:
    """How a room ended: `landed`, `corrupted`, `released` or `withdrawn`. `word` is prefill's message."""

    room: int
    kind: str
    word: dict[str, Any]


@dataclass
class _Room:
    pages: list[int]
    have_tokens: int
    deadline_s: float
    is_withdrawn: bool = False


class DecodeHalf:
    """A link to one bootstrap port, and the pages that are granted over it. For one thread.

    Args:
        secret: The cluster's; empty for none.
        layout: Of our pages, as in the protocol; None takes on fingerprint and layout of prefill.
        host: Where prefill reaches our transport.

    Raises:
        LinkLost: Nobody answers, or prefill refuses.
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
        self.free = list(range(num_pages))  # the caller's, with those of rooms that landed
        try:
            self._link(address, secret, host, fingerprint, layout or _ANY)
        except LinkLost as lost:
            if layout or not lost.answer.get("layout"):
                raise
            self._link(address, secret, host, lost.answer["fingerprint"], lost.answer["layout"])

    def grant(self, room: int, num_tokens: int, have_tokens: int = 0) -> list[int]:
        """Grant pages for the prompt's tokens from `have_tokens` on; return them, in order."""
        num_pages = -(-(num_tokens - have_tokens) // self.pool.page_size)
        if num_pages > len(self.free):
            raise MemoryError(f"{num_pages} pages are needed, {len(self.free)} are free")
        pages, self.free = self.free[:num_pages], self.free[num_pages:]
        self.receiver.permit(self._peer, room, pages)
        self._rooms[room] = _Room(pages, have_tokens, time.monotonic() + LANDED_S)
        self._send("Grant", room=room, page_ids=pages, have_tokens=have_tokens)
        return pages

    def withdraw(self, room: int) -> None:
        """Ask for a room's pages back. They are free when its outcome comes, and not before."""
        if (known := self._rooms.get(room)) and not known.is_withdrawn:
            known.is_withdrawn, known.deadline_s = True, time.monotonic() + RELEASED_S
            self._send("Withdraw", room=room)

    def poll(self, timeout_s: float) -> list[Outcome]:
        """Return what ended, at once when something did. `LinkLost`: all grants ended, their pages are free."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while not (ended := self._hear()):
                self._keep_alive()
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    return []
                self._socket.poll(int(1000 * min(left_s, BEAT_S / 5)))
        except LinkLost:
            self.close()
            raise
        return ended

    def close(self) -> None:
        """Hang up, and cut off what was granted: it is free then."""
        self._socket.close(linger=0)
        self.receiver.close()
        self.free += [page for room in self._rooms.values() for page in room.pages]
        self._rooms.clear()

    def _hear(self) -> list[Outcome]:
        ended = []
        while (word := _receive(self._socket)) is not None:
            self._heard_s = time.monotonic()
            if word["type"] in ("Refused", "Welcome", "Redirect"):
                raise LinkLost(word.get("error", {}).get("message", "prefill broke the protocol"))
            is_last = word["type"] in ("Landed", "Released") and word.get("epoch") == self._theirs
            if is_last and (room := self._rooms.pop(word.get("room", -1), None)) is not None:
                ended.append(self._end(word, room))
        return ended

    def _end(self, word: dict[str, Any], room: _Room) -> Outcome:
        self.receiver.revoke(self._peer, word["room"])
        kind = "released"
        if word["type"] == "Landed":
            kind = "landed" if self._is_whole(word, room) else "corrupted"
        if room.is_withdrawn:
            kind = "withdrawn"
        if kind != "landed":
            self.free += room.pages
        return Outcome(word["room"], kind, word)

    def _is_whole(self, word: dict[str, Any], room: _Room) -> bool:
        sums, one_in = word.get("checksums", []), word.get("checksum_one_in", 1)
        size, end = self.pool.page_size, room.have_tokens + self.pool.page_size * len(room.pages)
        left = [(word.get("end_token") or end) - at for at in range(room.have_tokens, end, size)]
        if not sums or one_in < 1 or min(left, default=1) < 1:
            return not sums
        pages = zip(room.pages, left, strict=True)
        sum_of = self.pool.checksum
        return list(sums) == [sum_of(word["room"], page, min(size, n), one_in) for page, n in pages]

    def _keep_alive(self) -> None:
        now_s = time.monotonic()
        if now_s - self._heard_s > 3.5 * BEAT_S:
            raise LinkLost("prefill fell silent")
        for number, room in self._rooms.items():
            if now_s >= room.deadline_s:
                if room.is_withdrawn:
                    raise LinkLost("prefill does not answer a Withdraw")
                self.withdraw(number)
        if now_s >= self._beat_s:
            self._beat_s = now_s + BEAT_S
            self._send("LinkPing")

    def _link(
        self, address: str, secret: str, host: str, fingerprint: str, layout: dict[str, Any]
    ) -> None:
        self.pool = Pool(layout, len(self.free))
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
            raise LinkLost("nobody answers there, or not with our key")
        self._send("Hello", fingerprint=fingerprint, layout=self.pool.layout, offers=[offer])
        word: dict[str, Any] = {"type": "LinkPing"}
        while word["type"] == "LinkPing":
            if time.monotonic() >= deadline_s:
                raise LinkLost("prefill did not answer Hello")
            self._socket.poll(int(1000 * BEAT_S))
            self._send("LinkPing")
            word = _receive(self._socket) or word
        if word["type"] != "Welcome":
            raise LinkLost(word.get("error", {}).get("message", f"no {word['type']} here"), word)
        heads = word.get("num_heads")
        if word.get("more_ports") or heads not in (None, self.pool.layout["num_kv_heads"]):
            raise LinkLost("this half takes a prefill node of one rank only")
        if word.get("protocol", 1) != 1 or word["transport"] != "tcp":
            raise LinkLost("prefill answers with what was not offered")
        self._theirs, self._heard_s, self._beat_s = word["epoch"], time.monotonic(), 0

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
    """Return the next message, or None. Frames that are none are passed over."""
    while True:
        try:
            word = msgpack.unpackb(dealer.recv(zmq.NOBLOCK), strict_map_key=False)
        except zmq.Again:
            return None
        except (ValueError, msgpack.UnpackException):
            continue
        if isinstance(word, dict) and isinstance(word.get("type"), str):
            return word


def main() -> None:
    """Have a prefill node compute a prompt, and take over its KV."""
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
    # What a router does: it asks prefill's engine for the other half of the room.
    request = {"request_id": secrets.token_hex(12), "prompt_ids": prompt_ids, "sampling": {}}
    engine.poll(int(1000 * CONNECT_S), zmq.POLLOUT)
    engine.send(msgpack.packb({"type": "StartPrefill", "request": request, "room": room}))
    while not (ended := half.poll(BEAT_S)):
        engine.send(msgpack.packb({"type": "Ping"}), zmq.NOBLOCK)  # or it takes us for lost
    print(f"{ended[0].kind} in pages {pages}: {ended[0].word}")
    half.close()
    engine.close()


if __name__ == "__main__":
    main()
