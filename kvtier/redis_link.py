"""One connection to a Redis or Valkey server, for the time of one call: commands out, replies in, until a deadline.

The `redis` package connects, logs in, speaks TLS and pools. Replies are read here, straight into the memory
that pages are given out from: its parser copies every value several times (0.5 GB/s on a core where this
reads 3), and its time limit is for one read, which a server that trickles never reaches.
"""

import contextlib
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.retry import Retry

from tandem.kvtier.redis_url import RedisAddress
from tandem.kvtier.tier import TierFailed

# Of a reply that is no page: an error's sentence, an id, a number.
MAX_LINE_BYTES = 4096
# Larger reads bypass the buffer.
READ_AHEAD_BYTES = 1 << 14

Part = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Refused:
    """What a server says instead of doing it, such as `OOM command not allowed ...`."""

    sentence: str

    @property
    def code(self) -> str:
        """The first word."""
        return self.sentence.partition(" ")[0]


Reply = bytes | int | Refused | None


class Links:
    """Connections to one database, kept for the next call.

    Args:
        timeout_s: For connecting, and for the calls that have no longer one.
    """

    def __init__(
        self,
        address: RedisAddress,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._timeout_s, self._clock = address, timeout_s, clock
        self._pool = _pool(address, timeout_s)
        # The socket that a connection was last seen with.
        self._sockets: weakref.WeakKeyDictionary[Connection, socket.socket] = (
            weakref.WeakKeyDictionary()
        )

    @contextlib.contextmanager
    def link(self, timeout_s: float | None = None) -> Iterator["Link"]:
        """Give a connection for one call. It is closed when the call fails: replies may be on their way.

        Raises:
            TierFailed: The server is away, does not answer in time, refuses us or does not speak as Redis does.
        """
        deadline = self._clock() + (self._timeout_s if timeout_s is None else timeout_s)
        connection = None
        is_clean = False
        try:
            connection = self._pool.get_connection()
            # The package has no public name for it; it is there on a connection that the pool gave out.
            its_socket = cast(socket.socket, connection._sock)  # noqa: SLF001
            is_new = self._sockets.get(connection) is not its_socket
            self._sockets[connection] = its_socket
            with Link(its_socket, deadline, self._clock, is_new=is_new) as link:
                yield link
            is_clean = True
        # The sentence of the package's errors says where; ours of a server's, what: none has a password.
        except (redis.RedisError, OSError, EOFError) as error:
            said = str(error) or type(error).__name__
            raise TierFailed(f"{self._address.shown}: {said}") from error
        finally:
            if connection is not None:
                if not is_clean:
                    connection.disconnect()  # type: ignore[no-untyped-call]
                self._pool.release(connection)

    def close(self) -> None:
        """Close all connections, those of calls under way too."""
        self._pool.disconnect()


class Link:
    """Sends and reads; what is sent and not yet read must be read before the link is given back.

    All methods raise OSError, EOFError or redis.RedisError where the connection is of no use any more.

    Attributes:
        is_new: No call had this connection before; the server may have been started meanwhile.
    """

    def __init__(
        self,
        its_socket: socket.socket,
        deadline: float,
        clock: Callable[[], float],
        *,
        is_new: bool,
    ) -> None:
        self.is_new = is_new
        self._socket, self._deadline, self._clock = its_socket, deadline, clock
        self._file = cast(BufferedReader, self._socket.makefile("rb", buffering=READ_AHEAD_BYTES))

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def extend(self, timeout_s: float) -> None:
        """Set the deadline anew, from now on."""
        self._deadline = self._clock() + timeout_s

    def send(self, *parts: Part) -> None:
        """Send parts of commands."""
        for part in parts:
            self._wait_no_longer()
            self._socket.sendall(part)

    def reply(self) -> Reply:
        """Read one reply that is no page."""
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b":":
            return _number(rest)
        if kind == b"-":
            return Refused(rest.decode(errors="replace"))
        num_bytes = self._length(line)
        if num_bytes is None:
            return None
        if num_bytes > MAX_LINE_BYTES:
            raise redis.InvalidResponse(f"a value of {num_bytes} bytes where none is expected")
        value = bytearray(num_bytes + 2)
        self._fill(memoryview(value))
        return bytes(value[:-2])

    def value_into(self, memory: memoryview) -> int | Refused | None:
        """Read one reply that should be as long as `memory` is, less the two bytes that end it.

        Returns:
            The length of the value; where it is another than asked for, the value is dropped.
        """
        line = self._line()
        if line[:1] == b"-":
            return Refused(line[1:].decode(errors="replace"))
        num_bytes = self._length(line)
        if num_bytes is None:
            return None
        if num_bytes + 2 == memory.nbytes:
            self._fill(memory)
            return num_bytes
        left = num_bytes + 2
        while left:
            piece = memory[: min(left, memory.nbytes)]
            self._fill(piece)
            left -= piece.nbytes
        return num_bytes

    def _length(self, line: bytes) -> int | None:
        if line[:1] != b"$":
            raise redis.InvalidResponse(f"this is no reply of Redis: {line[:64]!r}")
        num_bytes = _number(line[1:])
        return None if num_bytes < 0 else num_bytes

    def _line(self) -> bytes:
        self._wait_no_longer()
        line = self._file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\r\n"):
            raise EOFError("the server closed the connection, or speaks another protocol")
        return line[:-2]

    def _fill(self, memory: memoryview) -> None:
        filled = 0
        while filled < memory.nbytes:
            self._wait_no_longer()
            num_bytes = self._file.readinto1(memory[filled:])
            if not num_bytes:
                raise EOFError("the server closed the connection in the middle of a value")
            filled += num_bytes

    def _wait_no_longer(self) -> None:
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            raise TimeoutError("no whole answer in time")
        self._socket.settimeout(left_s)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise redis.InvalidResponse(f"this is no reply of Redis: {text[:64]!r}") from error


def _pool(address: RedisAddress, timeout_s: float) -> ConnectionPool:
    where: dict[str, Any] = {"host": address.host, "port": address.port}
    kind: type[Connection | UnixDomainSocketConnection] = Connection
    if address.way == "unix":
        kind, where = UnixDomainSocketConnection, {"path": address.path}
    else:
        where["socket_connect_timeout"] = timeout_s
    if address.way == "tls":
        kind = SSLConnection
        where |= {
            "ssl_ca_certs": address.ca,
            "ssl_certfile": address.cert,
            "ssl_keyfile": address.key,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
        }
    return ConnectionPool(
        connection_class=kind,
        db=address.db,
        username=address.username,
        password=address.password,
        socket_timeout=timeout_s,
        protocol=2,  # what is read here, and all servers speak
        retry=Retry(NoBackoff(), 0),  # who calls us knows when to try again
        **where,
    )
