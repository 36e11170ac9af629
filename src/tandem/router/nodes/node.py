"""One node in one edge worker: its address, its state, and the requests that this process runs on it.

```
 unreachable ──connect──▶ connecting ──engine answers──▶ up ──reports a drain──▶ draining
      ▲                                                   │
      └──────────── link lost · new epoch ────────────────┘
 any ──leave──▶ leaving: no new requests ──▶ forgotten when this process runs nothing on it
```

A node that fails several requests in a row is put aside for a while. Otherwise a node that fails every request
immediately would always have the lowest load, and would attract all requests:

```
 in use ──3 failures in a row──▶ aside, 5 s ──▶ tried again ──one more──▶ aside, 10 s ... 60 s ──▶ ...
    ▲                               │               │
    └────────── a successful request ───────────────┘
```

While it is aside, it gets requests only if no other node is left.
"""

import asyncio
from collections.abc import Callable

from tandem.frontend.text.tokenizer import Tokenizer
from tandem.router.config import host_of
from tandem.router.membership.membership import Member
from tandem.router.nodes.prefixes import KnownPrefixes, NodePrefixes
from tandem.router.nodes.state import RosterEntry
from tandem.telemetry.log import get_logger
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat, tcp_address
from tandem.wire.engine_client import EngineClient
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
from tandem.wire.token_stream import Start, TokenStream

log = get_logger(__name__)

_NO_LOAD = NodeLoad()
ROLES = frozenset({"prefill", "decode"})
DRAINING = "is draining"
# Error codes that are a node's own fault, not that of a request, of its partner or of a broken link.
_FAULTS = frozenset({EngineFailed.code, TransferFailed.code, KVCorrupted.code})
# More than two, so that one bad request and its replay on the same node do not put it aside.
_MAX_IN_A_ROW = 3
_FIRST_PAUSE_S, _LAST_PAUSE_S = 5.0, 60.0


class NodeUnusable(Exception):
    """A node cannot be used now; the message is the reason."""


