"""The nodes of a cluster in one edge worker, and the model that they serve.

```
 parent's Members ──apply──▶ Roster ──▶ snapshot, model, health
                               ▲
                 Watcher ──────┘ one task per node
```

The parent process owns the membership (`membership.py`). `pairing.py` chooses the nodes of a request, and `request.py` runs
it.

Every request takes a snapshot of all nodes, and busy engines report their load five times a second. To stay fast with
hundreds of nodes, a new snapshot rereads only the nodes that have changed since the last one.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from tandem.frontend.backend import Health, ServedModel
from tandem.router.config import RouterConfig
from tandem.router.membership.membership import Member, Members, listed_members
from tandem.router.nodes.node import ROLES, Node
from tandem.router.nodes.prefixes import KnownPrefixes
from tandem.router.nodes.snapshot import (
    Candidates,
    ClusterSnapshot,
    NodeSnapshot,
    usable_fingerprint,
    with_stand_ins,
)
from tandem.router.nodes.watch import Watcher
from tandem.telemetry.log import get_logger
from tandem.wire.engine_client import EngineClient
from tandem.wire.errors import LayoutMismatch, NoNodeAvailable
from tandem.wire.generation import SamplingDefaults
from tandem.wire.keys import operator_key, reader_key

log = get_logger(__name__)

# Interval of checks for hung engines and for a change of the cluster's health.
CHECK_INTERVAL_S = 1.0


class Roster:
    """The nodes by URL, in the order in which they were added.

    Attributes:
        version: Increases with every change other than load: members, whether and why they are up or put aside,
            and the models that they serve. Current after `refresh`.
        on_change: Called at every change of any node.
    """

    def __init__(self) -> None:
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        self._nodes: dict[str, Node] = {}
        self._changed: dict[str, None] = {}
        self._outlines: dict[str, tuple[object, ...]] = {}
        self._snapshots: dict[str, dict[str, NodeSnapshot]] = {role: {} for role in sorted(ROLES)}
        self._candidates: dict[tuple[str, str, str], Candidates] = {}
        self._snapshot, self._is_stale = ClusterSnapshot(prefills=(), decodes=()), False

    def __iter__(self) -> Iterator[Node]:
        return iter(tuple(self._nodes.values()))

    def find(self, url: str) -> Node | None:
        """Return the node at a URL, if it is known."""
        return self._nodes.get(url)

    def of_role(self, role: str) -> list[Node]:
        """Return the nodes that currently have a role."""
        return [node for node in self._nodes.values() if node.role == role]

    def add(self, node: Node) -> None:
        """Add a node, whose `on_change` must be `note_change`."""
        self._nodes[node.url] = node
        self.note_change(node)

    def remove(self, node: Node) -> None:
        """Forget a node."""
        del self._nodes[node.url]
        self.note_change(node)

    def note_change(self, node: Node) -> None:
        """Reread this node before the next snapshot."""
        self._changed[node.url] = None
        self.on_change()

    def snapshot(self) -> ClusterSnapshot:
        """Return all nodes with a known role. Its candidates are kept up to date until the next snapshot is made."""
        self.refresh()
        if self._is_stale:
            self._is_stale = False
            self._snapshot = ClusterSnapshot(
                prefills=tuple(self._snapshots["prefill"].values()),
                decodes=tuple(self._snapshots["decode"].values()),
                candidates=self._candidates,
            )
        return self._snapshot

    def view(self, url: str) -> NodeSnapshot | None:
        """Return the current snapshot of one node with a known role."""
        self.refresh()
        return self._snapshots["prefill"].get(url) or self._snapshots["decode"].get(url)

    def refresh(self) -> None:
        """Reread the nodes that have changed."""
        for url in self._changed:
            self._refresh_node(url)
            self._is_stale = True
        self._changed.clear()

    def _refresh_node(self, url: str) -> None:
        node = self._nodes.get(url)
        outline = _outline(node)
        if outline != self._outlines.get(url):
            self.version, self._candidates = self.version + 1, {}
            self._outlines[url] = outline
        if node is None:
            del self._outlines[url]
        for role, snapshots in self._snapshots.items():
            if node is not None and node.role == role:
                snapshots[url] = snapshot = node.snapshot()
                # Adapters that all nodes have share their candidates.
                for candidates in set(self._candidates.values()):
                    candidates.put(snapshot)
            else:
                snapshots.pop(url, None)


def _outline(node: Node | None) -> tuple[object, ...]:
    """Return the properties of a node that change rarely."""
    if node is None:
        return ()
    model, limit = (node.info.model, node.info.max_prompt_tokens) if node.info else (None, 0)
    state = node.role, node.is_up, node.is_aside, node.shown_reason
    return (*state, model, limit, node.load.adapters)


def explain(snapshot: ClusterSnapshot, fingerprint: str | None) -> Health:
    """Return whether the cluster can serve, and a sentence for operators that names what is missing.

    Args:
        fingerprint: Fingerprint of the model that a pair can serve now; None if no pair can.
    """
    if fingerprint is None:
        return Health(is_serving=False, detail="; ".join(_missing(snapshot)) + "; retrying")
    counts = [
        f"{sum(_is_used(node, fingerprint) for node in nodes)} of {len(nodes)} {role} nodes"
        for role, nodes in (("prefill", snapshot.prefills), ("decode", snapshot.decodes))
    ]
    unused = [
        f"{node.role} {node.url} {_why_unused(node)}"
        for node in (*snapshot.prefills, *snapshot.decodes)
        if node.is_aside or not _is_used(node, fingerprint)
    ]
    return Health(is_serving=True, detail="; ".join([f"{' and '.join(counts)} serve", *unused]))


def _is_used(node: NodeSnapshot, fingerprint: str) -> bool:
    return node.is_up and node.fingerprint == fingerprint


def _why_unused(node: NodeSnapshot) -> str:
    if not node.is_up:
        return node.reason
    if node.is_aside:
        return "is put aside: it failed several requests in a row"
    return f"serves another model: {node.fingerprint}"


def _missing(snapshot: ClusterSnapshot) -> list[str]:
    """Return the reasons why no pair can serve: roles without a node, or different models."""
    roles = (("prefill", snapshot.prefills), ("decode", snapshot.decodes))
    absent = [
        f"no {role} node reachable: " + ", ".join(f"{node.url} {node.reason}" for node in nodes)
        if nodes
        else f"no {role} node is known"
        for role, nodes in roles
        if not any(node.is_up for node in nodes)
    ]
    if absent:
        return absent
    return [LayoutMismatch(_models(snapshot.prefills), _models(snapshot.decodes)).message]


def _models(nodes: Sequence[NodeSnapshot]) -> str:
    return ", ".join(sorted({node.fingerprint for node in nodes if node.is_up}))


def servable_adapters(snapshot: ClusterSnapshot, fingerprint: str) -> Mapping[str, str]:
    """Return the ids of the adapters that a pair can serve, by name.

    Of several contents of a name it is the one that most nodes have and, while all nodes have both, the newer one. So
    when a name is loaded again, requests get the new content as soon as the last node has it.
    """
    prefill, decode = (
        Counter(
            (each.name, each.id)
            for node in nodes
            if _is_used(node, fingerprint)
            for each in node.load.adapters
        )
        for nodes in (snapshot.prefills, snapshot.decodes)
    )
    counts, chosen = prefill + decode, dict[str, str]()
    for name, adapter in counts:  # in the order of loading
        num_known = counts[name, chosen.get(name, adapter)]
        if prefill[name, adapter] and decode[name, adapter] and counts[name, adapter] >= num_known:
            chosen[name] = adapter
    return chosen


@dataclass(frozen=True, slots=True)
class _Outlook:
    """The model and health of the cluster at one version of the roster."""

    version: int
    fingerprint: str | None
    health: Health


class Cluster:
    """The nodes and the model that they serve. All methods but `run` return immediately.

    Raises:
        ConfigInvalid: The tokenizer directory cannot be read, or the link key cannot be derived.

    Attributes:
        members: The members applied last; before that, the listed nodes.
        known: Cached prefixes of all nodes and their tiers.
        on_node_up: Called when a node may have come up.
        last_model: The model that is served, or was served last; None before the first.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.roster, self.known = Roster(), KnownPrefixes()
        self.local_prefill_threshold = config.local_prefill_threshold
        self.on_node_up: Callable[[], None] = lambda: None
        self._tls = config.node_tls()
        on_node_up = lambda: self.on_node_up()  # noqa: E731, PLW0108 - set later
        self._watcher = Watcher(config, self.roster, on_node_up)
        # Clients' keys are not sent to nodes: any process listening at a node's address could read them.
        key = reader_key(operator_key(config.cluster_secret))
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._name = config.served_model_name
        self._has_defaults = config.generation_config == "auto"
        self._fingerprint = ""
        self._outlook = _Outlook(-1, None, Health(is_serving=False, detail=""))
        self.last_model: ServedModel | None = None
        self._was_serving = False
        self._added: asyncio.Queue[Node] = asyncio.Queue()
        self.members = Members(members=listed_members(config))
        self.apply(self.members)

    async def run(self) -> None:
        """Watch every node until cancelled."""
        connector = aiohttp.TCPConnector(limit=0, ssl=self._tls)
        async with (
            aiohttp.ClientSession(connector=connector, headers=self._headers) as session,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(self._check_often())
            while True:
                node = await self._added.get()
                tasks.create_task(self._watch(node, session))

    def apply(self, members: Members) -> None:
        """Use these nodes from now on, and stop using all others."""
        self.members = members
        for member in members.members:
            self._add(member)
        urls = {member.url for member in members.members}
        for node in self.roster:
            if node.url not in urls:
                node.leave(hands_over=node.url in members.handing_over)
        self.on_node_up()  # a node that was leaving may have become a member again

    @property
    def prefills(self) -> list[Node]:
        """The current prefill nodes."""
        return self.roster.of_role("prefill")

    @property
    def decodes(self) -> list[Node]:
        """The current decode nodes."""
        return self.roster.of_role("decode")

    def node(self, url: str) -> Node:
        """Return the node at this URL; a forgotten node looks like one that was never reached."""
        return self.roster.find(url) or Node(url, "")

    def view(self, url: str) -> NodeSnapshot:
        """Return the current snapshot of the node at this URL."""
        return self.roster.view(url) or Node(url, "").snapshot()

    @property
    def is_serving(self) -> bool:
        """Whether a pair can serve now."""
        return self.health().is_serving

    @property
    def num_streams(self) -> int:
        """Number of generations that this edge worker runs."""
        return sum(node.in_flight_requests for node in self.decodes)

    def snapshot(self) -> ClusterSnapshot:
        """Return the current snapshot of all nodes. It is the same object until a node changes."""
        return self.roster.snapshot()

    def servable(self) -> ClusterSnapshot:
        """Return the nodes to choose a pair from, with decode nodes in place of missing prefill nodes."""
        return with_stand_ins(self.snapshot(), self.local_prefill_threshold)

    def fingerprint(self) -> str:
        """Return the fingerprint of the model served now. Raises `NoNodeAvailable`."""
        outlook = self._refresh_outlook()
        if outlook.fingerprint is None:
            raise NoNodeAvailable(outlook.health.detail)
        if outlook.fingerprint != self._fingerprint:
            log.info("cluster.serves", fingerprint=outlook.fingerprint, before=self._fingerprint)
            self._fingerprint = outlook.fingerprint
        return outlook.fingerprint

    def health(self) -> Health:
        """Return whether a pair can serve now, and what is missing."""
        return self._refresh_outlook().health

    def model(self) -> ServedModel:
        """Return the model served now. Raises `NoNodeAvailable`."""
        self.fingerprint()
        assert self.last_model is not None
        return self.last_model

    def clients(self) -> Mapping[str, EngineClient]:
        """Return the clients of the nodes with the model served now, by role and URL. Raises `NoNodeAvailable`."""
        fingerprint = self.fingerprint()
        return {
            f"{node.role} {node.url}": node.client
            for node in self.roster
            if node.client is not None and node.info is not None
            if node.info.model.fingerprint == fingerprint
        }

    def tier_blocks(self) -> dict[str, int]:
        """Return the number of known blocks by tier name; a shared store counts once."""
        blocks: dict[str, int] = {}
        counted = set[str]()
        for node in self.roster:
            known = node.prefixes.num_blocks if node.prefixes else {}
            for (name, store), num_blocks in known.items():
                blocks[name] = blocks.get(name, 0) + (0 if store in counted else num_blocks)
                counted |= {store} - {""}
        return blocks

    def _add(self, member: Member) -> None:
        node = self.roster.find(member.url)
        if node is None:
            node = Node(
                member.url, member.role, on_change=self.roster.note_change, known=self.known
            )
            self.roster.add(node)
            self._added.put_nowait(node)
        node.join(member)

    async def _watch(self, node: Node, session: aiohttp.ClientSession) -> None:
        await self._watcher.watch(node, session)
        if node.prefixes is not None:
            node.prefixes.forget()
        self.roster.remove(node)
        log.info("node.forgotten", role=node.role, url=node.url)
        # While its link was being closed, it may have become a member again.
        self.apply(self.members)

    async def _check_often(self) -> None:
        while True:
            self._watcher.check_hung()
            self._refresh_outlook()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _refresh_outlook(self) -> _Outlook:
        self.roster.refresh()
        if self._outlook.version != self.roster.version:
            snapshot = self.roster.snapshot()
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
            weight_version=model.weight_version,
            adapters=servable_adapters(self.servable(), fingerprint),
        )
