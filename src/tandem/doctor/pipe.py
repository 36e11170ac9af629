"""Messages between two processes of one host over a pair of pipes: four bytes of length, then msgpack.

A pipe ends when the process at its other end does, however that died; no port and no secret.
"""

import struct
import threading
from typing import IO, Any, Generic

from tandem.wire.codec import Codec, In
from tandem.wire.errors import PeerLost
from tandem.wire.messages import Message

_LENGTH = struct.Struct("<I")

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
