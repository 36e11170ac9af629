"""The HTTP connection to one engine: JSON requests and streams of server-sent events.

A stream is cancelled by closing its connection, which happens when its reader stops reading.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from tandem.wire.errors import (
    EngineFailed,
    InvalidRequest,
    NoNodeAvailable,
    Overloaded,
    PeerLost,
    TandemError,
)
from tandem.wire.hosts import reason_of

# Time to open a connection. The engines' own networks answer within milliseconds.
CONNECT_S = 5.0
MAX_QUOTED = 300
_HEADERS = {"Content-Type": "application/json"}
_DATA, _DONE = b"data: ", b"[DONE]"


class HttpEngine:
    """An engine at one URL. All methods raise `PeerLost` if its connection fails or it does not answer in time.

    Args:
        session: Session with keep-alive and without a limit of connections.
        poll_s: Time without a byte after which a polled engine is lost.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, poll_s: float) -> None:
        self.url, self._session, self._poll_s = url, session, poll_s
        self._num_heard = 0  # chunks that the engine has sent

    def on_port(self, port: int) -> "HttpEngine":
        """Return another server on the engine's host."""
        host = self.url.partition("://")[2].rpartition(":")[0]
        return HttpEngine(f"http://{host}:{port}", self._session, self._poll_s)

    async def ask(
        self, path: str, body: Mapping[str, object] | None = None, limit_s: float | None = None
    ) -> bytes:
        """Return the body of the answer to a GET, or with a body to a POST.

        Raises:
            TandemError: The engine answers with an error; the class follows its status.
        """
        async with self._request(path, body, limit_s) as response:
            answer = await response.read()
            self._num_heard += 1
            return answer

    async def poll(self, path: str) -> bytes:
        """Return the answer to a GET, however late, as long as the engine sends anything, such as tokens.

        Raises:
            PeerLost: It has sent nothing in two consecutive halves of `poll_s`. After the first one, a process that was
                itself delayed has read what had arrived.
        """
        asking = asyncio.create_task(self.ask(path))
        num_silent = 0
        try:
            while num_silent < 2:
                num_heard = self._num_heard
                if (await asyncio.wait([asking], timeout=self._poll_s / 2))[0]:
                    return asking.result()
                num_silent = num_silent + 1 if self._num_heard == num_heard else 0
        finally:
            asking.cancel()
        raise PeerLost(f"{self.url} has sent nothing for {self._poll_s:g} s")

    async def events(self, path: str, body: Mapping[str, object]) -> AsyncIterator[bytes]:
        """Yield the data of each event of a stream, without the end marker.

        Raises:
            PeerLost: The stream ends without the end marker.
            TandemError: The engine answers with an error; the class follows its status.
        """
        async with self._request(path, body, None) as response:
            rest = b""
            async for chunk in response.content.iter_any():
                self._num_heard += 1
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(_DATA):
                        data = line[len(_DATA) :].strip()
                        if data == _DONE:
                            return
                        yield data
        raise PeerLost(f"{self.url} ended a stream early")

    @asynccontextmanager
    async def _request(
        self, path: str, body: Mapping[str, object] | None, limit_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=limit_s or CONNECT_S)
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=_HEADERS, timeout=timeout
            ) as response:
                if response.status >= 400:
                    text = (await response.text(errors="replace"))[:MAX_QUOTED]
                    raise error_of(self.url, response.status, text)
                yield response
        except TimeoutError as error:
            raise PeerLost(
                f"{self.url} does not answer within {limit_s or CONNECT_S:g} s"
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise PeerLost(
                f"{self.url} cannot be reached ({reason_of(error.os_error)}): wait until the engine has started, or "
                "correct its URL"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{self.url} was lost: {str(error) or type(error).__name__}") from error


def error_of(url: str, status: int, text: str) -> TandemError:
    """Return the error of an engine's answer with this status."""
    message = f"the engine at {url} answers {status}: {text}"
    match status:
        case 400 | 413 | 422:
            return InvalidRequest(message)
        case 401 | 403:
            return NoNodeAvailable(
                f"the engine at {url} requires an API key, which the router does not send: start it without one"
            )
        case 429 | 503:
            return Overloaded(message)
        case _:
            return EngineFailed(message)
