"""Serving an app: the listening socket, connections, the settings against bad clients, the end.

The caller chooses the loop (uvloop), handles signals and decides when to stop.
"""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from aiohttp import web
from aiohttp.http import HttpProcessingError
from typing_extensions import override

from tandem.frontend.edge import EDGE
from tandem.frontend.options import server_context
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import listener_on

# Connections the kernel holds while the loop is busy: as many as Linux allows by default. A client that
# finds no place retries only after a second.
BACKLOG = 4096
# What the kernel may hold for a client that does not read. Linux's own limit of 4 MiB for each stalled
# stream would add up, and tokens are few bytes.
SEND_BUFFER_BYTES = 256 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 100
HANDSHAKE_TIMEOUT_S = 10.0

log = get_logger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket, IPv4 or IPv6 as `host` is. Port 0 takes a free one.

    Several processes may serve one socket: make it first, then fork or pass it.

    Raises:
        ConfigInvalid: The port is in use, or the address is not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        sock = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigInvalid(
            _listen_sentence(host, port, error), topic="troubleshooting#cannot-listen"
        ) from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setblocking(False)
    return sock


def _listen_sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        by = f" by {holder}" if (holder := listener_on(port)) else ""
        return f"port {port} on {host} is in use{by}: choose another --port, or stop that process"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def cut_off_who_does_not_read(sock: socket.socket, timeout_s: float) -> None:
    """Have the kernel close connections whose client takes nothing for `timeout_s`.

    This includes what a closing socket still has to send: the process itself cannot see that.

    Args:
        sock: A connection, or a listening socket, whose connections inherit it.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


class _HttpLogger(logging.Logger):
    """Turns what aiohttp logs into our events, outside logging's own tree."""

    @override
    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            # No HTTP, or too much of it. The client's fault must not fill the log.
            log.debug("request.malformed", error=error.message)
        else:
            log.error("http.failed", message=record.getMessage(), exc_info=error)


Accepting = Callable[
    [web.Server, socket.socket, ssl.SSLContext | None], AbstractAsyncContextManager[None]
]
"""Accepts connections of a listening socket for a server inside the block."""


@asynccontextmanager
async def accepting_all(
    server: web.Server, sock: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Accept every connection, as the only process of a socket does."""
    listener = await asyncio.get_running_loop().create_server(
        server,
        sock=sock,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if tls else None,
    )
    try:
        yield
    finally:
        listener.close()


@asynccontextmanager
async def serving(
    app: web.Application,
    sock: socket.socket,
    drain_timeout_s: float = 5.0,
    accepting: Accepting = accepting_all,
) -> AsyncIterator[None]:
    """Serve `app` on a listening socket inside the block. On leaving, drain and close it.

    Raises:
        ConfigInvalid: The files of TLS cannot be used.
    """
    options = app[EDGE].options
    tls = None if options.http.tls is None else server_context(options.http.tls)
    cut_off_who_does_not_read(sock, options.stall_timeout_s)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,  # counted in /metrics; a line a request costs more than the request's routing
        logger=_HttpLogger("aiohttp.server"),
        keepalive_timeout=options.idle_timeout_s,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        auto_decompress=False,  # `read_body` refuses compressed bodies
        shutdown_timeout=drain_timeout_s,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        async with accepting(runner.server, sock, tls):
            yield
    finally:
        await runner.cleanup()
