"""Queries a server of the cluster over HTTP, and reports a failure in one sentence."""

from typing import Any

import aiohttp
import msgspec

from tandem.wire.errors import TandemError
from tandem.wire.hosts import reason_of

ANSWER_TIMEOUT_S = 5.0


class Unanswered(TandemError, code="unanswered"):
    """The server cannot be reached, rejects the question, or is of another kind.

    Attributes:
        answered: The HTTP status; 0 where there was no answer.
    """

    def __init__(self, message: str, answered: int = 0) -> None:
        super().__init__(plain(message))
        self.answered = answered


def plain(text: str) -> str:
    """Replace nonprintable characters, so that text of another machine cannot control the terminal."""
    return "".join(char if char.isprintable() else "·" for char in text)


def session_with(key: str) -> aiohttp.ClientSession:
    """Return a session that sends `key` as a bearer token, unless `key` is empty."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    )


async def ask(
    session: aiohttp.ClientSession, url: str, path: str, kind: str, body: dict[str, Any] | None
) -> bytes:
    """Return the body of a server's answer to a GET, or to a POST of `body`.

    Args:
        kind: The expected kind of server, such as `router`, for error messages.

    Raises:
        Unanswered: The server does not answer with status 200.
    """
    method = "GET" if body is None else "POST"
    try:
        async with session.request(method, url + path, json=body) as response:
            data = await response.read()
    except aiohttp.ClientConnectorError as error:
        raise Unanswered(
            f"{url} cannot be reached ({reason_of(error.os_error)}): is it the {kind}'s URL, and the {kind} up?"
        ) from error
    except TimeoutError as error:
        raise Unanswered(f"{url} does not answer within {ANSWER_TIMEOUT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise Unanswered(f"{url} does not answer as a {kind}: {error}") from error
    if response.status != 200:
        sentence = _sentence(data) or f"it answers with status {response.status}"
        raise Unanswered(f"{url} refuses: {sentence}", response.status)
    return data


def _sentence(body: bytes) -> str:
    """Return the server's error message, or an empty string."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        return ""
