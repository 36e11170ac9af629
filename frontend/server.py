"""Serving an app: the listening socket, the settings that cancellation needs, the end.

The caller chooses the loop (uvloop) and when to stop; signals are its business.
"""

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from wire.errors import ConfigInvalid

# Connections the kernel holds while the loop is busy: as many as Linux allows by default, since a client
# whose connection finds no place tries again only after a second.
BACKLOG = 4096
# What the kernel may hold for a client that does not read. Tokens are few bytes: a larger buffer
# gains nothing, and Linux's own limit of 4 MiB for each stalled stream would add up.
SEND_BUFFER_BYTES = 256 * 1024
MAX_HEADER_BYTES = 16 * 1024


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
        raise ConfigInvalid(_listen_sentence(host, port, error)) from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setblocking(False)
    return sock


def _listen_sentence(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another --port, or stop what uses it"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def make_runner(app: web.Application, drain_timeout_s: float = 5.0) -> web.AppRunner:
    """Return a runner that cancels a request when its client goes away.

    Args:
        app: As `create_app` returns it.
        drain_timeout_s: How long `cleanup` lets running requests go on before it cancels them.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,  # counted in /metrics; a line a request costs more than the request's routing
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        shutdown_timeout=drain_timeout_s,
    )


@asynccontextmanager
async def serving(
    app: web.Application, sock: socket.socket, drain_timeout_s: float = 5.0
) -> AsyncIterator[None]:
    """Serve `app` on a listening socket inside the block; on leaving, drain and close it."""
    runner = make_runner(app, drain_timeout_s)
    await runner.setup()
    try:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
        yield
    finally:
        await runner.cleanup()
