"""What the router asks of a node over HTTP: what it is, and the tokenizer of its model.

Every failure becomes a `NodeUnusable` whose sentence an operator can act on.
"""

import asyncio

import aiohttp
import msgspec

from tandem.frontend.tokenizer import Tokenizer, tokenizer_hash
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import reason_of
from tandem.wire.messages import NodeInfo

# A node answers from memory: what takes longer is a node in trouble.
INFO_TIMEOUT_S = 2.0
TOKENIZER_TIMEOUT_S = 30.0
INFO_LIMIT_BYTES = 1 << 20
# Twice the largest file that is taken: JSON escapes, and small files beside it.
TOKENIZER_LIMIT_BYTES = 128 << 20
# What msgspec raises for bytes of any kind; the last for brackets in brackets without end.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class NodeUnusable(Exception):
    """A node cannot be used now; the message says why, for people."""


class TokenizerFiles(msgspec.Struct, frozen=True):
    """Answer of `GET /tokenizer`: the text of each file by its name."""

    files: dict[str, str]


async def fetch_info(session: aiohttp.ClientSession, url: str) -> NodeInfo:
    """Ask a node what it is. Raises `NodeUnusable`."""
    body = await _get(session, f"{url}/server_info", INFO_TIMEOUT_S, INFO_LIMIT_BYTES)
    try:
        return msgspec.json.decode(body, type=NodeInfo)
    except UNREADABLE as error:
        raise NodeUnusable(f"/server_info is not that of a node: {error}") from error


async def fetch_tokenizer(
    session: aiohttp.ClientSession, url: str, expected_hash: str
) -> Tokenizer:
    """Fetch a node's tokenizer and load it. Raises `NodeUnusable`."""
    body = await _get(session, f"{url}/tokenizer", TOKENIZER_TIMEOUT_S, TOKENIZER_LIMIT_BYTES)
    try:
        files = msgspec.json.decode(body, type=TokenizerFiles).files
        if tokenizer_hash(files) != expected_hash:
            raise NodeUnusable("/tokenizer gives other files than the node announced")
        # Reading a large vocabulary takes a second: streams go on meanwhile.
        return await asyncio.to_thread(Tokenizer.from_files, files)
    except (*UNREADABLE, ConfigInvalid) as error:
        raise NodeUnusable(f"its tokenizer cannot be used: {error}") from error


async def _get(
    session: aiohttp.ClientSession, url: str, timeout_s: float, limit_bytes: int
) -> bytes:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(url, timeout=timeout) as response:
            if response.status == 401:
                raise NodeUnusable(
                    "it asks for a key: start it and this router with the same TANDEM_CLUSTER_KEY"
                )
            if response.status != 200:
                raise NodeUnusable(_refusal(response.status, await _read(response, limit_bytes)))
            return await _read(response, limit_bytes)
    except aiohttp.ClientConnectorCertificateError as error:
        raise NodeUnusable(
            f"its certificate is not trusted ({error.certificate_error}): give its authority with "
            "--node-ca-certs"
        ) from error
    except aiohttp.ClientSSLError as error:
        raise NodeUnusable(f"TLS fails: {error.strerror}") from error
    except aiohttp.ClientConnectorError as error:
        raise NodeUnusable(reason_of(error.os_error)) from error
    except TimeoutError as error:
        raise NodeUnusable(f"does not answer within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise NodeUnusable(str(error) or type(error).__name__) from error


class _Refusal(msgspec.Struct):
    """What a node answers instead: `{"error": {"message": ...}}`."""

    error: dict[str, object]


def _refusal(status: int, body: bytes) -> str:
    """Return the node's own sentence where it gave one."""
    try:
        return str(msgspec.json.decode(body, type=_Refusal).error["message"])
    except (*UNREADABLE, KeyError):
        return f"it answers with status {status}"


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise NodeUnusable(f"its answer passes the limit of {limit_bytes} bytes")
    return bytes(body)
