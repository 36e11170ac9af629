"""The nodes of a cluster as its sources say, watched while `Cluster.run` runs, and what they serve.

```
 sources, announcements ──▶ Membership ──refresh──▶ Roster ──▶ snapshot, model, health
                                                      ▲
                                        Watcher ──────┘ one task a node
```

Holds who is there. Which nodes take a request is `policy.py`'s to say; what runs on them is
`backend.py`'s.
"""

import asyncio
import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass

import aiohttp
import msgspec
from typing_extensions import override

from tandem.frontend.backend import Health, ServedModel
from tandem.router.conditional import with_stand_ins
from tandem.router.config import RouterConfig
from tandem.router.discovery import sources_of
from tandem.router.health import explain
from tandem.router.membership import Member, Membership, Said, Source
from tandem.router.membership_files import MemberFiles
from tandem.router.node import Node
from tandem.router.node_watch import Watcher
from tandem.router.policy import ClusterSnapshot, usable_fingerprint
from tandem.router.prefixes import CachedPrefixes
from tandem.router.roster import Roster
from tandem.router.tiers import KnownPrefixes
from tandem.router.waiters import Waiters
from tandem.telemetry.log import get_logger
from tandem.wire.errors import NoNodeAvailable
from tandem.wire.generation import SamplingDefaults
from tandem.wire.keys import operator_key, reader_key

log = get_logger(__name__)

# How often leases are looked at. What is said over HTTP is told to every worker at once.
REFRESH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class _Outlook:
    """What the cluster can serve, as of one version of the roster."""

    version: int
    fingerprint: str | None
    health: Health


