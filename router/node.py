"""One node as the router sees it: its address, its life, and what this process runs on it.

```
 unreachable ──meet──▶ connecting ──engine answers──▶ up ──reports it──▶ draining
      ▲                                                │
      └──────── connection broke · other epoch ────────┘
 any ──leave──▶ leaving: takes nothing new ──▶ forgotten, when nothing of this process runs on it
```

A node that fails again and again what it is given is put aside for a while. It has nothing to do when it fails at once,
and by its load would be given every request:

```
 in use ──3 failures in a row──▶ aside, 5 s ──▶ tried again ──one more──▶ aside, 10 s ... 60 s ──▶ ...
    ▲                               │               │
    └──────── a request that ends well ─────────────┘        (where no other node is left)
```
"""

import asyncio
from collections.abc import Callable

from tandem.frontend.engine_client import EngineClient
from tandem.frontend.token_stream import Start, TokenStream
from tandem.frontend.tokenizer import Tokenizer
from tandem.router.config import host_of
from tandem.router.membership import Member
from tandem.router.policy import NodeSnapshot
from tandem.router.prefixes import NOTHING_CACHED, KnownPrefixes, NodePrefixes
from tandem.telemetry.log import get_logger
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat, tcp_address
from tandem.wire.errors import (
    EngineFailed,
    KVCorrupted,
    NodeDraining,
    PeerLost,
    TandemError,
    TransferFailed,
)
from tandem.wire.generation import Epoch, GenerateRequest, new_room
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import OWN_ENGINE, NodeInfo, NodeLoad, StartDecode, StartPrefill

log = get_logger(__name__)

_NO_LOAD = NodeLoad()
ROLES = frozenset({"prefill", "decode"})
DRAINING = "is draining"
# Faults of a node, by their codes: not of a request, of the other node, or of a link that broke.
_FAULTS = frozenset({EngineFailed.code, TransferFailed.code, KVCorrupted.code})
# A request that breaks a step once, and its replay on the same node, are no reason.
_MOST_IN_A_ROW = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 5.0, 60.0


class NodeUnusable(Exception):
    """A node cannot be used now; the message is why, for people."""


