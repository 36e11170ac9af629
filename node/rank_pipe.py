"""Messages between two processes of one node over a pair of pipes: four bytes of length, then msgpack.

A pipe ends when the process at its other end does, however that died; no port and no secret.
"""

import os
import struct
import threading
from typing import IO, Any, BinaryIO, Generic

from tandem.wire.codec import Codec, In
from tandem.wire.errors import PeerLost
from tandem.wire.messages import Message

_LENGTH = struct.Struct("<I")

# The page table of a forward is the largest: 256 requests of 1M tokens in pages of 16 are 64 MiB.
_LIMIT_BYTES = 1 << 30


class RankPipe(Generic[In]):
    """Both directions.

    Args:
        incoming: Union of the messages that may come in.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes], incoming: Any) -> None:
        self._reader, self._writer = reader, writer
        self._codec: Codec[In] = Codec(incoming, _LIMIT_BYTES)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send; blocks while the pipe is full, so the far side has to read. Any thread may call it.

        Raises:
            PeerLost: Nobody reads any more.
        """
        frame = self._codec.encode(message)
        try:
            with self._lock:
                self._writer.write(_LENGTH.pack(len(frame)) + frame)
                self._writer.flush()
        except (OSError, ValueError) as error:
            raise PeerLost(f"the process at the other end is gone: {error}") from error

    def receive(self) -> In | None:
        """Wait for the next message; None when the far side is gone."""
        header = self._reader.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        frame = self._reader.read(length)
        return self._codec.decode(frame) if len(frame) == length else None

    def hang_up(self) -> None:
        """Close the sending half: the far side's `receive` returns None. Safe to call twice."""
        try:
            self._writer.close()
        except OSError:
            return  # what was buffered for a process that is gone


def claim_stdout() -> BinaryIO:
    """Return standard output for ourselves alone; what libraries print there goes to stderr.

    gloo greets on it, in the middle of what the parent reads.
    """
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return own


def end_process_after(timeout_s: float) -> None:
    """End this process with status 1 then, whatever its threads wait for, unless it ended before."""
    timer = threading.Timer(timeout_s, os._exit, (1,))
    timer.daemon = True
    timer.start()
