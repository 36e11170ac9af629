"""Watches nodes: polls each over HTTP until it can be used, then holds a link to its engine.

```
 poll ──GET /server_info──▶ usable ──▶ linked: it reports its load ──▶ lost · draining · silent ─┐
   ▲                          └─▶ not usable: poll again after 0.25, 0.5, 1, 1, ... s            │
   └─────────────────────────────────────────────────────────────────────────────────────────────┘
```

A linked node is not polled over HTTP: a restart ends the link, and a load report shows that it drains.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from tandem.frontend.text.tokenizer import Tokenizer, tokenizer_hash, with_chat_template
from tandem.router.config import RouterConfig
from tandem.router.nodes.adapters import load_missing
from tandem.router.nodes.canary import Canary
from tandem.router.nodes.node import DRAINING, Node, NodeUnusable
from tandem.telemetry.log import get_logger
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.hosts import reason_of
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import NodeInfo

log = get_logger(__name__)

# A healthy node answers /server_info from memory, within milliseconds.
INFO_TIMEOUT_S = 2.0
TOKENIZER_TIMEOUT_S = 30.0
# Time to wait for the tokenizer of one node before the next one is asked too.
TOKENIZER_TURN_S = 2.0
INFO_LIMIT_BYTES = 1 << 20
# Twice the largest accepted tokenizer file: JSON escapes need space, and there are small files as well.
TOKENIZER_LIMIT_BYTES = 128 << 20
# All that msgspec raises for invalid bytes; RecursionError for deeply nested brackets.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
FIRST_RETRY_S, LAST_RETRY_S = 0.25, 1.0
LOADING = "loading the model"
# Events that an operator has to act on; the others are part of normal starts and stops.
FAULTS = {"node.down", "node.unusable"}
# An engine answers its first message within milliseconds, or cannot be reached.
FIRST_ANSWER_TIMEOUT_S = 2.0
# An engine that reports nothing for this long is hung even if its link is up, because heartbeats do not need its loop.
# This is three times the longest chunk of a large model on a CPU; nodes use the same limit for themselves.
SILENCE_S = 30.0


class Watcher:
    """Watches nodes, one task per node, and loads the tokenizers of their models.

    Args:
        nodes: All nodes of the cluster.
        on_node_up: Called when a node can serve requests again.

    Raises:
        ConfigInvalid: The tokenizer directory cannot be read, or the link key cannot be derived.
    """

    def __init__(
        self, config: RouterConfig, nodes: Iterable[Node], on_node_up: Callable[[], None]
    ) -> None:
        self._nodes, self._canary = nodes, Canary(nodes)
        secret, directory = config.cluster_secret, config.tokenizer_dir
        self._key = ChannelKey.from_secret(secret) if secret else None
        self._chat_template = config.chat_template
        self._configured_tokenizer = (
            Tokenizer.load(Path(directory), config.chat_template) if directory else None
        )
        self._heartbeat, self._on_node_up = config.heartbeat, on_node_up
        # Tokenizers by hash. Nodes hold the references, so that an unused tokenizer is freed.
        self._tokenizers = WeakValueDictionary[str, Tokenizer]()
        self._fetching = asyncio.Lock()

    def tokenizer(self, name: str) -> Tokenizer | None:
        """Return a model's tokenizer by its hash; None if the model has none."""
        return self._configured_tokenizer or self._tokenizers.get(name)

    def check_hung(self) -> None:
        """Detect nodes whose engine is hung. Call this about once a second."""
        for node in self._nodes:
            if node.is_up and node.client is not None and self._silence_of(node.client):
                node.trouble.set()

    async def watch(self, node: Node, session: aiohttp.ClientSession) -> None:
        """Watch a node until it is removed and this process runs nothing on it."""
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
        retry_s, logged, is_missed = FIRST_RETRY_S, ("", ""), False
        while True:
            node.trouble.clear()
            try:
                await self._poll(node, session, tasks)
            except Exception as error:  # whatever one node sends must not affect the others
                if not isinstance(error, NodeUnusable):
                    log.exception("node.watch_failed", url=node.url)
                node.note(reason=str(error) or type(error).__name__)
                event = _event_of(node, error, is_missed=is_missed)
                if not node.is_up and (event, node.reason) != logged:
                    logged = (event, node.reason)
                    write = log.warning if event in FAULTS else log.info
                    write(event, role=node.role, url=node.url, reason=node.reason)
                # A node that loads its model serves soon. Others may be down for long.
                await asyncio.sleep(FIRST_RETRY_S if node.reason == LOADING else retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
                continue
            retry_s, logged = FIRST_RETRY_S, ("", "")
            if node.is_up:
                log.info("node.up", role=node.role, url=node.url)
                self._on_node_up()
            await self._until_trouble(node)
            is_missed = node.reason != DRAINING  # a node that drains is expected to exit

    async def _poll(
        self, node: Node, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        """Update a node from its /server_info, and connect to its engine.

        A node that does not answer over HTTP keeps its state: the link shows whether its engine is alive.

        Raises:
            NodeUnusable: The node cannot serve requests; the message is the reason.
        """
        info = await fetch_info(session, node.url)
        try:
            node.validate(info)
            await self._load_tokenizer(node, info, session)
        except NodeUnusable:
            node.note(is_admitted=False)
            raise
        client = node.connect(info, self._key, self._heartbeat)
        if client is not None:
            tasks.create_task(_run_link(node, client))
        assert node.client is not None
        await _wait_answered(node.client)
        if silence := self._silence_of(node.client):
            # Requests would wait there, even if it reports over HTTP that it is healthy.
            raise NodeUnusable(silence)
        try:
            await self._canary.check(node)
        except NodeUnusable:
            node.note(is_admitted=False)
            raise
        await self._load_adapters(node, node.client)
        node.note(is_admitted=True, reason="")

    async def _load_adapters(self, node: Node, client: EngineClient) -> None:
        """Load the adapters on a node that all nodes in use have. Without them it serves the base model."""
        assert node.info is not None
        same = node.info.model.fingerprint
        others = [
            each.client
            for each in self._nodes
            if each is not node and each.is_up and each.client is not None
            if each.info is not None and each.info.model.fingerprint == same
        ]
        try:
            if others:
                await load_missing(f"{node.role} {node.url}", client, others)
        except TandemError as error:
            log.warning("node.adapter_missing", reason=error.message)

    async def _until_trouble(self, node: Node) -> None:
        """Wait until the node must be polled over HTTP again."""
        client = node.client
        if client is not None and not client.lost.is_set():
            await node.trouble.wait()
            if silence := self._silence_of(client):
                node.note(is_admitted=False, reason=silence)
        if client is not None and client.lost.is_set():
            node.note(reason="its engine was lost")
            log.warning("node.lost", role=node.role, url=node.url)
        elif not node.is_up and node.reason != DRAINING:
            log.warning("node.down", role=node.role, url=node.url, reason=node.reason)

    def _silence_of(self, client: EngineClient) -> str:
        """Return why an engine counts as hung; empty while it does not."""
        # The client requests the load every second interval, so long intervals need a longer limit.
        is_hung = client.silent_s > max(SILENCE_S, 5 * self._heartbeat.interval_s)
        return f"its engine has reported nothing for over {SILENCE_S:g} s" if is_hung else ""

    async def _load_tokenizer(
        self, node: Node, info: NodeInfo, session: aiohttp.ClientSession
    ) -> None:
        name = info.model.tokenizer_hash
        tokenizer = self.tokenizer(name)
        if tokenizer is None and name:
            async with self._turn():  # all nodes of a model share one tokenizer: fetch it once
                tokenizer = self.tokenizer(name)
                if tokenizer is None:
                    tokenizer = await fetch_tokenizer(session, node.url, name, self._chat_template)
                    self._tokenizers[name] = tokenizer
        node.tokenizer = tokenizer

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Run the blocks of `async with` one at a time; start the next after `TOKENIZER_TURN_S` at the latest."""
        await self._fetching.acquire()
        with ExitStack() as turn:
            turn.callback(self._fetching.release)
            timer = asyncio.get_running_loop().call_later(TOKENIZER_TURN_S, turn.close)
            try:
                yield
            finally:
                timer.cancel()


async def _run_link(node: Node, client: EngineClient) -> None:
    """Run a link. Invalid messages of a node end only its link, which is then opened again."""
    try:
        await client.run()
    except* Exception:
        log.exception("node.link_failed", role=node.role, url=node.url, action="connecting again")


def _event_of(node: Node, error: Exception, *, is_missed: bool) -> str:
    """Return the log event of a node that cannot be used.

    Args:
        is_missed: Whether it has served, and did not drain since.
    """
    if node.reason == DRAINING:
        return "node.draining"
    if is_missed:
        return "node.down"
    is_starting = isinstance(error, NodeUnreachable) or node.reason == LOADING
    return "node.awaited" if is_starting else "node.unusable"


async def _wait_answered(client: EngineClient) -> None:
    try:
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            await client.answered.wait()
    except TimeoutError as error:
        why = client.refusal or "is the port open, and TANDEM_CLUSTER_KEY the same on both sides?"
        raise NodeUnusable(f"its engine at {client.address} does not answer: {why}") from error


class NodeUnreachable(NodeUnusable):
    """A node does not answer over HTTP, as long as it has not started."""


# ── HTTP requests to a node: every failure is a `NodeUnusable` with a reason for operators ────────


async def fetch_info(session: aiohttp.ClientSession, url: str) -> NodeInfo:
    """Fetch a node's /server_info. Raises `NodeUnusable`."""
    body = await _get(session, f"{url}/server_info", INFO_TIMEOUT_S, INFO_LIMIT_BYTES)
    try:
        return msgspec.json.decode(body, type=NodeInfo)
    except UNREADABLE as error:
        raise NodeUnusable(f"its /server_info is invalid: {error}") from error


class _TokenizerFiles(msgspec.Struct, frozen=True):
    files: dict[str, str]


async def fetch_tokenizer(
    session: aiohttp.ClientSession, url: str, expected_hash: str, chat_template: str
) -> Tokenizer:
    """Fetch and load a node's tokenizer. `chat_template` replaces its template, unless it is empty.

    Raises:
        NodeUnusable: The node does not answer, or its tokenizer is invalid.
    """
    body = await _get(session, f"{url}/tokenizer", TOKENIZER_TIMEOUT_S, TOKENIZER_LIMIT_BYTES)
    try:
        files = msgspec.json.decode(body, type=_TokenizerFiles).files
        if tokenizer_hash(files) != expected_hash:
            raise NodeUnusable(
                "the files of its /tokenizer do not match the hash in its /server_info"
            )
        # Loading a large vocabulary takes a second, so it must not block the event loop.
        files = with_chat_template(files, chat_template)
        return await asyncio.to_thread(Tokenizer.from_files, files)
    except (*UNREADABLE, ConfigInvalid) as error:
        raise NodeUnusable(f"its tokenizer is invalid: {error}") from error


async def _get(
    session: aiohttp.ClientSession, url: str, timeout_s: float, limit_bytes: int
) -> bytes:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.get(url, timeout=timeout) as response:
            if response.status == 401:
                raise NodeUnusable(
                    "it requires a key: start it and this router with the same TANDEM_CLUSTER_KEY"
                )
            if response.status != 200:
                raise NodeUnusable(_refusal(response.status, await _read(response, limit_bytes)))
            return await _read(response, limit_bytes)
    except aiohttp.ClientConnectorCertificateError as error:
        raise NodeUnusable(
            f"its certificate is not trusted ({error.certificate_error}): set --node-ca-certs to its "
            "authority"
        ) from error
    except aiohttp.ClientSSLError as error:
        raise NodeUnusable(f"TLS failed: {error.strerror}") from error
    except aiohttp.ClientConnectorError as error:
        raise NodeUnreachable(reason_of(error.os_error)) from error
    except TimeoutError as error:
        raise NodeUnreachable(f"does not answer within {timeout_s:g} s") from error
    except aiohttp.ClientError as error:
        raise NodeUnusable(str(error) or type(error).__name__) from error


class _Refusal(msgspec.Struct):
    """An error response of a node: `{"error": {"message": ...}}`."""

    error: dict[str, object]


def _refusal(status: int, body: bytes) -> str:
    """Return the node's error message, or else the status."""
    try:
        return str(msgspec.json.decode(body, type=_Refusal).error["message"])
    except (*UNREADABLE, KeyError):
        return f"it answers with status {status}"


async def _read(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise NodeUnusable(f"its response exceeds {limit_bytes} bytes")
    return bytes(body)
