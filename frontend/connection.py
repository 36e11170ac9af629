"""One connection of a client, around aiohttp's own handling of it.

Adds what aiohttp leaves out: a client that shut down its sending side gets what is answered at
once. From the outside it looks as one that went away, so it is given no more than that: nothing is
generated for a client that may be gone. nginx does the same: what it has itself it still sends, and
what it would wait for others for it gives up.
"""

import asyncio
from collections.abc import Callable
from typing import cast

from typing_extensions import override

# Many times what /health or a refusal takes, and a fraction of the second within which nodes stop.
HALF_CLOSED_S = 0.25

Factory = Callable[[], asyncio.Protocol]


def connections(http: Factory) -> Factory:
    """Return what makes the protocol of each connection, for `loop.create_server` and its kin.

    Args:
        http: aiohttp's: the `server` of a runner that was set up.
    """
    return lambda: Connection(http())


class Connection(asyncio.Protocol):
    """Hands on everything but the end of what the client sends.

    Args:
        http: aiohttp's handler of this connection.
    """

    def __init__(self, http: asyncio.Protocol) -> None:
        self._http = http
        self._transport: asyncio.Transport | None = None
        self._closing: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._http.connection_made(transport)

    @override
    def data_received(self, data: bytes) -> None:
        self._http.data_received(data)

    @override
    def eof_received(self) -> bool:
        transport = self._transport
        assert transport is not None
        if transport.get_extra_info("ssl_object") is not None:
            return False  # TLS has no half of a connection
        self._closing = asyncio.get_running_loop().call_later(HALF_CLOSED_S, transport.close)
        return True

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._transport = None
        self._http.connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        self._http.pause_writing()

    @override
    def resume_writing(self) -> None:
        self._http.resume_writing()
