"""Decode's end: grants pages to prefill nodes, and says when they are the role's again.

```
 request ─▶ (granted) ─▶ Landed                                          granted → held
                      ├▶ Failed                                          granted → free
                      ├▶ Lost ───────────────▶ Safe    granted → quarantined → free
 withdraw ───────────────────────────────────▶ Safe    granted → quarantined → free
```

On the right is what the role does with the pages it named in `request`. After `withdraw` the next
and last event of the room is `Safe`, whatever crossed with it. What happens in between is the table
in `session.py`; who is connected is kept by `prefill_links.py`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import msgspec
from typing_extensions import override

from kvtransfer.checksum import Verify, arrived_sums, sampled_pages
from kvtransfer.control import ControlThread, Outbox
from kvtransfer.events import Failed, Landed, Lost, ReceiverEvent, Safe
from kvtransfer.layout import KVLayout
from kvtransfer.plan import PagedTokens
from kvtransfer.prefill_links import PrefillLink, PrefillLinks, ReceiverEnd
from kvtransfer.region import MemoryRegion
from kvtransfer.session import (
    Action,
    CorruptedArrived,
    Event,
    Fenced,
    LandedArrived,
    LinkLost,
    LinkReady,
    ReceiverState,
    ReleasedArrived,
    Session,
    TimedOut,
    UnexpectedEvent,
    WithdrawAsked,
    receiver_session,
)
from kvtransfer.transports.base import Pool, Transport
from kvtransfer.transports.registry import listen
from telemetry.log import get_logger
from wire import messages
from wire.channel import Waker
from wire.errors import (
    Aborted,
    KVCorrupted,
    PeerLost,
    TandemError,
    TransferTimeout,
    error_from_info,
)
from wire.ids import Epoch, Room
from wire.keys import ChannelKey

log = get_logger("kvtransfer.receiver")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTimeouts:
    """How long decode waits for prefill.

    Attributes:
        connect_s: From the first request to a prefill to its Welcome.
        landed_s: From the grant to Landed: prefill's queue, its forward and the push.
        released_s: From Withdraw to its answer. A prefill that is alive and does not answer in this
            time is cut off, with all its rooms.
    """

    connect_s: float = 5.0
    landed_s: float = 120.0
    released_s: float = 10.0


class ReceiverStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode agent holds now and has done so far."""

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


@dataclass(slots=True)
class _Room:
    link: PrefillLink
    page_ids: Sequence[int]
    have_tokens: int
    deadline_s: float = float("inf")
    session: Session[ReceiverState] = field(default_factory=receiver_session)
    landed: messages.Landed | None = None

    def verify(self, landed: messages.Landed, layout: KVLayout, region: MemoryRegion) -> str:
        """Return what is wrong with the bytes that arrived, or an empty string."""
        granted = PagedTokens(layout, self.page_ids, self.have_tokens)
        end_token = landed.end_token or granted.end_token
        if not 0 <= granted.end_token - end_token < layout.page_size:
            return f"tokens up to {end_token} were written and {granted.end_token} granted"
        one_in = landed.checksum_one_in
        pages = sampled_pages(landed.room, len(self.page_ids), one_in)
        sums = arrived_sums(region, granted, end_token, pages)
        if sums == landed.checksums:
            return ""
        num_bad = sum(a != b for a, b in zip_longest(sums, landed.checksums))
        return f"{num_bad} of {len(sums)} pages looked at have other bytes than were sent"


