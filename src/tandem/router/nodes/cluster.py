"""The nodes of a cluster in one edge worker, and the models that they serve.

```
 parent's Members ──apply──▶ Roster ──▶ state ──by the model that each node reports──▶ Fleet ──▶ model, health
                               ▲                                                     └──▶ Fleet ──▶ ...
                 Watcher ──────┘ one task per node
```

The parent process owns the membership (`membership.py`). `pairing.py` chooses the nodes of a request, and `request.py` runs
it.

Every request compares all nodes, and busy engines report their load five times a second. To stay fast with hundreds of
nodes, the roster updates only what depends on the nodes that have changed.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import aiohttp

from tandem.frontend.backend import Health
from tandem.router.config import RouterConfig
from tandem.router.membership.membership import Member, Members, listed_members
from tandem.router.nodes.fleet import Fleet, explain
from tandem.router.nodes.node import Node
from tandem.router.nodes.prefixes import KnownPrefixes
from tandem.router.nodes.state import ClusterState
from tandem.router.nodes.watch import Watcher
from tandem.telemetry.log import get_logger
from tandem.wire.errors import NoNodeAvailable
from tandem.wire.keys import operator_key, reader_key
from tandem.wire.messages import NodeInfo

log = get_logger(__name__)

# Interval of checks for hung engines and for a change of the cluster's health.
CHECK_INTERVAL_S = 1.0
# How long a model is remembered after its last node was removed: nodes that are replaced return within this time.
FORGET_S = 60.0


class Roster:
    """The nodes by URL, in the order in which they were added.

    Attributes:
        version: Increases with every change other than load: members, whether and why they are up or put aside,
            and the models that they serve. Current after `state`.
        on_change: Called at every change of any node.
    """

    def __init__(self) -> None:
        self.version = 0
        self.on_change: Callable[[], None] = lambda: None
        self._nodes: dict[str, Node] = {}
        # Nodes with a changed entry, by URL. True: only their counts have changed.
        self._changed: dict[str, bool] = {}
        self._outlines: dict[str, tuple[object, ...]] = {}
        self._state = ClusterState(prefills=(), decodes=())

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
        self.note_change(node, only_counts=False)

    def remove(self, node: Node) -> None:
        """Forget a node."""
        del self._nodes[node.url]
        self.note_change(node, only_counts=False)

    def note_change(self, node: Node, only_counts: bool) -> None:
        """Note that a node's entry has changed.

        Args:
            only_counts: Whether only its counts of requests and tokens have changed.
        """
        self._changed[node.url] = only_counts and self._changed.get(node.url, True)
        self.on_change()

    def state(self) -> ClusterState:
        """Return all nodes with a known role. It is the same object until `version` increases."""
        if self._changed:
            self._refresh()
        if self._state.version != self.version:
            self._state = ClusterState(
                prefills=tuple(node.entry for node in self.of_role("prefill")),
                decodes=tuple(node.entry for node in self.of_role("decode")),
                version=self.version,
            )
        return self._state

    def _refresh(self) -> None:
        """Update what is computed from the entries that have changed."""
        # Adapters that all nodes have share their candidates.
        all_candidates = set(self._state.candidates.values())
        for url, only_counts in self._changed.items():
            node = self._nodes.get(url)
            if not only_counts:
                self._refresh_outline(url, node)
            if node is not None:
                node.entry.weigh()
                for candidates in all_candidates:
                    candidates.put(node.entry)
        self._changed.clear()

    def _refresh_outline(self, url: str, node: Node | None) -> None:
        outline = _outline(node)
        if outline != self._outlines.get(url):
            self.version += 1
            self._outlines[url] = outline
        if node is None:
            del self._outlines[url]


def _outline(node: Node | None) -> tuple[object, ...]:
    """Return the properties of a node that change rarely. A node that was added again has a different entry."""
    if node is None:
        return ()
    entry = node.entry
    model, limit = (node.info.model, node.info.max_prompt_tokens) if node.info else (None, 0)
    shown = entry.role, entry.is_up, entry.is_aside, entry.reason
    return (entry, *shown, model, limit, entry.load.adapters)


class Cluster:
    """The nodes and the models that they serve. All methods but `run` return immediately.

    Raises:
        ConfigInvalid: The tokenizer directory cannot be read, or the link key cannot be derived.

    Attributes:
        members: The members applied last; before that, the listed nodes.
        known: Cached prefixes of all nodes and their tiers.
        on_node_up: Called when a node may have come up.
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
        self._is_one_model = config.is_one_model
        self._new_fleet = partial(Fleet, config, self.roster, self.state, self._watcher.tokenizer)
        # At least one: the first model that a node reports becomes that of the first fleet.
        self._fleets, self._assigned_version = [self._new_fleet()], -1
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

    @property
    def is_serving(self) -> bool:
        """Whether a pair can serve now."""
        return self.health().is_serving

    @property
    def num_streams(self) -> int:
        """Number of generations that this edge worker runs."""
        return sum(node.entry.in_flight_requests for node in self.decodes)

    def state(self) -> ClusterState:
        """Return all nodes, each of which has been assigned to a fleet."""
        state = self.roster.state()
        if self._assigned_version != state.version:
            self._assigned_version = state.version
            self._assign_nodes()
        return state

    @property
    def fleets(self) -> Sequence[Fleet]:
        """The fleet of each model: at least one, which has no names before a node is reached."""
        self.state()
        return self._fleets

    def fleet(self, model: str) -> Fleet:
        """Return the fleet of a model by one of its names.

        An empty name, or any name while there is one fleet, means any model that a pair can serve.

        Raises:
            NoNodeAvailable: No node serves this model any more.
        """
        fleets = self.fleets
        if len(fleets) == 1:
            return fleets[0]
        for fleet in fleets:
            if model in fleet.names or (not model and fleet.health().is_serving):
                return fleet
        raise NoNodeAvailable(self.health().detail)

    def health(self) -> Health:
        """Return whether a pair can serve a model now, and what is missing for each model."""
        fleets = self.fleets
        if len(fleets) == 1:
            return fleets[0].health()
        healths = {fleet.name: fleet.health() for fleet in fleets}
        is_serving = any(health.is_serving for health in healths.values())
        if not is_serving and any(fleet.is_unmatched for fleet in fleets):
            return explain(self.state(), None)
        return Health(
            is_serving=is_serving,
            detail="; ".join(f"{name}: {health.detail}" for name, health in healths.items()),
        )

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
            self._forget_fleets()
            for fleet in self.fleets:
                fleet.refresh()
            await asyncio.sleep(CHECK_INTERVAL_S)

    def _assign_nodes(self) -> None:
        """Assign each node to the fleet of its fingerprint, or else of its model's name, or else to a new one."""
        nodes: dict[Fleet, dict[str, NodeInfo]] = {fleet: {} for fleet in self._fleets}
        known = {fleet.last_fingerprint: fleet for fleet in self._fleets if fleet.last_fingerprint}
        for node in self.roster:
            if node.info is None:
                continue
            model = node.info.model
            fleet = known.get(model.fingerprint) or self._fleet_for(model.name, nodes)
            fleet.names = fleet.names or (model.name,)
            known[model.fingerprint] = fleet
            nodes.setdefault(fleet, {})[node.url] = node.info
        self._fleets = sorted(nodes, key=lambda fleet: fleet.names)
        reached = frozenset(url for urls in nodes.values() for url in urls)
        roles = {fleet: {info.role for info in own.values()} for fleet, own in nodes.items()}
        for fleet, own in nodes.items():
            fleet.assign(list(own.values()), reached - own.keys())
            fleet.is_unmatched = roles[fleet] == {"decode"} and {"prefill"} in roles.values()

    def _fleet_for(self, name: str, fleets: Iterable[Fleet]) -> Fleet:
        for fleet in fleets:
            if self._is_one_model or not fleet.names or name in fleet.names:
                return fleet
        return self._new_fleet()

    def _forget_fleets(self) -> None:
        """Forget models without nodes after `FORGET_S`, while there are others."""
        for fleet in self._fleets:
            fleet.absent_s = 0.0 if fleet.has_nodes else fleet.absent_s + CHECK_INTERVAL_S
        kept = [fleet for fleet in self._fleets if fleet.absent_s < FORGET_S]
        if kept and len(kept) < len(self._fleets):
            self._fleets = kept
            self._assign_nodes()
