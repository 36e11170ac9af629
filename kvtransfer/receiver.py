"""Decode's end: grants pages to prefill nodes, and reports when the role may reuse them.

```
 request ─▶ (granted) ─▶ Landed                                          granted → held
                      ├▶ Failed                                          granted → free
                      ├▶ Lost ───────────────▶ Safe    granted → quarantined → free
 withdraw ───────────────────────────────────▶ Safe    granted → quarantined → free
```

The right column shows the state of the pages passed to `request`. After `withdraw` the room's next and
last event is `Safe`, whatever crossed with the withdrawal. Each part of a room follows the table in
`session.py`: there is one part for each rank of prefill that holds our heads. `prefill_links.py`
manages the links.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import msgspec
from typing_extensions import override

from tandem.kvtransfer.checksum import Verify, page_sums, sampled_slabs
from tandem.kvtransfer.control import ControlThread, transport_errors
from tandem.kvtransfer.events import (
    Failed,
    Landed,
    LandRooms,
    Lost,
    ReceiverEvent,
    ReceiverTimes,
    Safe,
)
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import HeadRange, PagedTokens
from tandem.kvtransfer.prefill_links import PrefillLink, PrefillLinks
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.session import Action, Event, ReceiverState, Session, receiver_session
from tandem.kvtransfer.sharding import Shard
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
    error_of_far_side,
)
from tandem.wire.generation import Epoch, Room
from tandem.wire.keys import ChannelKey

log = get_logger("kvtransfer.receiver")


class LandRoom:
    """One request at decode, over all its links.

    Attributes:
        parts: The first determines over how many links the room goes, once its own is up. Its Landed
            reports the most: prefill's rank 0 wrote it, if that has heads of ours.
        granted_s: When the first part was granted; None before.
    """

    def __init__(
        self, room: Room, link: PrefillLink, page_ids: Sequence[int], have_tokens: int
    ) -> None:
        self.room, self.page_ids, self.have_tokens = room, page_ids, have_tokens
        self.is_spread = False
        self.granted_s: float | None = None
        self.parts = [LandPart(self, 0, link)]

    def spread(self, links: Sequence[PrefillLink]) -> list["LandPart"]:
        """Make the parts for these links, which are those beside the first."""
        self.is_spread = True
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
        deadline_s: When the state of this part times out.
        has_last_word: Prefill sent Landed or Released; the link's worker takes the pages back, and
            looks at them.
        landed: Prefill's Landed message, once it has arrived.
    """

    room: LandRoom
    number: int
    link: PrefillLink
    deadline_s: float = float("inf")
    session: Session[ReceiverState] = field(default_factory=receiver_session)
    has_last_word: bool = False
    landed: hand_off.Landed | None = None

    def verify(self, landed: hand_off.Landed, layout: KVLayout, region: MemoryRegion) -> str:
        """Return how the received bytes mismatch prefill's checksums, or an empty string."""
        granted = PagedTokens(layout, self.room.page_ids, self.room.have_tokens)
        end_token = landed.end_token or granted.end_token
        if not 0 <= granted.end_token - end_token < layout.page_size:
            return f"tokens up to {end_token} were written and {granted.end_token} granted"
        slabs = sampled_slabs(landed.room, layout, landed.checksum_one_in)
        first_head = self.link.heads.start
        heads = HeadRange(first_head, first_head, len(self.link.heads))
        sums = page_sums(region, granted, granted, end_token, slabs=slabs, heads=heads)
        if sums == landed.checksums:
            return ""
        num_bad = sum(a != b for a, b in zip_longest(sums, landed.checksums))
        return f"{num_bad} of {len(sums)} pages have other bytes than were sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTimeouts:
    """How long decode waits for prefill.

    Attributes:
        connect_s: From the offers to a prefill to its Welcome.
        landed_s: From the grant to pages that are ours again: prefill's queue, its forward, the push,
            and the check of what arrived.
        released_s: From a Withdraw that is sent to its answer. A prefill that is alive and does not answer in this
            time is cut off, with all its rooms.
    """

    connect_s: float = 5.0
    landed_s: float = 120.0
    released_s: float = 10.0
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT


class ReceiverStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode agent holds now and has done so far. Each part of a room counts.

    Attributes:
        num_refused: Writes outside a grant, and invalid messages from prefill nodes.
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


