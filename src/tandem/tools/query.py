"""Queries to a server of the cluster over HTTP, with one-sentence errors."""

from typing import Any

import aiohttp
import msgspec

from tandem.wire.errors import TandemError
from tandem.wire.hosts import reason_of

ANSWER_TIMEOUT_S = 5.0
MAX_SHOWN = 300


class QueryFailed(TandemError, code="query_failed"):
    """The server cannot be reached, rejects the query, or is of a different kind.

    Attributes:
        http_status: HTTP status; 0 without a response.
    """

    def __init__(self, message: str, http_status: int = 0) -> None:
        super().__init__(plain(message))
        self.http_status = http_status


class KeyRefused(QueryFailed, code="key_refused"):
    """The server requires a different API key, so a retry cannot succeed."""

    def __init__(self, url: str, reason: str = "") -> None:
        said = f": {reason}" if reason else ""
        super().__init__(f"{url} refuses the API key{said}; pass a valid key with --api-key", 401)


def plain(text: str) -> str:
    """Replace nonprintable characters, so that text from other machines cannot control the terminal."""
    return "".join(char if char.isprintable() else "·" for char in text)


def session_with(key: str) -> aiohttp.ClientSession:
    """Return a session that sends `key` as a bearer token, unless `key` is empty."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    )


async def query(
    session: aiohttp.ClientSession, url: str, path: str, kind: str, body: dict[str, Any] | None
) -> bytes:
    """Send a GET, or a POST of `body`, and return the body of the response.

    Args:
        kind: Expected kind of server, such as `router`, for error messages.

    Raises:
        QueryFailed: The server does not answer with status 200.
        KeyRefused: The server answers with status 401.
    """
    method = "GET" if body is None else "POST"
    try:
        async with session.request(method, url + path, json=body) as response:
            data = await response.read()
    except aiohttp.ClientConnectorCertificateError as error:
        raise QueryFailed(
            f"the certificate of {url} is not trusted ({error.certificate_error}): set the environment variable "
            "SSL_CERT_FILE to a file with its authority"
        ) from error
    except aiohttp.ClientConnectorError as error:
        raise QueryFailed(
            f"{url} cannot be reached ({reason_of(error.os_error)}): check the URL and whether the {kind} is up"
        ) from error
    except TimeoutError as error:
        raise QueryFailed(f"{url} does not answer within {ANSWER_TIMEOUT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise QueryFailed(f"{url} does not answer as a {kind}: {error}") from error
    if response.status == 401:
        raise KeyRefused(url, error_message(data))
    if response.status != 200:
        reason = error_message(data) or f"status {response.status}"
        raise QueryFailed(f"{url} rejects the request: {reason}", response.status)
    return data


def error_message(body: bytes) -> str:
    """Return the message of a server's error, or the body's text; at most `MAX_SHOWN` characters."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])[:MAX_SHOWN]
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        return body[:MAX_SHOWN].decode(errors="replace")
