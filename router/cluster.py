"""All nodes of a cluster, watched for as long as `Cluster.run` runs, and the model they serve.

Holds who is there. Which nodes take a request is `policy.py`'s to say; what runs on them is
`backend.py`'s.
"""

import asyncio
from pathlib import Path

import aiohttp
from typing_extensions import override

from frontend.backend import Health, ServedModel
from frontend.engine_client import EngineClient
from frontend.tokenizer import Tokenizer
from router.conditional import with_stand_ins
from router.config import RouterConfig
from router.health import explain
from router.node import Node
from router.node_http import NodeUnusable, fetch_info, fetch_tokenizer
from router.policy import ClusterSnapshot, usable_fingerprint
from telemetry.log import get_logger
from wire.errors import NoNodeAvailable
from wire.keys import ChannelKey
from wire.node_info import NodeInfo

log = get_logger(__name__)

POLL_INTERVAL_S = 1.0
# A node that is away is asked after 0.25, 0.5, 1, 1, ... s: no less often than one that serves.
FIRST_RETRY_S = 0.25
LAST_RETRY_S = POLL_INTERVAL_S
# An engine that /server_info names answers in milliseconds, or is out of reach.
FIRST_ANSWER_TIMEOUT_S = 2.0


class Cluster:
    """The nodes and what they serve. Everything but `run` is quick and may be called any time.

    Raises:
        ConfigInvalid: The tokenizer directory cannot be read, or the key cannot be made.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.prefills = [Node(t.url, "prefill", t.bootstrap_port) for t in config.prefills]
        self.decodes = [Node(url, "decode") for url in config.decodes]
        secret = config.cluster_secret
        self._tls = config.node_tls()
        self._key = ChannelKey.from_secret(secret) if secret else None
        # Nodes that ask for a key are given the one that clients have.
        keys = config.http.api_keys
        self._headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        self._by_url = {node.url: node for node in (*self.prefills, *self.decodes)}
        self.local_prefill_threshold = config.local_prefill_threshold
        self._name = config.served_model_name
        given = Tokenizer.load(Path(config.tokenizer_dir)) if config.tokenizer_dir else None
        self._given_tokenizer = given
        self._tokenizers: dict[str, Tokenizer] = {}
        self._fetching = asyncio.Lock()
        self._fingerprint = ""
        self._was_serving = False

    @override
    def __repr__(self) -> str:
        return f"<Cluster {self.health().detail}>"

    async def run(self) -> None:
        """Watch every node until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        async with (
            aiohttp.ClientSession(connector=connector, headers=self._headers) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for node in (*self.prefills, *self.decodes):
                tasks.create_task(self._watch(node, session, tasks))

    def node(self, url: str) -> Node:
        """Return the node that was given by this URL."""
        return self._by_url[url]

    @property
    def is_serving(self) -> bool:
        """Whether a pair could serve when the nodes were last looked at."""
        return self._was_serving

    @property
    def num_streams(self) -> int:
        """How many generations run from here."""
        return sum(node.in_flight_requests for node in self.decodes)

    def snapshot(self) -> ClusterSnapshot:
        """Return every node at this moment."""
        return ClusterSnapshot(
            prefills=tuple(node.snapshot() for node in self.prefills),
            decodes=tuple(node.snapshot() for node in self.decodes),
        )

    def servable(self) -> ClusterSnapshot:
        """Return the nodes to choose a pair of: see `with_stand_ins`."""
        return with_stand_ins(self.snapshot(), self.local_prefill_threshold)

    def fingerprint(self) -> str:
        """Return that of the model served now.

        Raises:
            NoNodeAvailable: No pair can serve; says why.
        """
        usable = usable_fingerprint(self.servable(), preferred=self._fingerprint)
        if usable is None:
            raise NoNodeAvailable(explain(self.snapshot(), None).detail)
        if usable != self._fingerprint:
            log.info("cluster.serves", fingerprint=usable, before=self._fingerprint)
            self._fingerprint = usable
        return usable

    def health(self) -> Health:
        """Tell whether a pair can serve now, and what is missing."""
        usable = usable_fingerprint(self.servable(), preferred=self._fingerprint)
        return explain(self.snapshot(), usable)

    def model(self) -> ServedModel:
        """Return the model served.

        Raises:
            NoNodeAvailable: No pair can serve; says why.
        """
        fingerprint = self.fingerprint()
        nodes = [*self.prefills, *self.decodes]
        infos = [node.info for node in nodes if node.info is not None and node.is_up]
        infos = [info for info in infos if info.model.fingerprint == fingerprint]
        model = infos[0].model
        limits = [info.max_prompt_tokens for info in infos if info.max_prompt_tokens]
        return ServedModel(
            name=self._name or model.name,
            context_length=model.context_length,
            max_prompt_tokens=min([model.context_length - 1, *limits]),
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset(model.eos_token_ids),
            tokenizer=self._given_tokenizer or self._tokenizers.get(model.tokenizer_hash),
        )

    async def _watch(
        self, node: Node, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        retry_s = FIRST_RETRY_S
        while True:
            was_up, old_reason = node.is_up, node.reason
            try:
                await self._visit(node, session, tasks)
                node.reason, retry_s, pause_s = "", FIRST_RETRY_S, POLL_INTERVAL_S
            except NodeUnusable as unusable:
                node.reason, pause_s = str(unusable), retry_s
                retry_s = min(2 * retry_s, LAST_RETRY_S)
            _log_change(node, was_up=was_up, old_reason=old_reason)
            self._log_health()
            await _pause(node, pause_s)

    async def _visit(
        self, node: Node, session: aiohttp.ClientSession, tasks: asyncio.TaskGroup
    ) -> None:
        """Bring what is known of a node up to date.

        A node whose HTTP does not answer keeps its state: its engine's link says if it is alive.
        """
        info = await fetch_info(session, node.url)
        try:
            node.check(info)
            await self._learn_tokenizer(node, info, session)
        except NodeUnusable:
            node.is_admitted = False
            raise
        client = node.meet(info, self._key)
        if client is not None:
            tasks.create_task(client.run())
        node.is_admitted = True
        if node.client is not None:
            await _wait_answered(node.client)

    async def _learn_tokenizer(
        self, node: Node, info: NodeInfo, session: aiohttp.ClientSession
    ) -> None:
        name = info.model.tokenizer_hash
        async with self._fetching:  # all nodes of a model have the same one: fetch it once
            if self._given_tokenizer is None and name and name not in self._tokenizers:
                self._tokenizers[name] = await fetch_tokenizer(session, node.url, name)

    def _log_health(self) -> None:
        health = self.health()
        if health.is_serving != self._was_serving:
            self._was_serving = health.is_serving
            event = "cluster.serving" if health.is_serving else "cluster.not_serving"
            log.info(event, detail=health.detail)


async def _wait_answered(client: EngineClient) -> None:
    try:
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            await client.answered.wait()
    except TimeoutError as error:
        raise NodeUnusable(
            f"its engine at {client.address} does not answer: is the port open, "
            "and TANDEM_CLUSTER_KEY the same on both sides?"
        ) from error


async def _pause(node: Node, pause_s: float) -> None:
    """Wait until the next visit is due, which is at once when the engine is lost."""
    if node.client is None or node.client.lost.is_set():
        await asyncio.sleep(pause_s)
        return
    try:
        async with asyncio.timeout(pause_s):
            await node.client.lost.wait()
    except TimeoutError:
        return
    node.reason = "its engine was lost"
    log.warning("node.lost", role=node.role, url=node.url)


def _log_change(node: Node, *, was_up: bool, old_reason: str) -> None:
    if node.is_up and not was_up:
        log.info("node.up", role=node.role, url=node.url)
    elif not node.is_up and node.reason != old_reason:
        log.warning("node.down", role=node.role, url=node.url, reason=node.reason)
