"""A reserved loopback port on which nothing listens."""

import contextlib
import socket
from collections.abc import Iterator


def keep_port() -> tuple[socket.socket, int]:
    """Return a socket that reserves a port while open, and the port; the test's servers may listen on it."""
    sock = socket.socket()
    # asyncio's servers set this too: they can share the port with a bound socket that does not listen.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock, sock.getsockname()[1]


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """Reserve a port within the block."""
    sock, port = keep_port()
    with sock:
        yield port
