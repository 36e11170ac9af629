"""The limit of a socket: one TCP stream that carries bytes and says nothing of which they are.

Behind the seam of transports, so that it is measured as they are; but it fills the far end's memory from
its start whatever the plan says, checks no grant and is offered to nobody who wants pages moved.

```
 sender   ──▶ the offer's secret (32)
 sender   ──▶ size int64, then so many bytes     ┐ repeated; size 0 is a ping
 receiver ──▶ one byte: they are in memory       ┘
```
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Annotated

import msgspec

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import (
    Admission,
    PeerKey,
    Pool,
    TransportConfig,
    new_peer_key,
)
from tandem.kvtransfer.transports.tcp_frames import (
    receive_exactly,
    receive_into,
    send_from,
    shut_down,
)
from tandem.kvtransfer.transports.tcp_listener import address_toward
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tandem.wire.ids import Room

SIZE = struct.Struct("<q")
SECRET_BYTES = 32
CONNECT_TIMEOUT_S = 5.0
ARRIVED = b"\x01"


class _Offer(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class BareStreamTransport:
    """One stream, as fast as the kernel goes."""

    name = "socket"

    def __init__(self, config: TransportConfig) -> None:
        self._host = config.host.strip("[]")

    def listen(self, pool: Pool) -> "BareListener":
        """Begin to receive on a free port.

        Raises:
            ConfigInvalid: The host is not an address of this machine.
        """
        return BareListener(pool, self._host)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "BareStream":
        """Open the stream.

        Raises:
            TransferRefused: Nobody answers at the offer's address.
        """
        return BareStream(offer, region)


class BareListener:
    """Takes one stream at a time from whoever knows the secret."""

    def __init__(self, pool: Pool, host: str) -> None:
        self._pool, self._host = pool, host
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._stream: socket.socket | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._server = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise ConfigInvalid(f"cannot listen on {host}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._serve, name="bare-stream", daemon=True)
        self._thread.start()

    def admit(self, toward_host: str) -> Admission:
        """Return an offer; every stream that knows its secret is taken."""
        descriptor: dict[str, str | int | float] = {
            "host": address_toward(toward_host, self._host),
            "port": self._server.getsockname()[1],
            "secret": self._secret.hex(),
        }
        return Admission(new_peer_key(), TransportOffer(name="socket", descriptor=descriptor))

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Do nothing: there are no pages here."""

    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Do nothing."""

    def fence(self, peer: PeerKey) -> None:
        """Cut the stream."""
        del peer
        if self._stream is not None:
            shut_down(self._stream)

    def close(self) -> None:
        """Stop listening, and wait until nothing is read any more."""
        shut_down(self._server)
        if self._stream is not None:
            shut_down(self._stream)
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        while True:
            try:
                self._stream, _ = self._server.accept()
            except OSError:  # closed
                return
            with self._stream, contextlib.suppress(PeerLost):
                self._receive(self._stream)

    def _receive(self, stream: socket.socket) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.settimeout(CONNECT_TIMEOUT_S)
        if not hmac.compare_digest(receive_exactly(stream, SECRET_BYTES), self._secret):
            return
        stream.settimeout(None)
        buffer = self._pool.region.buffer
        while True:
            (size,) = SIZE.unpack(receive_exactly(stream, SIZE.size))
            if not 0 <= size <= self._pool.size_bytes:
                return
            receive_into(stream, [buffer[:size]] if size else [])
            send_from(stream, [memoryview(ARRIVED)])


class BareStream:
    """The sending end."""

    def __init__(self, offer: TransportOffer, region: MemoryRegion) -> None:
        self._view = region.buffer
        try:
            facts = msgspec.convert(offer.descriptor, _Offer)
            self._stream = socket.create_connection((facts.host, facts.port), CONNECT_TIMEOUT_S)
        except (msgspec.ValidationError, OSError) as error:
            raise TransferRefused(f"cannot open a stream: {error}") from error
        self._stream.settimeout(None)
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_from(self._stream, [memoryview(bytes.fromhex(facts.secret))])

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Send as many bytes as the plan has; return when they are in the far end's memory."""
        del room
        size = plan.total_bytes
        send_from(
            self._stream, [memoryview(SIZE.pack(size)), *([self._view[:size]] if size else [])]
        )
        receive_exactly(self._stream, len(ARRIVED))

    def close(self) -> None:
        """Hang up: a write under way fails."""
        shut_down(self._stream)
        self._stream.close()