class Standing:
    """How often one life of a node failed what it was given: ever, and since a request ended well."""

    def __init__(self) -> None:
        self.num_failed = self.num_in_a_row = 0
        self.pause_s = 0.0
        self._aside_until_s = 0.0

    def failed(self, error: TandemError, num_failed_before: int, now_s: float) -> bool:
        """Count a request that failed; return whether the node is put aside for that.

        Args:
            num_failed_before: `num_failed` when the request began. One that ran as another failed may have
                failed with it, in the same step, and is not counted.
        """
        if error.code not in _FAULTS or num_failed_before != self.num_failed:
            return False
        self.num_failed += 1
        self.num_in_a_row += 1
        if self.num_in_a_row < _MOST_IN_A_ROW:
            return False
        self.pause_s = min(max(2 * self.pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
        self._aside_until_s = now_s + self.pause_s
        return True

    def served(self) -> None:
        """Count a request that ended well."""
        self.num_in_a_row, self.pause_s = 0, 0.0

    def is_aside(self, now_s: float) -> bool:
        """Tell whether other nodes are to be preferred now."""
        return self.num_in_a_row >= _MOST_IN_A_ROW and now_s < self._aside_until_s


class Work:
    """One half of an attempt, or all of it: its stream, and its share of the node's load until its owner ends it.

    Args:
        num_to_compute: Prompt tokens that decode computes by itself.
    """

    def __init__(
        self, node: "Node", stream: TokenStream, num_tokens: int, num_to_compute: int = 0
    ) -> None:
        self.stream = stream
        self._node, self._num_tokens, self._num_to_compute = node, num_tokens, num_to_compute
        self.is_counted, self.is_done = True, False
        self._num_failed_before = node.standing.num_failed
        node.count(1, num_tokens)
        if num_to_compute:
            node.count_own(num_to_compute)

    def prompt_done(self) -> None:
        """Count the prompt as computed. Safe to call twice."""
        if self._num_to_compute:
            self._node.count_own(-self._num_to_compute)
            self._num_to_compute = 0

    def done(self) -> None:
        """Its part is done: give the share back. What still arrives wakes nobody. Safe to call twice."""
        if not self.is_done:
            self.is_done = True
            self._node.fared(self.stream.failure, self._num_failed_before)
            self.stream.mute()
            self._give_back()

    def end(self) -> None:
        """Give the share back. Cancels at the engine unless it `is_done`. Safe to call twice."""
        if self.is_done:
            self.stream.forget()
        elif self.is_counted and not self.stream.is_open:  # else another ended it
            self._node.fared(self.stream.failure, self._num_failed_before)
        self.stream.close()
        self._give_back()

    def _give_back(self) -> None:
        self.prompt_done()
        if self.is_counted:
            self.is_counted = False
            self._node.count(-1, -self._num_tokens)
            # Sooner than its load reports it; a peer's drain comes with another code.
            if self.stream.failure is not None and self.stream.failure.code == NodeDraining.code:
                self._node.note_draining()


class Node:
    """A node at one URL, over all of its lives.

    Args:
        on_change: Called with the node when what `snapshot` returns may have changed.
        known: What all nodes have cached, and behind that.

    Attributes:
        host: The host of its URL: its other ports are there too.
        role: As it last reported; until then as given, empty to take what it reports.
        info: What it last reported of itself; None until it was reached.
        reason: Why it is not used; empty when nothing is wrong.
        is_admitted: Its last answer was that of a healthy node that takes requests.
        leaving: Set while it is to be forgotten.
        idle: Set while nothing of this process runs on it.
        trouble: Set when its link is lost or it drains: it is to be asked over HTTP.
        prefixes: What this life of it has cached, and behind that; None before it was met.
        is_proven: Whether this life of it understands the KV of others; see `canary.py`.
    """

    def __init__(
        self,
        url: str,
        role: str,
        bootstrap_port: int | None = None,
        on_change: "Callable[[Node], None]" = lambda _node: None,
        known: KnownPrefixes | None = None,
    ) -> None:
        self.url, self.host, self.role = url, host_of(url), role
        self.info: NodeInfo | None = None
        self.client: EngineClient | None = None
        self.tokenizer: Tokenizer | None = None
        self.reason = "not reached yet"
        self.is_admitted = self.is_proven = False
        self.in_flight_requests = 0
        self.in_flight_tokens = 0
        self.leaving, self.idle, self.trouble = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle.set()
        self._member = Member(url, role, bootstrap_port)
        self._on_change = on_change
        self.prefixes: NodePrefixes | None = None
        self.standing = Standing()
        self._known = KnownPrefixes() if known is None else known
        self._fresh_tokens = 0
        # The load that these were started after.
        self._load_before = _NO_LOAD
        # Prompt tokens that wait to be computed here: of this edge worker, and of all others as of the last load.
        self._own_tokens = self._others_tokens = 0
        self._load_counted = _NO_LOAD
        # Each request looks at its nodes several times between two changes.
        self._snapshot: NodeSnapshot | None = None

    # ── its membership ───────────────────────────────────────────────────────────────────────────

    def join(self, member: Member) -> None:
        """Be a member from here on, or stay one."""
        if self.leaving.is_set():
            self.leaving.clear()
            log.info("node.wanted_again", role=self.role, url=self.url)
        elif member == self._member:
            return
        self._member = member
        if self.info is None:
            self.role = member.role
        self.changed()

    def leave(self, *, hands_over: bool) -> None:
        """Take nothing new from here on.

        Args:
            hands_over: End what runs here with `NodeDraining`, so that it goes on elsewhere.
        """
        if not self.leaving.is_set():
            self.leaving.set()
            num = self.in_flight_requests
            log.info("node.leaving", role=self.role, url=self.url, in_flight_requests=num)
        if hands_over and self.client is not None:
            why = f"{self.role} node {self.url} was removed"
            self.client.stop(lambda: NodeDraining(why))
        self.changed()

    @property
    def bootstrap_port(self) -> int | None:
        """Where it listens for grants: as configured, else as it reports."""
        reported = self.info.bootstrap_port if self.info else None
        return self._member.bootstrap_port or reported

    @property
    def zone(self) -> str:
        """Its zone: as it reports, else as the source names it."""
        reported = self.info.zone if self.info else ""
        return reported or self._member.zone

    @property
    def source(self) -> str:
        """The source that named it, for people."""
        return self._member.source

    # ── its state ────────────────────────────────────────────────────────────────────────────────

    @property
    def is_up(self) -> bool:
        """Whether it may be given requests now."""
        is_taken = self.is_admitted and not self.leaving.is_set()
        return is_taken and self.client is not None and self.client.is_up

    @property
    def is_aside(self) -> bool:
        """Whether it failed several requests in a row, the last one a moment ago."""
        failing = self.standing.num_in_a_row
        return bool(failing) and self.standing.is_aside(asyncio.get_running_loop().time())

    @property
    def state(self) -> str:
        """leaving, draining, up or down."""
        if self.leaving.is_set():
            return "leaving"
        if self.reason == DRAINING:
            return "draining"
        return "up" if self.is_up else "down"

    @property
    def shown_reason(self) -> str:
        """Why it is not used, for people."""
        return "was removed" if self.leaving.is_set() else self.reason

    @property
    def load(self) -> NodeLoad:
        """What it last reported over its link."""
        return self.client.load if self.client is not None else _NO_LOAD

    def note(self, *, is_admitted: bool | None = None, reason: str | None = None) -> None:
        """Note what was found out; None leaves what is known."""
        self.is_admitted = self.is_admitted if is_admitted is None else is_admitted
        self.reason = self.reason if reason is None else reason
        self.changed()

    def note_draining(self) -> None:
        """It takes nothing new, as it reported over its link."""
        self.trouble.set()
        self.note(is_admitted=False, reason=DRAINING)

    def changed(self) -> None:
        """Discard the last snapshot: it is out of date."""
        self._snapshot = None
        self._on_change(self)

    def _link_changed(self) -> None:
        if self.client is not None and self.client.lost.is_set():
            self.trouble.set()
        elif self.is_admitted and self.load.is_draining:
            self.note_draining()
        # Of hundreds of nodes most are at rest, and report again what they reported before. One that is put aside
        # is looked at again: its pause may be over.
        seen = self._snapshot
        if seen is None or not self._is_at_rest(seen):
            self.changed()

    def _is_at_rest(self, seen: NodeSnapshot) -> bool:
        """Tell whether it reports what it reported before, as most of hundreds of nodes do.

        One that is put aside is not: its pause may be over.
        """
        is_used = self.in_flight_requests or self._own_tokens or seen.is_aside
        return not is_used and seen.load == self.load and seen.is_up == self.is_up

    def check(self, info: NodeInfo) -> None:
        """Refuse what is no usable node; take the role that it reports. Raises `NodeUnusable`."""
        if info.role not in ROLES:
            raise NodeUnusable(f"is a {info.role} node, not a prefill or a decode")
        if info.role != self.role:
            if self.role:
                log.info("node.role_changed", url=self.url, before=self.role, role=info.role)
            self.role = info.role
            self.changed()
        if info.is_draining:
            raise NodeUnusable(DRAINING)
        if not info.is_healthy:
            raise NodeUnusable("reports that it is not healthy")
        if self.role == "prefill" and not (self._member.bootstrap_port or info.bootstrap_port):
            raise NodeUnusable("reports no bootstrap port: give it behind the URL")

    def meet(
        self, info: NodeInfo, key: ChannelKey | None, heartbeat: Heartbeat = DEFAULT_HEARTBEAT
    ) -> EngineClient | None:
        """Take what the node reports; return a new client, to be run, if this is a new life.

        The client of the life before is stopped, and its streams end with `PeerLost`.
        """
        is_same_life = self.info is not None and self.info.epoch == info.epoch
        self.info = info
        self.changed()
        if self.client is not None:
            if is_same_life and not self.client.lost.is_set():
                return None
            self.client.stop()
        _warn_of_rhythm(self.url, info.heartbeat_interval_ms, 1000 * heartbeat.interval_s)
        if not is_same_life or self.prefixes is None:
            self.standing = Standing()
            # Our own engine writes and reads KV by one layout, which the fingerprint names.
            self.is_proven = info.engine == OWN_ENGINE
            if self.prefixes is not None:
                self.prefixes.forget()
            self.prefixes = self._known.new_life()
        self.client = EngineClient(
            tcp_address(self.host, info.engine_port),
            key,
            Epoch(info.epoch),
            heartbeat,
            self._link_changed,
            prefixes=self.prefixes,
        )
        return self.client

    # ── what runs on it ──────────────────────────────────────────────────────────────────────────

    def start(self, start: Start, wake: asyncio.Event, num_to_compute: int = 0) -> Work:
        """Start an attempt here, or one half of it.

        Args:
            num_to_compute: Of a whole one, how many prompt tokens the node has to compute.

        Raises:
            PeerLost: The node was lost since it was chosen.
        """
        if self.client is None:
            raise PeerLost(f"{self.role} node {self.url} was lost")
        stream = self.client.generate(start, wake)
        return Work(self, stream, len(start.request.prompt_ids), num_to_compute)

    def fared(self, failure: TandemError | None, num_failed_before: int) -> None:
        """Note how a request ended that this node had a part in; see `Standing.failed`."""
        if failure is None:
            if self.standing.num_in_a_row:
                self.standing.served()
                self.changed()
            return
        if self.standing.failed(failure, num_failed_before, asyncio.get_running_loop().time()):
            log.warning(
                "node.put_aside",
                role=self.role,
                url=self.url,
                num_in_a_row=self.standing.num_in_a_row,
                error=failure.code,
                pause_s=self.standing.pause_s,
            )
        self.changed()

    def count(self, num_requests: int, num_tokens: int) -> None:
        """Count what was started here, or with negative numbers what ended."""
        self.in_flight_requests += num_requests
        self.in_flight_tokens += num_tokens
        if self.in_flight_requests:
            self.idle.clear()
        else:
            self.idle.set()
        self.changed()

    def count_own(self, num_tokens: int) -> None:
        """Count prompt tokens that this edge worker has the node compute; negative: that were computed."""
        self.backlog_tokens()
        self._own_tokens += num_tokens
        self.changed()

    def backlog_tokens(self) -> int:
        """Return the prompt tokens that wait to be computed here.

        This edge worker's own are counted, so that they end with the first token and not with the next load.
        Those of others are what exceeds that count when a load comes.
        """
        load = self.load
        if load is not self._load_counted:
            self._load_counted = load
            self._others_tokens = max(0, load.queued_tokens - self._own_tokens)
        return self._own_tokens + self._others_tokens

    def expect(self, num_tokens: int) -> None:
        """Count tokens that were given to this node, until its next load."""
        self._fresh_tokens = self.fresh_tokens() + num_tokens
        self.changed()

    def fresh_tokens(self) -> int:
        """Return the tokens of what was given to this node since it last reported its load."""
        load = self.load
        if load is not self._load_before:
            self._load_before, self._fresh_tokens = load, 0
        return self._fresh_tokens

    def snapshot(self) -> NodeSnapshot:
        """Return the node at this moment. It is the same object until the node changes."""
        if self._snapshot is None:
            self._snapshot = self._look()
        return self._snapshot

    def _look(self) -> NodeSnapshot:
        return NodeSnapshot(
            url=self.url,
            role=self.role,
            is_up=self.is_up,
            is_aside=self.is_aside,
            fingerprint=self.info.model.fingerprint if self.info else "",
            reason=self.shown_reason,
            load=self.load,
            in_flight_requests=self.in_flight_requests,
            in_flight_tokens=self.in_flight_tokens,
            # Without a request of this process here, all that it was given has ended since.
            fresh_tokens=self.fresh_tokens() if self.in_flight_requests else 0,
            zone=self.zone,
            prefixes=self.prefixes.cached if self.prefixes else NOTHING_CACHED,
            tiers=self.prefixes.tiers if self.prefixes else (),
            takes_prompts=self.info is not None and self.info.takes_prompts,
            backlog_tokens=self.backlog_tokens(),
        )


def halves(
    request: GenerateRequest, prefill: Node, attempt: int
) -> tuple[StartDecode, StartPrefill]:
    """Return the two halves of an attempt, which meet in a room of their own."""
    room = new_room()
    if prefill.bootstrap_port is None:
        raise PeerLost(f"prefill node {prefill.url} reports no bootstrap port any more")
    decode = StartDecode(
        request=request,
        room=room,
        bootstrap_host=prefill.host,
        bootstrap_port=prefill.bootstrap_port,
        attempt=attempt,
    )
    return decode, StartPrefill(request=request, room=room, attempt=attempt)


def _warn_of_rhythm(url: str, reported_ms: float, own_ms: float) -> None:
    """Warn where two ends judge each other by other measures: one may give the other up without reason."""
    if reported_ms not in {0.0, own_ms}:
        log.warning(
            "node.heartbeat_differs",
            url=url,
            node_ms=reported_ms,
            router_ms=own_ms,
            action="give all the same --heartbeat-interval-ms",
            see="tandem docs replay#how-soon-a-loss-is-noticed",
        )
