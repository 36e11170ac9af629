"""Serve an app: the listening socket, connections, limits against bad clients, shutdown.

The caller chooses the event loop (uvloop), handles signals and decides when to stop.
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

from tandem.frontend.http.edge import EDGE
from tandem.frontend.options import ServerTls
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import listener_on
from tandem.wire.keys import is_loopback

# Connections that the kernel queues while the loop is busy: Linux's default limit. If the queue is full,
# a client retries only after a second.
BACKLOG = 4096
# What the kernel buffers for a client that does not read. Linux's limit of 4 MiB per stalled stream would
# add up, and tokens need few bytes.
SEND_BUFFER_BYTES = 256 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 100
HANDSHAKE_TIMEOUT_S = 10.0

log = get_logger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket, for IPv4 or IPv6 depending on `host`. Port 0 selects a free port.

    Several processes may serve one socket: create it first, then fork or pass it.

    Raises:
        ConfigInvalid: The port is in use, or the address does not belong to this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = addresses[0]
        sock = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigInvalid(
            _listen_sentence(host, port, error), topic="docs/troubleshooting.md#cannot-listen"
        ) from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setblocking(False)
    return sock


def _listen_sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        by = f" by {holder}" if (holder := listener_on(port)) else ""
        return f"port {port} on {host} is in use{by}: use a different --port, or stop that process"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def set_stall_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Make the kernel close connections whose client acknowledges nothing for `timeout_s`.

    This also covers data that a closed socket still has to send, which the process cannot observe.

    Args:
        sock: A connection, or a listening socket whose connections inherit the option.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))


class _HttpLogger(logging.Logger):
    """Converts aiohttp's log records to our events. Not part of the `logging` hierarchy."""

    @override
    def handle(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            # Not HTTP, or headers above the limits. Client errors must not fill the log.
            log.debug("request.malformed", error=error.message)
        else:
            log.error("http.failed", message=record.getMessage(), exc_info=error)


Accepting = Callable[
    [web.Server, socket.socket, ssl.SSLContext | None], AbstractAsyncContextManager[None]
]
"""Accepts a listening socket's connections for a server while the block runs."""


@asynccontextmanager
async def accepting_all(
    server: web.Server, sock: socket.socket, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Accept every connection. For a socket that only this process serves."""
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
    """Serve `app` on a listening socket while the block runs. On exit, drain and close it.

    Raises:
        ConfigInvalid: The TLS files cannot be loaded.
    """
    options = app[EDGE].options
    tls = None
    if options.http.tls is not None:
        server_tls = ServerTls(options.http.tls)
        app[EDGE].reloaded.append(server_tls.files)
        tls = server_tls.context
    set_stall_timeout(sock, options.stall_timeout_s)
    app[EDGE].is_loopback_only = is_loopback(sock.getsockname()[0])
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,  # /metrics counts requests; a log line costs more than routing a request
        logger=_HttpLogger("aiohttp.server"),
        keepalive_timeout=options.idle_timeout_s,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        max_headers=MAX_HEADERS,
        auto_decompress=False,  # `read_body` rejects compressed bodies
        shutdown_timeout=drain_timeout_s,
    )
    await runner.setup()
    assert runner.server is not None
    try:
        async with accepting(runner.server, sock, tls):
            yield
    finally:
        await runner.cleanup()
