"""HTTP/1.1 connections that are kept and used again, as many as are needed.

httptools (llhttp) parses; the body goes to an `Answer` within the call that read it from the socket. A
whole client library would cost several times as much processor for each token.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
from typing_extensions import override

from tandem.bench.answer import Answer, Broken

OK = 200
# Of an error's body: enough to see what it is about.
MAX_ERROR_BYTES = 2000


class StaleConnection(Exception):
    """A connection that was used before had been closed by the server when a request was sent on it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go.

    Attributes:
        head: Of every request, but for the length of its body and what follows.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None
    head: bytes

    @classmethod
    def of(cls, url: str, api_key: str) -> "Address":
        """Return the address of `url`, whose path is what is posted to."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        lines = [
            f"POST {parts.path or '/'} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Accept: text/event-stream",
            "Content-Type: application/json",
            *([f"Authorization: Bearer {api_key}"] if api_key else []),
            "Content-Length: ",
        ]
        return cls(
            host=parts.hostname or "",
            port=parts.port or (443 if is_tls else 80),
            tls=ssl.create_default_context() if is_tls else None,
            head="\r\n".join(lines).encode(),
        )


class Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self.answer: Answer | None = None
        self._is_used = False
        self.is_open = True

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Send a request and feed its answer until it has ended.

        Raises:
            Broken: It was refused, or broke off.
            StaleConnection: Nothing was sent; another connection may serve it.
        """
        assert self._transport is not None
        self.answer = answer
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._refusal = b""
        self._is_complete = self._has_head = self._has_length = self._has_data = False
        self._is_kept = False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._ended
        except BaseException:
            if not self._is_complete:  # after a whole refusal it can be used again
                self.close()
            raise
        finally:
            self.answer, self._ended, self._is_used = None, None, True

    def fail(self, error: Exception) -> None:
        """End the request under way with an error."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def close(self) -> None:
        """Close at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's is none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    @override
    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None:  # between two requests a server has nothing to say
            self.close()
            return
        self._has_data = True
        try:
            self._parser.feed_data(data)
            if self._body:
                body, self._body = b"".join(self._body), []
                if self._parser.get_status_code() == OK:
                    answer.feed(body, time.monotonic())
                else:
                    self._refusal += body[:MAX_ERROR_BYTES]
            if self._is_complete:
                self._end(answer)
        except Broken as error:
            self.fail(error)
        except httptools.HttpParserError as error:
            self.fail(Broken("bad HTTP", str(error)))

    def on_header(self, name: bytes, _value: bytes) -> None:
        """Be told by the parser."""
        self._has_length |= name.lower() in {b"content-length", b"transfer-encoding"}

    def on_headers_complete(self) -> None:
        """Be told by the parser."""
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        """Be told by the parser."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Be told by the parser."""
        self._is_complete = True
        self._is_kept = self._parser.should_keep_alive()  # forgotten once this returns

    def _end(self, answer: Answer) -> None:
        if not self._is_kept:
            self.close()
        status = self._parser.get_status_code()
        if status != OK:
            raise Broken(f"HTTP {status}", _sentence(self._refusal))
        answer.finish()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._ended is None or self._ended.done() or self.answer is None:
            return
        if self._is_used and not self._has_data:
            self.fail(StaleConnection())
        elif exc is None and self._has_head and not self._has_length:  # then a body ends so
            try:
                self._end(self.answer)
            except Broken as error:
                self.fail(error)
        else:
            self.fail(Broken("disconnected", str(exc or "the server closed the connection")))


class Connections:
    """Connections to one address: as many as requests are under way, the idle ones used first."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def post(self, body: bytes, answer: Answer) -> None:
        """Send a request and feed its answer until it has ended.

        Raises:
            Broken: There is no connection, or as `Connection.exchange`.
        """
        request = b"%s%d\r\n\r\n%s" % (self._address.head, len(body), body)
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, request, answer)
                except StaleConnection:
                    continue
        return await self._exchange(await self._connect(), request, answer)

    async def _exchange(self, connection: Connection, request: bytes, answer: Answer) -> None:
        self._busy.add(connection)
        try:
            await connection.exchange(request, answer)
        finally:
            self._busy.discard(connection)
            if connection.is_open:
                self._idle.append(connection)

    async def _connect(self) -> Connection:
        at = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                return (await loop.create_connection(Connection, at.host, at.port, ssl=at.tls))[1]
        except TimeoutError as error:
            raise Broken("timeout", f"no connection within {self._timeout_s:g} s") from error
        except OSError as error:
            kind = "refused" if isinstance(error, ConnectionRefusedError) else "no connection"
            raise Broken(kind, str(error)) from error

    def fail_silent(self, now_s: float) -> None:
        """End requests that have heard nothing for too long; to be called now and then."""
        for connection in list(self._busy):
            answer = connection.answer
            if answer is not None and now_s - answer.heard_s > self._timeout_s:
                connection.fail(Broken("timeout", f"nothing came for {self._timeout_s:g} s"))

    def close(self) -> None:
        """Close those that are idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _sentence(body: bytes) -> str:
    """Return what the body of an error says: its message, where it has one."""
    try:
        told = msgspec.json.decode(body)
        found = told.get("error", told)
        return str(found.get("message", found) if isinstance(found, dict) else found)[:300]
    except (msgspec.MsgspecError, AttributeError, UnicodeDecodeError):
        return body.decode(errors="replace")[:300]