class FailureCount:
    """Failed requests of a node since its start: in total, and since its last successful request."""

    def __init__(self) -> None:
        self.num_failed = self.num_in_a_row = 0
        self.pause_s = 0.0
        self._aside_until_s = 0.0

    def record_failure(self, error: TandemError, num_failed_before: int, now_s: float) -> bool:
        """Count a failed request; return whether the node is now put aside.

        Args:
            num_failed_before: `num_failed` when the request started. If another request has failed since, both may
                have failed in the same step, and only the first counts.
        """
        if error.code not in _FAULTS or num_failed_before != self.num_failed:
            return False
        self.num_failed += 1
        self.num_in_a_row += 1
        if self.num_in_a_row < _MAX_IN_A_ROW:
            return False
        self.pause_s = min(max(2 * self.pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
        self._aside_until_s = now_s + self.pause_s
        return True

    def record_success(self) -> None:
        """Count a successful request."""
        self.num_in_a_row, self.pause_s = 0, 0.0

    def is_aside(self, now_s: float) -> bool:
        """Return whether other nodes are preferred now."""
        return self.num_in_a_row >= _MAX_IN_A_ROW and now_s < self._aside_until_s


class NodeWork:
    """An attempt, or one half of it, on one node: its stream and its share of the node's load.

    Its owner must call `release`.

    Args:
        num_to_compute: Prompt tokens that the decode node computes itself.
    """

    def __init__(
        self, node: "Node", stream: TokenStream, num_tokens: int, num_to_compute: int = 0
    ) -> None:
        self.stream = stream
        self._node, self._num_tokens, self._num_to_compute = node, num_tokens, num_to_compute
        self.is_counted, self.is_finished = True, False
        self._num_failed_before = node.failures.num_failed
        node.count(1, num_tokens)
        if num_to_compute:
            node.count_backlog(num_to_compute)

    def finish_prompt(self) -> None:
        """Count the prompt as computed. Safe to call twice."""
        if self._num_to_compute:
            self._node.count_backlog(-self._num_to_compute)
            self._num_to_compute = 0

    def finish(self) -> None:
        """Release the share of a half that is done. Its later messages no longer call `on_change`. Safe to call twice."""
        if not self.is_finished:
            self.is_finished = True
            self._node.record_outcome(self.stream.failure, self._num_failed_before)
            self.stream.ignore_changes()
            self._release_share()

    def release(self) -> None:
        """Release the share. Cancels the request at the engine unless it `is_finished`. Safe to call twice."""
        if self.is_finished:
            self.stream.forget()
        elif self.is_counted and not self.stream.is_open:  # an open stream is cancelled: no outcome
            self._node.record_outcome(self.stream.failure, self._num_failed_before)
        self.stream.close()
        self._release_share()

    def _release_share(self) -> None:
        self.finish_prompt()
        if self.is_counted:
            self.is_counted = False
            self._node.count(-1, -self._num_tokens)
            # The error shows the node's drain before its next load report does. A peer's drain has a different code.
            if self.stream.failure is not None and self.stream.failure.code == NodeDraining.code:
                self._node.note_draining()


class Node:
    """The node at one URL, across restarts of its process.

    Args:
        on_change: Called when `entry` has changed. Gets the node, and whether only its counts of requests and tokens
            have changed.
        known: Cached prefixes of all nodes and their tiers.

    Attributes:
        entry: What admission and pairing know of it.
        host: Host of its URL; its engine and bootstrap ports are on the same host.
        role: Role that it last reported; before that, the role of the member, which may be empty.
        info: Its last /server_info; None until it is reached.
        reason: Why it is not used; empty if nothing is wrong.
        is_admitted: Whether its last /server_info was that of a healthy node that accepts requests.
        leaving: Set while it is being removed.
        idle: Set while this process runs nothing on it.
        trouble: Set when its link is lost or it drains, so that it must be polled over HTTP.
        failures: Failed requests since its process started.
        prefixes: Cached prefixes since its process started, tiers included; None until it is connected.
        is_proven: Whether its KV is known to be compatible with that of other nodes; see `canary.py`.
    """

    def __init__(
        self,
        url: str,
        role: str,
        bootstrap_port: int | None = None,
        on_change: "Callable[[Node, bool], None]" = lambda _node, _only_counts: None,
        known: KnownPrefixes | None = None,
    ) -> None:
        self.url, self.host, self.role = url, host_of(url), role
        self.entry = RosterEntry(url, role)
        self.info: NodeInfo | None = None
        self.client: EngineClient | None = None
        self.tokenizer: Tokenizer | None = None
        self.reason = "not reached yet"
        self.is_admitted = self.is_proven = False
        self.leaving, self.idle, self.trouble = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.idle.set()
        self._member = Member(url, role, bootstrap_port)
        self._on_change = on_change
        self.prefixes: NodePrefixes | None = None
        self.failures = FailureCount()
        self._known = KnownPrefixes() if known is None else known
        # Prompt tokens of this edge worker that wait to be computed here.
        self._own_backlog_tokens = 0
        self._update()

    # ── membership ───────────────────────────────────────────────────────────────────────────────

    def join(self, member: Member) -> None:
        """Make the node a member, or update its member."""
        if self.leaving.is_set():
            self.leaving.clear()
            log.info("node.added_again", role=self.role, url=self.url)
        elif member == self._member:
            return
        self._member = member
        if self.info is None:
            self.role = member.role
        self.changed()

    def leave(self, *, hands_over: bool) -> None:
        """Start no more requests on this node.

        Args:
            hands_over: Whether to end its running requests with `NodeDraining`, so that other nodes continue them.
        """
        if not self.leaving.is_set():
            self.leaving.set()
            num = self.entry.in_flight_requests
            log.info("node.leaving", role=self.role, url=self.url, in_flight_requests=num)
        if hands_over and self.client is not None:
            why = f"{self.role} node {self.url} was removed"
            self.client.stop(lambda: NodeDraining(why))
        self.changed()

    @property
    def bootstrap_port(self) -> int | None:
        """The port where it listens for grants: configured, or else reported by the node."""
        reported = self.info.bootstrap_port if self.info else None
        return self._member.bootstrap_port or reported

    @property
    def zone(self) -> str:
        """Its zone: reported by the node, or else named by its source."""
        reported = self.info.zone if self.info else ""
        return reported or self._member.zone

    @property
    def source(self) -> str:
        """The source that named it, for operators."""
        return self._member.source

    # ── state ────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_up(self) -> bool:
        """Whether it can serve requests now."""
        is_available = self.is_admitted and not self.leaving.is_set()
        return is_available and self.client is not None and self.client.is_up

    @property
    def is_aside(self) -> bool:
        """Whether it is put aside now because it failed several requests in a row."""
        has_failed = bool(self.failures.num_in_a_row)
        return has_failed and self.failures.is_aside(asyncio.get_running_loop().time())

    @property
    def state(self) -> str:
        """`leaving`, `draining`, `up` or `down`."""
        if self.leaving.is_set():
            return "leaving"
        if self.reason == DRAINING:
            return "draining"
        return "up" if self.is_up else "down"

    @property
    def shown_reason(self) -> str:
        """Why it is not used, for operators."""
        return "was removed" if self.leaving.is_set() else self.reason

    @property
    def load(self) -> NodeLoad:
        """Its last load report."""
        return self.client.load if self.client is not None else _NO_LOAD

    def note(self, *, is_admitted: bool | None = None, reason: str | None = None) -> None:
        """Update the state; None leaves a value unchanged."""
        self.is_admitted = self.is_admitted if is_admitted is None else is_admitted
        self.reason = self.reason if reason is None else reason
        self.changed()

    def note_draining(self) -> None:
        """Record that it accepts no more requests, as it reported over its link."""
        self.trouble.set()
        self.note(is_admitted=False, reason=DRAINING)

    def changed(self) -> None:
        """Update the entry after a change of anything but the counts of requests and tokens."""
        self._update()
        self._on_change(self, False)

    def _update(self) -> None:
        entry, load = self.entry, self.load
        if load is not entry.load:
            # A report includes the backlog of all edge workers. It may be older than this worker's own count.
            entry.load, entry.fresh_tokens = load, 0
            entry.backlog_tokens = max(load.queued_tokens, self._own_backlog_tokens)
        entry.role, entry.is_up, entry.is_aside = self.role, self.is_up, self.is_aside
        entry.reason, entry.zone = self.shown_reason, self.zone
        if self.info is not None:
            entry.fingerprint = self.info.model.fingerprint
            entry.takes_prompts = self.info.takes_prompts
        if self.prefixes is not None:
            entry.prefixes, entry.tiers = self.prefixes.cached, self.prefixes.tiers

    def _counts_changed(self) -> None:
        if self.failures.num_in_a_row:  # the pause of a node that is put aside may be over
            self.changed()
        else:
            self._on_change(self, True)

    def _link_changed(self) -> None:
        if self.client is not None and self.client.lost.is_set():
            self.trouble.set()
        elif self.is_admitted and self.load.is_draining:
            self.note_draining()
        if self._is_unchanged():
            self.entry.load = self.load
        else:
            self.changed()

    def _is_unchanged(self) -> bool:
        """Return whether a new load report repeats the last one, as it does for most nodes of a large cluster.

        A node that is put aside counts as changed, because its pause may be over.
        """
        entry = self.entry
        is_used = entry.in_flight_requests or entry.fresh_tokens or self._own_backlog_tokens
        is_same = entry.load == self.load and entry.is_up == self.is_up
        return is_same and not is_used and not entry.is_aside

    def validate(self, info: NodeInfo) -> None:
        """Reject an unusable node, and adopt the role that it reports. Raises `NodeUnusable`."""
        if info.role not in ROLES:
            raise NodeUnusable(f"is a {info.role} node, not a prefill or decode node")
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
            raise NodeUnusable("reports no bootstrap port: put the port after its URL")

    def connect(
        self, info: NodeInfo, key: ChannelKey | None, heartbeat: Heartbeat = DEFAULT_HEARTBEAT
    ) -> EngineClient | None:
        """Adopt a node's /server_info; return a new client for the caller to run, if one is needed.

        A new client replaces a lost one or that of the node's previous process, whose streams end with `PeerLost`.
        """
        is_same_life = self.info is not None and self.info.epoch == info.epoch
        self.info = info
        if self.client is not None:
            if is_same_life and not self.client.lost.is_set():
                self.changed()
                return None
            self.client.stop()
        _warn_of_heartbeat(self.url, info.heartbeat_interval_ms, 1000 * heartbeat.interval_s)
        if not is_same_life or self.prefixes is None:
            self.failures = FailureCount()
            # Not before its adapters are loaded, and the canary has passed.
            self.is_admitted = False
            # Our own engine reads and writes KV in the one layout that the fingerprint names.
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
        self.changed()
        return self.client

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    def start(
        self, start: Start, on_change: Callable[[], None], num_to_compute: int = 0
    ) -> NodeWork:
        """Start an attempt on this node, or one half of it.

        Args:
            on_change: Called when its stream has a new delta or failure. Must not raise.
            num_to_compute: Prompt tokens that the node computes itself, in an attempt on this node alone.

        Raises:
            PeerLost: The node was lost after it had been chosen.
        """
        if self.client is None:
            raise PeerLost(f"{self.role} node {self.url} was lost")
        stream = self.client.generate(start, on_change)
        return NodeWork(self, stream, len(start.request.prompt_ids), num_to_compute)

    def record_outcome(self, failure: TandemError | None, num_failed_before: int) -> None:
        """Record how a request on this node ended; see `FailureCount.record_failure`."""
        failures, now_s = self.failures, asyncio.get_running_loop().time()
        if failure is None:
            if failures.num_in_a_row:
                failures.record_success()
                self.changed()
            return
        if failures.record_failure(failure, num_failed_before, now_s):
            log.warning(
                "node.put_aside",
                role=self.role,
                url=self.url,
                num_in_a_row=failures.num_in_a_row,
                error=failure.code,
                pause_s=failures.pause_s,
            )
        self.changed()

    def count(self, num_requests: int, num_tokens: int) -> None:
        """Count started requests and their prompt tokens; negative numbers count ended ones."""
        entry = self.entry
        entry.in_flight_requests += num_requests
        entry.in_flight_tokens += num_tokens
        if entry.in_flight_requests:
            self.idle.clear()
        else:
            self.idle.set()
            entry.fresh_tokens = 0  # the requests behind these tokens have ended
        self._counts_changed()

    def count_backlog(self, num_tokens: int) -> None:
        """Count prompt tokens of this edge worker that the node must compute; negative: has computed.

        This edge worker counts its own, so that they disappear with the first token and not with the next load report.
        """
        self._own_backlog_tokens += num_tokens
        self.entry.backlog_tokens += num_tokens
        self._counts_changed()

    def count_fresh(self, num_tokens: int) -> None:
        """Count tokens sent to this node, until its next load report."""
        self.entry.fresh_tokens += num_tokens
        self._counts_changed()


def halves(
    request: GenerateRequest, prefill: Node, attempt: int
) -> tuple[StartDecode, StartPrefill]:
    """Return the two halves of an attempt, which meet in a new room."""
    room = new_room()
    if prefill.bootstrap_port is None:
        raise PeerLost(f"prefill node {prefill.url} no longer reports a bootstrap port")
    decode = StartDecode(
        request=request,
        room=room,
        bootstrap_host=prefill.host,
        bootstrap_port=prefill.bootstrap_port,
        attempt=attempt,
    )
    return decode, StartPrefill(request=request, room=room, attempt=attempt)


def _warn_of_heartbeat(url: str, reported_ms: float, own_ms: float) -> None:
    """Warn if the two ends have different heartbeats: one may then take the other for lost too early."""
    if reported_ms not in {0.0, own_ms}:
        log.warning(
            "node.heartbeat_differs",
            url=url,
            node_ms=reported_ms,
            router_ms=own_ms,
            action="set the same --heartbeat-interval-ms everywhere",
            see="docs/replay.md#how-soon-a-loss-is-noticed",
        )
