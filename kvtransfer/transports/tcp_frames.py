"""What the two ends of a TCP stream say to each other, and how bytes get onto it and off it.

```
 listener ──▶ 16 random bytes
 sender   ──▶ peer key (16), blake2b of those bytes keyed with the peer's secret (32)
 listener ──▶ one byte: ACCEPTED, or the end
 sender   ──▶ room int64, number of copies int64, then for each copy int64 offset and int64 size,
              then the bytes themselves, copy after copy                         ┐ repeated
 listener ──▶ one byte: LANDED, or REFUSED and the end                            ┘
```

Integers are little-endian. The secret itself never travels here: it came with the offer.
"""

import contextlib
import hashlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tandem.kvtransfer.plan import CopyPlan
from tandem.wire.errors import PeerLost

HEADER = struct.Struct("<qq")
CHALLENGE_BYTES = 16
KEY_BYTES = 16
PROOF_BYTES = 32
COPY_BYTES = 16
ACCEPTED, LANDED, REFUSED = b"\x02", b"\x01", b"\x00"

# A batch is checked and acknowledged as a whole: long enough to hide the round trip.
BATCH_BYTES = 32 << 20
# A table of 128 KiB. No honest sender passes it, so a listener reads no larger one.
MAX_COPIES = 8192
# Of one system call, measured best on loopback with blocks of 16 and of 64 KiB. The kernel's limit is
# 1,024 views.
CALL_BYTES = 4 << 20
MAX_IOVECS = 512
HANDSHAKE_TIMEOUT_S = 5.0


def proof(secret: bytes, challenge: bytes) -> bytes:
    """Return what shows that the caller knows `secret`."""
    return hashlib.blake2b(challenge, key=secret, digest_size=PROOF_BYTES).digest()


def receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """Return the next `size_bytes` bytes.

    Raises:
        PeerLost: The stream ended, broke or timed out before.
    """
    data = bytearray(size_bytes)
    receive_into(sock, [memoryview(data)])
    return bytes(data)


def receive_into(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all views from the stream.

    Raises:
        PeerLost: The stream ended, broke or timed out before.
    """
    _move(lambda some: sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0], views)


def send_from(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Send all views.

    Raises:
        PeerLost: The stream broke.
    """
    _move(sock.sendmsg, views)


def shut_down(sock: socket.socket) -> None:
    """Wake whoever sends or receives on the socket; closing alone does not."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def table_of(room: int, batch: CopyPlan) -> bytes:
    """Return the header and table of one batch."""
    table = np.stack((batch.destination_offset, batch.size_bytes), axis=1)
    return HEADER.pack(room, len(batch)) + table.astype("<i8").tobytes()


def plan_of(table: bytes) -> CopyPlan:
    """Return the destinations in a received table; the source side is the stream."""
    columns = np.frombuffer(table, "<i8").reshape(-1, 2)
    return CopyPlan(np.zeros(len(columns), np.int64), columns[:, 0], columns[:, 1])


def _move(call: Callable[[list[memoryview]], int], views: Sequence[memoryview]) -> None:
    for some, num_bytes in _calls(views):
        left, num_left = some, num_bytes
        while num_left:
            try:
                moved = call(left)
            except OSError as error:
                raise PeerLost(f"the stream broke: {error}") from error
            if not moved:
                raise PeerLost("the stream ended")
            num_left -= moved
            if num_left:  # hardly ever, and views are many where they are small
                left = _without(left, moved)


def _calls(views: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """Yield the views of each system call, and their bytes."""
    some: list[memoryview] = []
    num_bytes = 0
    for view in views:
        some.append(view)
        num_bytes += len(view)
        if num_bytes >= CALL_BYTES or len(some) == MAX_IOVECS:
            yield some, num_bytes
            some, num_bytes = [], 0
    yield some, num_bytes


def _without(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of `views` after their first `num_bytes` bytes."""
    left = []
    for view in views:
        if num_bytes < len(view):
            left.append(view[num_bytes:])
        num_bytes = max(0, num_bytes - len(view))
    return left
