"""Decode's end: grants pages to prefill nodes, and reports when the role may reuse them.

```
 request ─▶ (granted) ─▶ Landed                                          granted → held
                      ├▶ Failed                                          granted → free
                      ├▶ Lost ───────────────▶ Safe    granted → quarantined → free
 withdraw ───────────────────────────────────▶ Safe    granted → quarantined → free
```

The right column shows the state of the pages passed to `request`. After `withdraw` the room's next and
last event is `RoomSafe`, whatever crossed with the withdrawal. A room has one part for each prefill rank
that holds our heads; each part follows the table in `session.py`. `receiver_links.py` manages the links.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import msgspec
from typing_extensions import override

from tandem.kvtransfer.agents.control import ControlThread
from tandem.kvtransfer.agents.receiver_links import PrefillLink, PrefillLinks
from tandem.kvtransfer.checksum import Verify, is_hashed, page_sums
from tandem.kvtransfer.events import (
    LandRooms,
    ReceiverEvent,
    ReceiverTimes,
    RoomFailed,
    RoomLanded,
    RoomLost,
    RoomSafe,
)
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import HeadRange, PagedTokens
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.session import Action, ReceiverState, RoomEvent, Session, receiver_session
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.threads import transport_errors
from tandem.kvtransfer.transports.base import Pool, Transport
from tandem.kvtransfer.transports.registry import listen
from tandem.telemetry.log import get_logger
from tandem.wire import hand_off
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat, Waker
from tandem.wire.errors import (
    Aborted,
    KVCorrupted,
    PeerLost,
    TandemError,
    TransferTimeout,
    error_of_other_half,
)
from tandem.wire.generation import Epoch, Room
from tandem.wire.keys import ChannelKey

log = get_logger("kvtransfer.receiver")


class LandRoom:
    """One request at decode, over all its links.

    Attributes:
        parts: One per link. Once the link of the first part is up, it names the links of the other parts. The
            first part's Landed has the most fields, because its link is to prefill's rank 0 if that rank holds
            heads of ours.
        has_all_parts: Whether the parts after the first have been made.
        granted_s: Time of the first part's grant; None before.
    """

    def __init__(
        self, room: Room, link: PrefillLink, page_ids: Sequence[int], have_tokens: int
    ) -> None:
        self.room, self.page_ids, self.have_tokens = room, page_ids, have_tokens
        self.has_all_parts = False
        self.granted_s: float | None = None
        self.parts = [LandPart(self, 0, link)]

    def add_parts(self, links: Sequence[PrefillLink]) -> list["LandPart"]:
        """Make the parts for all links after the first."""
        self.has_all_parts = True
        new = [LandPart(self, number, link) for number, link in enumerate(links, 1)]
        self.parts += new
        return new

    @property
    def is_over(self) -> bool:
        """Whether every part is over."""
        return all(part.session.is_over for part in self.parts)


@dataclass(eq=False, slots=True)
class LandPart:
    """One room over one link.

    Attributes:
        link: The link to the prefill rank that pushes this part.
        deadline_s: Deadline of the current state.
        has_last_message: Prefill sent Landed or Released; the link's worker revokes and checks the pages.
        landed: Prefill's Landed message, once it has arrived.
    """

    room: LandRoom
    number: int
    link: PrefillLink
    deadline_s: float = float("inf")
    session: Session[ReceiverState] = field(default_factory=receiver_session)
    has_last_message: bool = False
    landed: hand_off.Landed | None = None

    def verify(self, landed: hand_off.Landed, layout: KVLayout, region: MemoryRegion) -> str:
        """Return how the received bytes differ from prefill's checksums, or an empty string."""
        granted = PagedTokens(layout, self.room.page_ids, self.room.have_tokens)
        end_token = landed.end_token or granted.end_token
        if not 0 <= granted.end_token - end_token < layout.page_size:
            return f"tokens up to {end_token} were written, {granted.end_token} were granted"
        first_head = self.link.heads.start
        heads = HeadRange(first_head, first_head, len(self.link.heads))
        sums = page_sums(region, granted, granted, end_token, heads)
        if sums == landed.checksums:
            return ""
        num_bad = sum(a != b for a, b in zip_longest(sums, landed.checksums))
        return f"{num_bad} of {len(sums)} pages differ from what prefill sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTimeouts:
    """How long decode waits for prefill.

    Attributes:
        connect_s: From the offers, and from each ping, to the next message of a prefill that has not sent Welcome.
        landed_s: From the grant to the checked pages: prefill's queue, its forward, the push and the check.
        released_s: From a Withdraw to its answer. A prefill that does not answer in time loses its link, and
            all rooms on it.
        heartbeat: Heartbeat settings of the links.
    """

    connect_s: float = 5.0
    landed_s: float = 120.0
    released_s: float = 10.0
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT


class ReceiverStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of a decode agent. Each part of a room counts.

    Attributes:
        num_refused: Writes outside a grant, and invalid messages from prefill nodes.
        ending_s: See `OpenRooms.ending_s`.
    """

    num_links: int
    num_reserving: int
    num_granted: int
    num_withdrawn: int
    num_fencing: int
    num_landed: int
    num_failed: int
    num_corrupted: int
    num_refused: int
    received_bytes: int
    saved_bytes: int
    ending_s: float = 0.0


class DecodeAgent:
    """The receiving end of every room of one decode rank.

    Only one thread, the role's loop, may call `request`, `withdraw` and `events`; none of them blocks.
    Any thread may call `statistics`.

    Args:
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        layout: Layout of the pool in `region`.
        transports: Allowed transports, best first.
        waker: Woken whenever `events` has an event.
        key: The cluster's secret, which proves to prefill nodes that this node may connect.
        shard: This rank's share of the heads; it links to the prefill ranks that hold them.
        verify: Whether to verify prefill's checksums, if it sends any.

    Attributes:
        times: Histograms of hand-off times.

    Raises:
        ConfigInvalid: No allowed transport can write this pool.
    """

    def __init__(
        self,
        *,
        epoch: Epoch,
        fingerprint: str,
        layout: KVLayout,
        region: MemoryRegion,
        transports: Sequence[Transport],
        waker: Waker,
        key: ChannelKey | None = None,
        timeouts: ReceiverTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
        shard: Shard | None = None,
        stage: int = 0,
        verify: Verify = "auto",
    ) -> None:
        self._epoch, self._layout, self._region = epoch, layout, region
        self._is_verified = is_hashed(verify, region)
        self._timeouts, self._clock = timeouts or ReceiverTimeouts(), clock
        self._open_rooms = LandRooms(self._end_parts, waker.wake, clock)
        self._rooms: dict[Room, LandRoom] = {}  # each until its last part is over
        self._done: Counter[Action] = Counter()
        self.times = ReceiverTimes()
        self._num_corrupted = self._received_bytes = self._saved_bytes = 0
        self._control = ControlThread("kv-decode", self._turn)
        pool = Pool.of_layout(region, layout)
        shard = shard or Shard()
        hello = hand_off.Hello(
            epoch=epoch,
            fingerprint=fingerprint,
            layout=layout,
            offers=[],
            tp_rank=shard.tp_rank,
            tp_size=shard.tp_size,
            stage=stage,
            model_kv_heads=shard.model_kv_heads,
            protocol=hand_off.PROTOCOL,
            heartbeat_s=self._timeouts.heartbeat.interval_s,
        )
        self._links = PrefillLinks(
            hello,
            listen(transports, pool),
            self._control,
            key=key,
            connect_timeout_s=self._timeouts.connect_s,
            heartbeat=self._timeouts.heartbeat,
            clock=clock,
            on_up=self._link_up,
            on_last_message=self._handle_last_message,
            on_lost=self._link_lost,
            on_fenced=self._link_fenced,
        )
        self._control.start()

    # ── the role's side ──────────────────────────────────────────────────────────────────────────

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """Grant pages to the prefill at this address, as soon as the link to it is up.

        Args:
            room: Unique to this attempt; otherwise a late answer to an earlier attempt would end this one.
            bootstrap_host: An IPv6 host may be bracketed.
            page_ids: Pages for the prompt's tokens from `have_tokens` on, in order.
            have_tokens: Prompt tokens already held; a multiple of the page size.
        """
        self._open_rooms.open(room)
        self._control.post(
            lambda: self._request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)
        )

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """Withdraw the grant; quarantine the pages until `RoomSafe`. No-op if the room is over.

        Prefill receives `error`, and reports it to its client.
        """
        self._open_rooms.cancel(room, error or Aborted("decode cancelled the request"))

    def events(self) -> Iterator[ReceiverEvent]:
        """Yield the queued events, oldest first."""
        return self._open_rooms.events()

    def statistics(self) -> ReceiverStatistics:
        """Return current gauges and cumulative counters."""
        states = Counter(part.session.state for part in self._parts())
        return ReceiverStatistics(
            num_links=len(self._links.links),
            num_reserving=states[ReceiverState.RESERVING],
            num_granted=states[ReceiverState.GRANTED],
            num_withdrawn=states[ReceiverState.WITHDRAWN],
            num_fencing=states[ReceiverState.FENCING],
            num_landed=self._done[Action.REPORT_LANDED],
            num_failed=self._done[Action.REPORT_FAILED] + self._done[Action.REPORT_LOST],
            num_corrupted=self._num_corrupted,
            num_refused=self._links.num_refused + self._links.num_violations,
            received_bytes=self._received_bytes,
            saved_bytes=self._saved_bytes,
            ending_s=self._open_rooms.ending_s(),
        )

    def close(self) -> None:
        """Close all links and listeners; open rooms get no last event. Safe to call twice."""
        self._control.stop()
        self._links.close()

    @override
    def __repr__(self) -> str:
        return f"DecodeAgent({self.statistics()})"

    def _end_parts(self, room: Room, error: TandemError | None) -> None:
        reason = error or PeerLost("prefill cancelled the request")
        self._control.post(lambda: self._withdraw(room, reason))

    # ── the control thread ───────────────────────────────────────────────────────────────────────

    def _turn(self, waker: Waker) -> None:
        self._links.turn(waker)
        now_s = self._clock()
        for part in self._parts():
            if now_s < part.deadline_s:
                continue
            if part.session.state is ReceiverState.GRANTED:
                self._apply(part, RoomEvent.TIMED_OUT, _landing_timeout(part))
            elif part.session.state is ReceiverState.WITHDRAWN and not part.has_last_message:
                self._links.drop(part.link, PeerLost("prefill did not answer a Withdraw"))

    def _parts(self, link: PrefillLink | None = None) -> list[LandPart]:
        """Return all unfinished parts, or those of one link. Any thread may call it."""
        return [
            part
            for room in list(self._rooms.values())
            for part in list(room.parts)
            if not part.session.is_over and (link is None or part.link is link)
        ]

    def _request(
        self, room: Room, host: str, port: int, page_ids: Sequence[int], have_tokens: int
    ) -> None:
        try:
            with transport_errors():
                link = self._links.link_to(host, port)
        except TandemError as error:
            self._open_rooms.report(0, 1, RoomFailed(room, error))
            return
        self._rooms[room] = entry = LandRoom(room, link, page_ids, have_tokens)
        if link.is_up:
            self._ready(entry.parts[0])

    def _ready(self, part: LandPart) -> None:
        """Start a part whose link is up. The link of the first part names the links of the others."""
        if not part.room.has_all_parts:
            self._add_parts(part.room)
        self._apply(part, RoomEvent.LINK_READY)

    def _add_parts(self, room: LandRoom) -> None:
        links = [first := room.parts[0].link]
        try:
            for address in first.more_addresses:
                with transport_errors():
                    link = self._links.link_to(address.host or first.host, address.port)
                links += [] if link in links else [link]
        except TandemError as error:
            room.add_parts([])
            self._report(room.parts[0], RoomLost(room.room, error))
            return
        for part in room.add_parts(links[1:]):
            if part.link.is_up:
                self._apply(part, RoomEvent.LINK_READY)

    def _link_up(self, link: PrefillLink) -> None:
        for part in self._parts(link):
            self._ready(part)

    def _link_lost(self, link: PrefillLink, error: TandemError) -> None:
        self.times.num_lost_links += 1
        for part in self._parts(link):
            # A last message that has arrived still counts: its check is in progress.
            if not part.has_last_message:
                self._apply(part, RoomEvent.LINK_LOST, error)

    def _link_fenced(self, link: PrefillLink) -> None:
        for part in self._parts(link):
            self._apply(part, RoomEvent.FENCED)

    def _handle_last_message(
        self, link: PrefillLink, message: hand_off.Landed | hand_off.Released
    ) -> None:
        """Handle prefill's last message of a room: it is applied once the pages are revoked and checked."""
        room = self._rooms.get(message.room)
        parts = [] if room is None else [part for part in room.parts if part.link is link]
        if not parts or parts[0].session.is_over or parts[0].has_last_message:
            return  # a duplicate, or for an unknown room
        (part,) = parts
        part.has_last_message = True
        if isinstance(message, hand_off.Landed):
            part.landed = message
        self._links.revoke(
            link,
            message.room,
            partial(self._event_of, part, message),
            lambda outcome: self._apply(part, *outcome),
            partial(self._revoke_failed, part),
        )

    def _event_of(
        self, part: LandPart, message: hand_off.Landed | hand_off.Released
    ) -> tuple[RoomEvent, TandemError | None]:
        """Return the event of a last message, after verifying the checksums. Runs on the link's worker."""
        if isinstance(message, hand_off.Released):
            error = None if message.error is None else error_of_other_half(message.error)
            return RoomEvent.RELEASED_ARRIVED, error
        if not message.checksums or not self._is_verified:
            return RoomEvent.LANDED_ARRIVED, None
        if not (fault := part.verify(message, self._layout, self._region)):
            return RoomEvent.LANDED_ARRIVED, None
        log.warning(
            "kv_push.corrupted",
            room=message.room,
            reason=fault,
            see="docs/reference/errors.md#kv_corrupted",
        )
        return RoomEvent.CORRUPTED_ARRIVED, KVCorrupted(fault)

    def _revoke_failed(self, part: LandPart, error: TandemError) -> None:
        """Drop the link after a failed fence or check: only fencing the whole link makes these pages safe."""
        self._apply(part, RoomEvent.LINK_LOST, error)
        self._links.drop(part.link, error)

    def _apply(self, part: LandPart, event: RoomEvent, error: TandemError | None = None) -> None:
        if part.session.is_over:
            return  # crossed with the last message
        self._num_corrupted += event is RoomEvent.CORRUPTED_ARRIVED
        for action in part.session.apply(event, error):
            self._done[action] += 1
            self._act(part, action)
        if part.room.is_over and self._rooms.get(part.room.room) is part.room:
            del self._rooms[part.room.room]

    def _act(self, part: LandPart, action: Action) -> None:
        room = part.room.room
        error = part.session.error or PeerLost("prefill cancelled the request")
        match action:
            case Action.PERMIT:
                self._links.permit(part.link, room, part.room.page_ids)
            case Action.SEND_GRANT:
                self._send_grant(part)
            case Action.SEND_WITHDRAW:
                self._send_withdraw(part, error)
            case Action.REPORT_LANDED:
                landed = part.landed
                assert landed is not None
                tokens = (landed.first_token, landed.seed, landed.cached_tokens)
                self._report(part, RoomLanded(room, *tokens, landed.first_logprobs, landed.prompt))
            case Action.REPORT_FAILED:
                self._report(part, RoomFailed(room, error))
            case Action.REPORT_LOST:
                self._report(part, RoomLost(room, error))
            case Action.REPORT_SAFE:
                self._report(part, RoomSafe(room))
            case _:
                raise AssertionError(action)

    def _report(self, part: LandPart, event: ReceiverEvent) -> None:
        room = part.room
        if all(each.session.state is ReceiverState.READY for each in room.parts):
            self._observe(room)
        self._open_rooms.report(part.number, len(room.parts), event)

    def _observe(self, room: LandRoom) -> None:
        if room.granted_s is not None:
            self.times.granted_seconds.observe(self._clock() - room.granted_s)
        self._received_bytes += len(room.page_ids) * self._layout.page_bytes
        self._saved_bytes += room.have_tokens * self._layout.all_heads_bytes

    def _withdraw(self, room: Room, reason: TandemError) -> None:
        if (entry := self._rooms.get(room)) is not None:
            for part in entry.parts:
                self._apply(part, RoomEvent.WITHDRAW_REQUESTED, reason)

    def _send_grant(self, part: LandPart) -> None:
        now_s, room = self._clock(), part.room
        part.deadline_s = now_s + self._timeouts.landed_s
        room.granted_s = now_s if room.granted_s is None else room.granted_s
        grant = hand_off.Grant(
            epoch=self._epoch,
            room=room.room,
            page_ids=list(room.page_ids),
            have_tokens=room.have_tokens,
        )
        self._links.send(part.link, grant)

    def _send_withdraw(self, part: LandPart, error: TandemError) -> None:
        # The message is sent after the link's queued jobs. If these take longer than `landed_s`, the link is dropped.
        part.deadline_s = self._clock() + self._timeouts.landed_s
        withdraw = hand_off.Withdraw(epoch=self._epoch, room=part.room.room, error=error.info())
        self._links.send(part.link, withdraw)

        def sent() -> None:
            part.deadline_s = self._clock() + self._timeouts.released_s

        part.link.worker.after(sent)


def _landing_timeout(part: LandPart) -> TransferTimeout:
    if part.has_last_message:
        return TransferTimeout("the transport did not revoke the pages in time")
    return TransferTimeout("prefill did not push in time")
