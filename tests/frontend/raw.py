"""A client that sends raw bytes, for requests that no well-behaved client sends."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)


class RawClient:
    """One connection that sends raw bytes and reads answers one at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Send bytes. Ignore a connection that the server has closed, whose answer can still be read."""
        self.writer.write(data)
        try:
            await self.writer.drain()
        except ConnectionError:
            return

    async def reply(self, method: str = "POST") -> Reply:
        """Read one complete answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        status = int(first.split()[1])
        if method == "HEAD" or status < 200 or status == 204:
            return Reply(status, headers, b"")
        if "content-length" in headers:
            return Reply(
                status, headers, await self.reader.readexactly(int(headers["content-length"]))
            )
        return Reply(status, headers, await self._chunks())

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def closed(self) -> bool:
        """Wait until the server closes the connection, and check that it sends nothing before."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def connected(
    client: aiohttp.ClientSession, first: bytes = b"", buffer_bytes: int = 0
) -> AsyncIterator[RawClient]:
    """Open a raw connection to the server of `client`.

    Args:
        first: What is there before the server, of this process, looks: to it this client never was idle.
        buffer_bytes: Of the receive buffer, which is read from as the test reads. 0: the kernel's choice.
    """
    sock = socket.socket()
    if buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    sock.connect((client._base_url.host, client._base_url.port))
    sock.sendall(first)
    reader, writer = await asyncio.open_connection(sock=sock, limit=buffer_bytes or 2**16)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def request(path: str, body: dict, *lines: str) -> bytes:
    data = json.dumps(body).encode()
    return head("POST", path, f"Content-Length: {len(data)}", *lines) + data


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
