"""An HTTP server of a test, which may stop while clients connect."""

import asyncio
import socket
import ssl

from aiohttp import web


class HttpServer:
    """A server on loopback that stops without waiting for its requests.

    Attributes:
        port: Its port.
    """

    def __init__(self, runner: web.AppRunner, sock: socket.socket) -> None:
        self._runner, self._sock = runner, sock
        self.port: int = sock.getsockname()[1]

    @classmethod
    async def start(
        cls, app: web.Application, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> "HttpServer":
        """Serve at a port; 0 means any free one."""
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await runner.setup()
        sock = socket.create_server(("127.0.0.1", port))
        await web.SockSite(runner, sock, ssl_context=tls).start()
        return cls(runner, sock)

    async def stop(self) -> None:
        """Close all connections.

        Python 3.11 never closes a connection that it accepts while its server closes. So this first accepts no more,
        then lets the connections that were accepted reach the server.
        """
        asyncio.get_running_loop().remove_reader(self._sock)
        for _ in range(3):
            await asyncio.sleep(0)
        await self._runner.cleanup()
