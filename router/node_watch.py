"""Watching one node: asks it over HTTP what it is until it can be used, then holds a link to its engine.

```
 asked ──GET /server_info──▶ usable ──▶ linked: its load, as it changes  ────────▶ lost · draining · silent ─┐
   ▲                           └─▶ not usable: asked again after 0.25, 0.5, 1, 1, ... s                    │
   └───────────────────────────────────────────────────────────────────────────────────────────────────────┘
```

A node that is linked is not asked over HTTP: a restart ends the link, and a drain is part of its load.
"""

import asyncio
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from tandem.frontend.engine_client import EngineClient
from tandem.frontend.tokenizer import Tokenizer, tokenizer_hash, with_chat_template
from tandem.router.canary import Canary
from tandem.router.config import RouterConfig
from tandem.router.node import Node, NodeUnusable
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import reason_of
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import NodeInfo

log = get_logger(__name__)

# A node answers from memory: what takes longer is a node in trouble.
INFO_TIMEOUT_S = 2.0
TOKENIZER_TIMEOUT_S = 30.0
INFO_LIMIT_BYTES = 1 << 20
# Twice the largest file that is taken: JSON escapes, and small files beside it.
TOKENIZER_LIMIT_BYTES = 128 << 20
# What msgspec raises for bytes of any kind; the last for brackets in brackets without end.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
FIRST_RETRY_S, LAST_RETRY_S = 0.25, 1.0
# A node that was never reached may be starting for this long, and longer while it reports that it loads.
START_S = 30.0
LOADING, REFUSED = "loading the model", os.strerror(errno.ECONNREFUSED)
# An engine that /server_info names answers in milliseconds, or is out of reach.
FIRST_ANSWER_TIMEOUT_S = 2.0
# An engine that reported nothing for so long is hung, though its link is up: heartbeats need no loop. Three times the
# longest chunk of a large model on a CPU, as nodes judge themselves.
SILENCE_S = 30.0