class DecodeAgent:
    """The receiving end of every room of one decode node.

    `request`, `withdraw` and `events` belong to one thread, the role's loop; none of them blocks.
    `statistics` may be called from any.

    Args:
        epoch: Of this process.
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        layout: Of the own pool, which `region` holds.
        transports: Those that may be used, best first.
        waker: Rung whenever `events` has something.
        key: Proves to prefill nodes that we know the cluster's secret.
        tp_rank: Which rank of its node this is; it is linked to the same rank of each prefill.
        verify: Whether the checksums that prefill gives are looked at; how many is up to it.

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
        waker: Waker | None = None,
        key: ChannelKey | None = None,
        timeouts: ReceiverTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
        tp_rank: int = 0,
        verify: Verify = "sample",
    ) -> None:
        self._epoch, self._layout, self._region = epoch, layout, region
        self._is_verified = verify != "off"
        self._timeouts, self._clock = timeouts or ReceiverTimeouts(), clock
        self._outbox: Outbox[ReceiverEvent] = Outbox(waker, (Landed, Failed, Safe), Safe)
        self._rooms: dict[Room, _Room] = {}
        self._told: Counter[Action] = Counter()
        self._num_corrupted = self._received_bytes = self._saved_bytes = 0
        self._control = ControlThread("kv-decode", self._turn)
        pool = Pool(region, layout.page_bytes, layout.num_pages)
        self._links = PrefillLinks(
            ReceiverEnd(epoch, fingerprint, layout, listen(transports, pool), tp_rank),
            self._control,
            key=key,
            connect_timeout_s=self._timeouts.connect_s,
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
            room: Not in use.
            bootstrap_host: An IPv6 host may be bracketed.
            bootstrap_port: Of the prefill.
            page_ids: For the prompt's tokens `have_tokens` and on, in order.
            have_tokens: Prompt tokens already held; whole pages.
        """
        self._outbox.open(room)
        self._control.post(
            lambda: self._request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)
        )

    def withdraw(self, room: Room) -> None:
        """Take the pages back; they are quarantined until `Safe`. No-op when the room is over."""
        if self._outbox.cancel(room):
            why = Aborted("decode gave the request up")
            self._control.post(partial(self._apply, room, WithdrawAsked(why)))

    def events(self) -> Iterator[ReceiverEvent]:
        """Yield what happened and was not taken yet, oldest first."""
        return self._outbox.take()

    def statistics(self) -> ReceiverStatistics:
        """Return what is held now and was done so far."""
        states = Counter(entry.session.state for entry in list(self._rooms.values()))
        return ReceiverStatistics(
            num_links=self._links.num_links,
            num_reserving=states[ReceiverState.RESERVING],
            num_granted=states[ReceiverState.GRANTED],
            num_withdrawn=states[ReceiverState.WITHDRAWN],
            num_fencing=states[ReceiverState.FENCING],
            num_landed=self._told[Action.TELL_LANDED],
            num_failed=self._told[Action.TELL_FAILED] + self._told[Action.TELL_LOST],
            num_corrupted=self._num_corrupted,
            num_refused=self._links.num_refused,
            received_bytes=self._received_bytes,
            saved_bytes=self._saved_bytes,
        )

    def close(self) -> None:
        """Cut every prefill off; rooms still open get no last event. Safe to call twice."""
        self._control.stop()
        self._links.close()

    @override
    def __repr__(self) -> str:
        return f"DecodeAgent({self.statistics()})"

    # ── the control thread ───────────────────────────────────────────────────────────────────────

    def _turn(self, waker: Waker) -> None:
        self._links.turn(waker)
        now_s = self._clock()
        for room, entry in list(self._rooms.items()):
            if now_s < entry.deadline_s:
                continue
            if entry.session.state is ReceiverState.GRANTED:
                self._apply(room, TimedOut(TransferTimeout("prefill did not push in time")))
            elif entry.session.state is ReceiverState.WITHDRAWN:
                self._links.drop(entry.link, PeerLost("prefill does not answer a Withdraw"))

    def _request(
        self, room: Room, host: str, port: int, page_ids: Sequence[int], have_tokens: int
    ) -> None:
        try:
            link = self._links.want(host, port)
        except TandemError as error:
            return self._outbox.put(Failed(room, error))
        self._rooms[room] = _Room(link, page_ids, have_tokens)
        if link.is_up:
            self._apply(room, LinkReady())
        return None

    def _rooms_of(self, link: PrefillLink) -> list[Room]:
        return [room for room, entry in self._rooms.items() if entry.link is link]

    def _link_up(self, link: PrefillLink) -> None:
        for room in self._rooms_of(link):
            self._apply(room, LinkReady())

    def _link_lost(self, link: PrefillLink, error: TandemError) -> None:
        for room in self._rooms_of(link):
            self._apply(room, LinkLost(error))

    def _link_fenced(self, link: PrefillLink) -> None:
        for room in self._rooms_of(link):
            self._apply(room, Fenced())

    def _hear(self, link: PrefillLink, message: messages.Landed | messages.Released) -> None:
        entry = self._rooms.get(message.room)
        if entry is None or entry.link is not link:
            return  # the last word came twice, or for a room of somebody else
        try:
            match message:
                case messages.Released(error=info):
                    error = None if info is None else error_from_info(info)
                    self._apply(message.room, ReleasedArrived(error))
                case messages.Landed():
                    self._apply(message.room, self._verify(entry, message))
        except UnexpectedEvent as error:
            self._links.drop(link, error)

    def _verify(self, entry: _Room, landed: messages.Landed) -> Event:
        entry.landed = landed
        if not landed.checksums or not self._is_verified:
            return LandedArrived()
        if not (fault := entry.verify(landed, self._layout, self._region)):
            return LandedArrived()
        self._num_corrupted += 1
        log.warning("kv_push.corrupted", room=landed.room, reason=fault)
        return CorruptedArrived(KVCorrupted(fault))

    def _apply(self, room: Room, event: Event) -> None:
        entry = self._rooms.get(room)
        if entry is None:
            return  # over, and forgotten: this crossed with the last word
        for action in entry.session.apply(event):
            self._told[action] += 1
            self._act(room, entry, action)
        if entry.session.is_over:
            del self._rooms[room]

    def _act(self, room: Room, entry: _Room, action: Action) -> None:
        error = entry.session.error or PeerLost("prefill gave the request up")
        match action:
            case Action.PERMIT:
                listener, admission = self._links.listener(entry.link)
                listener.permit(admission.peer, room, entry.page_ids)
            case Action.SEND_GRANT:
                entry.deadline_s = self._clock() + self._timeouts.landed_s
                self._send_grant(room, entry)
            case Action.SEND_WITHDRAW:
                entry.deadline_s = self._clock() + self._timeouts.released_s
                self._links.send(entry.link, messages.Withdraw(epoch=self._epoch, room=room))
            case Action.REVOKE:
                listener, admission = self._links.listener(entry.link)
                listener.revoke(admission.peer, room)
            case Action.FENCE:
                pass  # the whole link is: `PrefillLinks.drop` fences it when all its rooms know
            case Action.TELL_LANDED:
                self._tell_landed(room, entry)
            case Action.TELL_FAILED:
                self._outbox.put(Failed(room, error))
            case Action.TELL_LOST:
                self._outbox.put(Lost(room, error))
            case Action.TELL_SAFE:
                self._outbox.put(Safe(room))
            case _:
                raise AssertionError(action)

    def _send_grant(self, room: Room, entry: _Room) -> None:
        grant = messages.Grant(
            epoch=self._epoch,
            room=room,
            page_ids=list(entry.page_ids),
            have_tokens=entry.have_tokens,
        )
        self._links.send(entry.link, grant)

    def _tell_landed(self, room: Room, entry: _Room) -> None:
        landed = entry.landed
        assert landed is not None
        self._received_bytes += len(entry.page_ids) * self._layout.page_bytes
        self._saved_bytes += entry.have_tokens * self._layout.all_heads_bytes
        self._outbox.put(
            Landed(
                room, landed.first_token, landed.seed, landed.cached_tokens, landed.first_logprobs
            )
        )
