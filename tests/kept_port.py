"""A port of loopback where nobody listens, and that no other process gets meanwhile."""

import contextlib
import socket
from collections.abc import Iterator


def keep_port() -> tuple[socket.socket, int]:
    """Return a socket that keeps a port while it is open, and the port; servers of the test may listen there."""
    sock = socket.socket()
    # asyncio's servers share a port with one that is bound like them and does not listen.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock, sock.getsockname()[1]


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """Keep a port inside the block."""
    sock, port = keep_port()
    with sock:
        yield port