class Watcher:
    """Watches nodes, each in a task of its own, and collects the tokenizers of their models.

    Args:
        nodes: All nodes of the cluster.
        came_up: Called when a node may be given requests again.

    Raises:
        ConfigInvalid: The tokenizer directory cannot be read, or the key cannot be made.
    """

    def __init__(
        self, config: RouterConfig, nodes: Iterable[Node], came_up: Callable[[], None]
    ) -> None:
        self._nodes, self._canary = nodes, Canary(nodes)
        secret, directory = config.cluster_secret, config.tokenizer_dir
        self._key = ChannelKey.from_secret(secret) if secret else None
        self._chat_template = config.chat_template
        self._given_tokenizer = (
            Tokenizer.load(Path(directory), config.chat_template) if directory else None
        )
        self._heartbeat, self._came_up = config.heartbeat, came_up
        # By their hash. Nodes hold them: one that no node has any more is let go.
        self._tokenizers = WeakValueDictionary[str, Tokenizer]()
        self._fetching = asyncio.Lock()

    def tokenizer(self, name: str) -> Tokenizer | None:
        """Return the tokenizer of a model by its hash, None where it has none."""
        return self._given_tokenizer or self._tokenizers.get(name)

    def look(self) -> None:
        """Notice nodes whose engine is hung. To be called about once a second."""
        for node in self._nodes:
            if node.is_up and node.client is not None and self._silence_of(node.client):
                node.trouble.set()

    async def keep(self, node: Node, session: aiohttp.ClientSession) -> None:
        """Watch a node until it has left and nothing of this process runs on it."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(node, session, tasks))
            while not (node.leaving.is_set() and node.idle.is_set()):
                await node.leaving.wait()
                await node.idle.wait()
            watching.cancel()
            if node.client is not None:
                node.client.stop()

    async def _watch(
        self, node: Node, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        retry_s, noted, began_s = FIRST_RETRY_S, ("", ""), asyncio.get_running_loop().time()
        while True:
            node.trouble.clear()
            try:
                await self._ask(node, session, tasks)
            except Exception as error:  # the top of a node: whatever it sends, the others serve on
                if not isinstance(error, NodeUnusable):
                    log.exception("node.watch_failed", url=node.url)
                node.note(reason=str(error) or type(error).__name__)
                age_s = asyncio.get_running_loop().time() - began_s
                event = "node.awaited" if _is_starting(node, age_s) else "node.down"
                if not node.is_up and (event, node.reason) != noted:
                    noted = (event, node.reason)
                    write = log.info if event == "node.awaited" else log.warning
                    write(event, role=node.role, url=node.url, reason=node.reason)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
                continue
            retry_s, noted = FIRST_RETRY_S, ("", "")
            if node.is_up:
                log.info("node.up", role=node.role, url=node.url)
                self._came_up()
            await self._until_trouble(node)

    async def _ask(
        self, node: Node, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        """Bring what is known of a node up to date.

        A node whose HTTP does not answer keeps its state: the link to its engine shows whether it lives.

        Raises:
            NodeUnusable: It cannot be given requests; says why.
        """
        info = await fetch_info(session, node.url)
        try:
            node.check(info)
            await self._learn_tokenizer(node, info, session)
        except NodeUnusable:
            node.note(is_admitted=False)
            raise
        client = node.meet(info, self._key, self._heartbeat)
        if client is not None:
            tasks.create_task(_hold(node, client))
        assert node.client is not None
        await _wait_answered(node.client)
        if silence := self._silence_of(node.client):
            # Whatever it reports over HTTP: requests would wait there.
            raise NodeUnusable(silence)
        try:
            await self._canary.check(node)
        except NodeUnusable:
            node.note(is_admitted=False)
            raise
        node.note(is_admitted=True, reason="")

    async def _until_trouble(self, node: Node) -> None:
        """Return when the node is to be asked over HTTP again."""
        client = node.client
        if client is not None and not client.lost.is_set():
            await node.trouble.wait()
            if silence := self._silence_of(client):
                node.note(is_admitted=False, reason=silence)
        if client is not None and client.lost.is_set():
            node.note(reason="its engine was lost")
            log.warning("node.lost", role=node.role, url=node.url)
        elif not node.is_up:
            log.warning("node.down", role=node.role, url=node.url, reason=node.reason)

    def _silence_of(self, client: EngineClient) -> str:
        """Return why an engine counts as hung; empty while it does not."""
        # It is asked for its load once in two intervals, however rare that is.
        is_hung = client.silent_s > max(SILENCE_S, 5 * self._heartbeat.interval_s)
        return f"its engine reports nothing for over {SILENCE_S:g} s" if is_hung else ""

    async def _learn_tokenizer(
        self, node: Node, info: NodeInfo, session: aiohttp.ClientSession
    ) -> None:
        name = info.model.tokenizer_hash
        async with self._fetching:  # all nodes of a model have the same one: fetch it once
            tokenizer = self.tokenizer(name)
            if tokenizer is None and name:
                tokenizer = await fetch_tokenizer(session, node.url, name, self._chat_template)
                self._tokenizers[name] = tokenizer
            node.tokenizer = tokenizer


async def _hold(node: Node, client: EngineClient) -> None:
    """Hold a link. What a node sends may end its link, which is then opened anew, and nothing else."""
    try:
        await client.run()
    except* Exception:
        log.exception("node.link_failed", role=node.role, url=node.url, action="connecting again")


def _is_starting(node: Node, age_s: float) -> bool:
    is_early = node.reason == REFUSED and age_s < START_S
    return node.info is None and (is_early or node.reason == LOADING)


async def _wait_answered(client: EngineClient) -> None:
    try:
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            await client.answered.wait()
    except TimeoutError as error:
        why = client.refusal or "is the port open, and TANDEM_CLUSTER_KEY the same on both sides?"
        raise NodeUnusable(f"its engine at {client.address} does not answer: {why}") from error


# ── what a node is asked over HTTP: every failure is a `NodeUnusable` that an operator can act on ──


async def fetch_info(session: aiohttp.ClientSession, url: str) -> NodeInfo:
    """Ask a node what it is. Raises `NodeUnusable`."""
    body = await _get(session, f"{url}/server_info", INFO_TIMEOUT_S, INFO_LIMIT_BYTES)
    try:
        return msgspec.json.decode(body, type=NodeInfo)
    except UNREADABLE as error:
        raise NodeUnusable(f"/server_info is not that of a node: {error}") from error


class _TokenizerFiles(msgspec.Struct, frozen=True):
    files: dict[str, str]


async def fetch_tokenizer(
    session: aiohttp.ClientSession, url: str, expected_hash: str, chat_template: str
) -> Tokenizer:
    """Fetch a node's tokenizer and load it, with another chat template unless it is empty.

    Raises:
        NodeUnusable: The node does not answer, or its tokenizer cannot be used.
    """
    body = await _get(session, f"{url}/tokenizer", TOKENIZER_TIMEOUT_S, TOKENIZER_LIMIT_BYTES)
    try:
        files = msgspec.json.decode(body, type=_TokenizerFiles).files
        if tokenizer_hash(files) != expected_hash:
            raise NodeUnusable("/tokenizer gives other files than the node announced")
        # Reading a large vocabulary takes a second: streams go on meanwhile.
        files = with_chat_template(files, chat_template)
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