class DecodeAgent:
    """The receiving end of every room of one decode node.

    `request`, `withdraw` and `events` belong to one thread, the role's loop; none of them blocks.
    `statistics` may be called from any.

    Args:
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        layout: Layout of this node's pool, which `region` holds.
        transports: Those that may be used, best first.
        waker: Rung whenever `events` has something.
        key: Proves to prefill nodes that we know the cluster's secret.
        shard: Which of the node's ranks this is; it is linked to those of prefill with heads of its.
        verify: Whether the checksums that prefill gives are looked at; how many is up to it.

    Attributes:
        times: How long hand-offs took.

    Raises:
        ConfigInvalid: None of the transports can write this pool.
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
        verify: Verify = "sample",
    ) -> None:
        self._epoch, self._layout, self._region = epoch, layout, region
        self._is_verified = verify != "off"
        self._timeouts, self._clock = timeouts or ReceiverTimeouts(), clock
        self._told = LandRooms(self._end_parts, waker.wake)
        self._rooms: dict[Room, LandRoom] = {}  # until the last of their parts is over
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
            model_kv_heads=shard.model_kv_heads,
            protocol=hand_off.PROTOCOL,
        )
        self._links = PrefillLinks(
            hello,
            listen(transports, pool),
            self._control,
            key=key,
            connect_timeout_s=self._timeouts.connect_s,
            heartbeat=self._timeouts.heartbeat,
            clock=clock,
            up=self._link_up,
            heard=self._hear,
            lost=self._link_lost,
            fenced=self._link_fenced,
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
            room: Used for no other attempt: a late answer to that one would end this.
            bootstrap_host: An IPv6 host may be bracketed.
            page_ids: For the prompt's tokens `have_tokens` and on, in order.
            have_tokens: Prompt tokens already held; whole pages.
        """
        self._told.open(room)
        self._control.post(
            lambda: self._request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)
        )

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """Withdraw the grant; quarantine the pages until `Safe`. No-op if the room is over.

        Prefill receives `error`, and reports it to its client.
        """
        self._told.give_up(room, error or Aborted("decode gave the request up"))

    def events(self) -> Iterator[ReceiverEvent]:
        """Yield the queued events, oldest first."""
        return self._told.events()

    def statistics(self) -> ReceiverStatistics:
        """Return current gauges and cumulative counters."""
        states = Counter(part.session.state for part in self._parts())
        return ReceiverStatistics(
            num_links=len(self._links.links),
            num_reserving=states[ReceiverState.RESERVING],
            num_granted=states[ReceiverState.GRANTED],
            num_withdrawn=states[ReceiverState.WITHDRAWN],
            num_fencing=states[ReceiverState.FENCING],
            num_landed=self._done[Action.TELL_LANDED],
            num_failed=self._done[Action.TELL_FAILED] + self._done[Action.TELL_LOST],
            num_corrupted=self._num_corrupted,
            num_refused=self._links.num_refused + self._links.num_violations,
            received_bytes=self._received_bytes,
            saved_bytes=self._saved_bytes,
        )

    def close(self) -> None:
        """Close all links and listeners; open rooms get no last event. Safe to call twice."""
        self._control.stop()
        self._links.close()

    @override
    def __repr__(self) -> str:
        return f"DecodeAgent({self.statistics()})"

    def _end_parts(self, room: Room, error: TandemError | None) -> None:
        why = error or PeerLost("prefill gave the request up")
        self._control.post(lambda: self._withdraw(room, why))

    # ── the control thread ───────────────────────────────────────────────────────────────────────

    def _turn(self, waker: Waker) -> None:
        self._links.turn(waker)
        now_s = self._clock()
        for part in self._parts():
            if now_s < part.deadline_s:
                continue
            if part.session.state is ReceiverState.GRANTED:
                self._apply(part, Event.TIMED_OUT, _too_late(part))
            elif part.session.state is ReceiverState.WITHDRAWN and not part.has_last_word:
                self._links.drop(part.link, PeerLost("prefill does not answer a Withdraw"))

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
                link = self._links.want(host, port)
        except TandemError as error:
            self._told.report(0, 1, Failed(room, error))
            return
        self._rooms[room] = entry = LandRoom(room, link, page_ids, have_tokens)
        if link.is_up:
            self._ready(entry.parts[0])

    def _ready(self, part: LandPart) -> None:
        """The link of a part is up. The first one's names the others that the room goes over."""
        if not part.room.is_spread:
            self._spread(part.room)
        self._apply(part, Event.LINK_READY)

    def _spread(self, room: LandRoom) -> None:
        links = [first := room.parts[0].link]
        try:
            for port in first.more_ports:
                with transport_errors():
                    link = self._links.want(first.host, port)
                links += [] if link in links else [link]
        except TandemError as error:
            room.spread([])
            self._report(room.parts[0], Lost(room.room, error))
            return
        for part in room.spread(links[1:]):
            if part.link.is_up:
                self._apply(part, Event.LINK_READY)

    def _link_up(self, link: PrefillLink) -> None:
        for part in self._parts(link):
            self._ready(part)

    def _link_lost(self, link: PrefillLink, error: TandemError) -> None:
        self.times.num_lost_links += 1
        for part in self._parts(link):
            # A last message that has arrived still counts: its check is in progress.
            if not part.has_last_word:
                self._apply(part, Event.LINK_LOST, error)

    def _link_fenced(self, link: PrefillLink) -> None:
        for part in self._parts(link):
            self._apply(part, Event.FENCED)

    def _hear(self, link: PrefillLink, message: hand_off.Landed | hand_off.Released) -> None:
        """Handle prefill's last message of a room: it is applied once the pages are revoked and checked."""
        room = self._rooms.get(message.room)
        parts = [] if room is None else [part for part in room.parts if part.link is link]
        if not parts or parts[0].session.is_over or parts[0].has_last_word:
            return  # a duplicate, or for an unknown room
        (part,) = parts
        part.has_last_word = True
        if isinstance(message, hand_off.Landed):
            part.landed = message
        self._links.revoke(
            link,
            message.room,
            partial(self._look, part, message),
            lambda looked: self._apply(part, *looked),
            partial(self._not_taken_back, part),
        )

    def _look(
        self, part: LandPart, word: hand_off.Landed | hand_off.Released
    ) -> tuple[Event, TandemError | None]:
        """Verify the checksums. Runs on the link's worker."""
        if isinstance(word, hand_off.Released):
            error = None if word.error is None else error_of_far_side(word.error)
            return Event.RELEASED_ARRIVED, error
        if not word.checksums or not self._is_verified:
            return Event.LANDED_ARRIVED, None
        if not (fault := part.verify(word, self._layout, self._region)):
            return Event.LANDED_ARRIVED, None
        log.warning(
            "kv_push.corrupted",
            room=word.room,
            reason=fault,
            see="tandem docs errors#kv_corrupted",
        )
        return Event.CORRUPTED_ARRIVED, KVCorrupted(fault)

    def _not_taken_back(self, part: LandPart, error: TandemError) -> None:
        """Drop the link after a failed fence or check: only its own fence makes these pages safe."""
        self._apply(part, Event.LINK_LOST, error)
        self._links.drop(part.link, error)

    def _apply(self, part: LandPart, event: Event, error: TandemError | None = None) -> None:
        if part.session.is_over:
            return  # crossed with the last message
        self._num_corrupted += event is Event.CORRUPTED_ARRIVED
        for action in part.session.apply(event, error):
            self._done[action] += 1
            self._act(part, action)
        if part.room.is_over and self._rooms.get(part.room.room) is part.room:
            del self._rooms[part.room.room]

    def _act(self, part: LandPart, action: Action) -> None:
        room = part.room.room
        error = part.session.error or PeerLost("prefill gave the request up")
        match action:
            case Action.PERMIT:
                self._links.permit(part.link, room, part.room.page_ids)
            case Action.SEND_GRANT:
                self._send_grant(part)
            case Action.SEND_WITHDRAW:
                self._send_withdraw(part, error)
            case Action.TELL_LANDED:
                word = part.landed
                assert word is not None
                tokens = (word.first_token, word.seed, word.cached_tokens)
                self._report(part, Landed(room, *tokens, word.first_logprobs, word.prompt))
            case Action.TELL_FAILED:
                self._report(part, Failed(room, error))
            case Action.TELL_LOST:
                self._report(part, Lost(room, error))
            case Action.TELL_SAFE:
                self._report(part, Safe(room))
            case _:
                raise AssertionError(action)

    def _report(self, part: LandPart, event: ReceiverEvent) -> None:
        room = part.room
        if all(each.session.state is ReceiverState.READY for each in room.parts):
            self._observe(room)
        self._told.report(part.number, len(room.parts), event)

    def _observe(self, room: LandRoom) -> None:
        if room.granted_s is not None:
            self.times.granted_seconds.observe(self._clock() - room.granted_s)
        self._received_bytes += len(room.page_ids) * self._layout.page_bytes
        self._saved_bytes += room.have_tokens * self._layout.all_heads_bytes

    def _withdraw(self, room: Room, why: TandemError) -> None:
        if (entry := self._rooms.get(room)) is not None:
            for part in entry.parts:
                self._apply(part, Event.WITHDRAW_ASKED, why)

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
        # The message waits for the link's jobs. If they take longer than this, the link is dropped.
        part.deadline_s = self._clock() + self._timeouts.landed_s
        withdraw = hand_off.Withdraw(epoch=self._epoch, room=part.room.room, error=error.info())
        self._links.send(part.link, withdraw)

        def sent() -> None:
            part.deadline_s = self._clock() + self._timeouts.released_s

        part.link.worker.after(sent)


def _too_late(part: LandPart) -> TransferTimeout:
    if part.has_last_word:
        return TransferTimeout("the transport did not take the pages back in time")
    return TransferTimeout("prefill did not push in time")