class Cluster:
    """The nodes and what they serve. Everything but `run` is quick and may be called any time.

    Args:
        files: Of what is said of nodes over HTTP; None where nobody can say anything.

    Raises:
        ConfigInvalid: The tokenizer directory cannot be read, or the key cannot be made.

    Attributes:
        known: What all nodes have cached, and behind that.
        waiters: Told when a node comes up.
        last_model: What is served, or was last; None before anything was.
    """

    def __init__(self, config: RouterConfig, files: MemberFiles | None = None) -> None:
        self.roster, self.known = Roster(), KnownPrefixes()
        self.sources: list[Source] = sources_of(config)
        self._membership = Membership(
            [Member(target.url, "prefill", target.bootstrap_port) for target in config.prefills]
            + [Member(url, "decode") for url in config.decodes]
        )
        self._files = files
        self.local_prefill_threshold = config.local_prefill_threshold
        self._tls = config.node_tls()
        self.waiters = Waiters()
        self._watcher = Watcher.of_config(config, came_up=self.waiters.tell)
        # No key of a client leaves this router: whoever is listening at a node's address would have it.
        key = reader_key(operator_key(config.cluster_secret))
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._name = config.served_model_name
        self._has_defaults = config.generation_config == "auto"
        self._fingerprint = ""
        self._outlook = _Outlook(-1, None, Health(is_serving=False, detail=""))
        self.last_model: ServedModel | None = None
        self._was_serving = False
        self._arrivals: asyncio.Queue[Node] = asyncio.Queue()
        self.refresh()

    @override
    def __repr__(self) -> str:
        return f"<Cluster {self.health().detail}>"

    async def run(self) -> None:
        """Watch every node, and look for more, until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        async with (
            aiohttp.ClientSession(connector=connector, headers=self._headers) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for source in self.sources:
                tasks.create_task(self._follow(source))
            tasks.create_task(self._refresh_often())
            while True:
                node = await self._arrivals.get()
                tasks.create_task(self._keep(node, session))

    @property
    def prefills(self) -> list[Node]:
        """The nodes that are prefills now."""
        return self.roster.of_role("prefill")

    @property
    def decodes(self) -> list[Node]:
        """The nodes that are decodes now."""
        return self.roster.of_role("decode")

    def node(self, url: str) -> Node:
        """Return the node of this URL. One that was forgotten is as one that was never reached."""
        return self.roster.find(url) or Node(url, "")

    @property
    def is_serving(self) -> bool:
        """Whether a pair can serve now."""
        return self.health().is_serving

    @property
    def num_streams(self) -> int:
        """How many generations run from here."""
        return sum(node.in_flight_requests for node in self.decodes)

    def snapshot(self) -> ClusterSnapshot:
        """Return every node at this moment. It is the same object until one changes."""
        return self.roster.snapshot()

    def servable(self) -> ClusterSnapshot:
        """Return the nodes to choose a pair of: see `with_stand_ins`."""
        return with_stand_ins(self.snapshot(), self.local_prefill_threshold)

    def fingerprint(self) -> str:
        """Return that of the model served now.

        Raises:
            NoNodeAvailable: No pair can serve; says why.
        """
        outlook = self._look()
        if outlook.fingerprint is None:
            raise NoNodeAvailable(outlook.health.detail)
        if outlook.fingerprint != self._fingerprint:
            log.info("cluster.serves", fingerprint=outlook.fingerprint, before=self._fingerprint)
            self._fingerprint = outlook.fingerprint
        return outlook.fingerprint

    def health(self) -> Health:
        """Tell whether a pair can serve now, and what is missing."""
        return self._look().health

    def model(self) -> ServedModel:
        """Return the model served.

        Raises:
            NoNodeAvailable: No pair can serve; says why.
        """
        self.fingerprint()
        assert self.last_model is not None
        return self.last_model

    def refresh(self) -> None:
        """Take up what was said since the last time, and let go of what nobody says any more."""
        if self._files is not None:
            self._hear(self._files)
        wanted = self._membership.wanted()
        for member in wanted.values():
            self._want(member)
        for node in self.roster:
            if node.url not in wanted:
                node.leave(hands_over=self._membership.hands_over(node.url))
        self.waiters.tell()  # one that was leaving may be wanted again

    @property
    def num_said(self) -> int:
        """Of how many nodes something was said over HTTP."""
        return self._membership.num_said

    def tier_blocks(self) -> dict[str, int]:
        """Return how many blocks are known of all tiers of each name, each store counted once."""
        blocks: dict[str, int] = {}
        counted = set[CachedPrefixes]()
        for node in self.roster:
            for name, prefixes in node.prefixes.behind.items() if node.prefixes else ():
                new = prefixes.num_blocks if prefixes not in counted else 0
                blocks[name] = blocks.get(name, 0) + new
                counted.add(prefixes)
        return blocks

    def say(self, said: Said) -> bool:
        """Keep what is said of a node; tell whether it is news, which other workers are to be told.

        Raises:
            MembersUnwritable: It cannot be kept.
        """
        assert self._files is not None
        before = self._membership.said(said.url)
        self._files.write(msgspec.structs.replace(said, mark=secrets.token_hex(8)))
        self.refresh()
        return before is None or msgspec.structs.replace(before, mark=said.mark) != said

    def _hear(self, files: MemberFiles) -> None:
        try:
            said = files.read()
        except OSError as error:  # who was known stays
            log.warning("nodes.unreadable", directory=str(files.directory), reason=error.strerror)
            return
        for over in self._membership.hear(said, time.monotonic(), self._is_up):
            files.forget(over)
            if not over.is_removed:
                log.info("node.silent", url=over.url, ttl_s=over.ttl_s, action="forgetting it")

    def _is_up(self, url: str) -> bool:
        node = self.roster.find(url)
        return node is not None and node.is_up

    def _want(self, member: Member) -> None:
        node = self.roster.find(member.url)
        if node is None:
            node = Node(
                member.url, member.role, on_change=self.roster.note_change, known=self.known
            )
            self.roster.add(node)
            self._arrivals.put_nowait(node)
        node.join(member)

    async def _keep(self, node: Node, session: aiohttp.ClientSession) -> None:
        await self._watcher.keep(node, session)
        node.forget_prefixes()
        self.roster.remove(node)
        log.info("node.forgotten", role=node.role, url=node.url)

    async def _follow(self, source: Source) -> None:
        async with aclosing(source.watch()) as findings:
            async for members in findings:
                self._membership.give(source.name, members)
                self.refresh()

    async def _refresh_often(self) -> None:
        while True:
            self.refresh()
            self._look()
            await asyncio.sleep(REFRESH_INTERVAL_S)

    def _look(self) -> _Outlook:
        snapshot = self.roster.snapshot()
        if self._outlook.version != self.roster.version:
            usable = usable_fingerprint(self.servable(), preferred=self._fingerprint)
            self._outlook = _Outlook(self.roster.version, usable, explain(snapshot, usable))
            if usable is not None:
                self.last_model = self._model_of(usable)
            self._log_health(self._outlook.health)
        return self._outlook

    def _log_health(self, health: Health) -> None:
        if health.is_serving != self._was_serving:
            self._was_serving = health.is_serving
            event = "cluster.serving" if health.is_serving else "cluster.not_serving"
            log.info(event, detail=health.detail)

    def _model_of(self, fingerprint: str) -> ServedModel:
        infos = [node.info for node in self.roster if node.info is not None and node.is_up]
        infos = [info for info in infos if info.model.fingerprint == fingerprint]
        model = infos[0].model
        limits = [info.max_prompt_tokens for info in infos if info.max_prompt_tokens]
        return ServedModel(
            name=self._name or model.name,
            context_length=model.context_length,
            max_prompt_tokens=min([model.context_length - 1, *limits]),
            vocab_size=model.vocab_size,
            eos_token_ids=frozenset(model.eos_token_ids),
            tokenizer=self._watcher.tokenizer(model.tokenizer_hash),
            default_sampling=model.default_sampling if self._has_defaults else SamplingDefaults(),
        )
