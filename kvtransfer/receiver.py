"""Decode's end: grants pages to prefill nodes, and says when they are the role's again.

```
 request ─▶ (granted) ─▶ Landed                                          granted → held
                      ├▶ Failed                                          granted → free
                      ├▶ Lost ───────────────▶ Safe    granted → quarantined → free
 withdraw ───────────────────────────────────▶ Safe    granted → quarantined → free
```

On the right is what the role does with the pages it named in `request`. After `withdraw` the next
and last event of the room is `Safe`, whatever crossed with it. What happens in between is the table
in `session.py`, for each part of the room, that is for each rank of prefill that holds heads of ours
(`parts.py`); who is connected is kept by `prefill_links.py`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from typing_extensions import override

from tandem.kvtransfer.checksum import Verify
from tandem.kvtransfer.control import ControlThread, Outbox, transport_errors
from tandem.kvtransfer.events import Failed, Landed, Lost, ReceiverEvent, Safe
from tandem.kvtransfer.fan_in import GroupAction
from tandem.kvtransfer.grant_room import GrantParts, GrantRoom
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.parts import Part
from tandem.kvtransfer.prefill_links import PrefillLink, PrefillLinks, ReceiverEnd
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.session import (
    Action,
    CorruptedArrived,
    Event,
    Fenced,
    LandedArrived,
    LinkLost,
    LinkReady,
    ReceiverState,
    ReleasedArrived,
    TimedOut,
    WithdrawAsked,
)
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transfer_times import ReceiverTimes
from tandem.kvtransfer.transports.base import Pool, Transport
from tandem.kvtransfer.transports.registry import listen
from tandem.telemetry.log import get_logger
from tandem.wire import hand_off
from tandem.wire.channel import Waker
from tandem.wire.errors import (
    Aborted,
    KVCorrupted,
    PeerLost,
    TandemError,
    TransferTimeout,
    error_of_far_side,
)
from tandem.wire.heartbeat import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.ids import Epoch, Room
from tandem.wire.keys import ChannelKey

log = get_logger("kvtransfer.receiver")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTimeouts:
    """How long decode waits for prefill.

    Attributes:
        connect_s: From the offers to a prefill to its Welcome.
        landed_s: From the grant to pages that are ours again: prefill's queue, its forward, the push,
            and the check of what arrived.
        released_s: From a Withdraw that is sent to its answer. A prefill that is alive and does not answer in this
            time is cut off, with all its rooms.
        heartbeat: Of the links.
    """

    connect_s: float = 5.0
    landed_s: float = 120.0
    released_s: float = 10.0
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT


class ReceiverStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a decode agent holds now and has done so far. Each part of a room counts.

    Attributes:
        num_refused: Writes outside a grant, and words of prefill nodes that cannot be.
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
        epoch: Of this process.
        fingerprint: Equal at both ends exactly when their KV is interchangeable.
        layout: Of the own pool, which `region` holds.
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
        waker: Waker | None = None,
        key: ChannelKey | None = None,
        timeouts: ReceiverTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
        shard: Shard | None = None,
        verify: Verify = "sample",
    ) -> None:
        self._epoch, self._layout, self._region = epoch, layout, region
        self._is_verified = verify != "off"
        self._timeouts, self._clock = timeouts or ReceiverTimeouts(), clock
        self._outbox: Outbox[ReceiverEvent] = Outbox(waker, (Landed, Failed, Safe), Safe)
        self._rooms: dict[Room, GrantParts] = {}
        self._parts: dict[Part, GrantRoom] = {}  # those that are not over
        self._told: Counter[Action] = Counter()
        self.times = ReceiverTimes()
        self._num_corrupted = self._received_bytes = self._saved_bytes = 0
        self._control = ControlThread("kv-decode", self._turn)
        pool = Pool(region, layout.page_bytes, layout.num_pages)
        self._links = PrefillLinks(
            ReceiverEnd(epoch, fingerprint, layout, listen(transports, pool), shard or Shard()),
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
            bootstrap_port: Of the prefill.
            page_ids: For the prompt's tokens `have_tokens` and on, in order.
            have_tokens: Prompt tokens already held; whole pages.
        """
        self._outbox.open(room)
        self._control.post(
            lambda: self._request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)
        )

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """Take the pages back; they are quarantined until `Safe`. No-op when the room is over.

        Prefill is told `error`, and its client by it.
        """
        if self._outbox.cancel(room):
            why = error or Aborted("decode gave the request up")
            self._control.post(lambda: self._give_up(room, why))

    def events(self) -> Iterator[ReceiverEvent]:
        """Yield what happened and was not taken yet, oldest first."""
        return self._outbox.take()

    def statistics(self) -> ReceiverStatistics:
        """Return what is held now and was done so far."""
        states = Counter(entry.session.state for entry in list(self._parts.values()))
        return ReceiverStatistics(
            num_links=self._links.num_links,
            num_reserving=states[ReceiverState.RESERVING],
            num_granted=states[ReceiverState.GRANTED],
            num_withdrawn=states[ReceiverState.WITHDRAWN],
            num_fencing=states[ReceiverState.FENCING],
            num_landed=self._told[Action.TELL_LANDED],
            num_failed=self._told[Action.TELL_FAILED] + self._told[Action.TELL_LOST],
            num_corrupted=self._num_corrupted,
            num_refused=self._links.num_refused + self._links.num_violations,
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
        for part, entry in list(self._parts.items()):
            if now_s < entry.deadline_s:
                continue
            if entry.session.state is ReceiverState.GRANTED:
                self._apply(part, TimedOut(_too_late(entry)))
            elif entry.session.state is ReceiverState.WITHDRAWN and not entry.has_last_word:
                self._links.drop(entry.link, PeerLost("prefill does not answer a Withdraw"))

    def _request(
        self, room: Room, host: str, port: int, page_ids: Sequence[int], have_tokens: int
    ) -> None:
        try:
            with transport_errors():
                link = self._links.want(host, port)
        except TandemError as error:
            self._outbox.put(Failed(room, error))
            return
        self._parts[Part(room, 0)] = first = GrantRoom(link, page_ids, have_tokens)
        self._rooms[room] = GrantParts(room, first)
        if link.is_up:
            self._ready(Part(room, 0))

    def _ready(self, part: Part) -> None:
        """The link of a part is up. The first one's says over which others the room goes as well."""
        if not self._rooms[part.room].is_spread:
            self._spread(part.room)
        self._apply(part, LinkReady())

    def _spread(self, room: Room) -> None:
        entry = self._rooms[room]
        first, links = entry.first, [entry.first.link]
        try:
            for port in first.link.more_ports:
                with transport_errors():
                    link = self._links.want(first.link.host, port)
                links += [] if link in links else [link]
        except TandemError as error:
            entry.spread(1)
            self._tell(room, entry.fan_in.lost(error))
            return
        for part, link in zip(entry.spread(len(links)), links[1:], strict=True):
            self._parts[part] = GrantRoom(link, first.page_ids, first.have_tokens)
            if link.is_up:
                self._apply(part, LinkReady())

    def _part_of(self, link: PrefillLink, room: Room) -> Part | None:
        """Return the part of a room that goes over a link, unless it is over."""
        for part in self._rooms[room].parts if room in self._rooms else ():
            entry = self._parts.get(part)
            if entry is not None and entry.link is link:
                return part
        return None

    def _parts_of(self, link: PrefillLink) -> list[Part]:
        return [part for part, entry in self._parts.items() if entry.link is link]

    def _link_up(self, link: PrefillLink) -> None:
        for part in self._parts_of(link):
            self._ready(part)

    def _link_lost(self, link: PrefillLink, error: TandemError) -> None:
        self.times.num_lost_links += 1
        for part in self._parts_of(link):
            # A last word that has come counts, if it is looked at before the room's deadline.
            if not self._parts[part].has_last_word:
                self._apply(part, LinkLost(error))

    def _link_fenced(self, link: PrefillLink) -> None:
        for part in self._parts_of(link):
            self._apply(part, Fenced())

    def _hear(self, link: PrefillLink, message: hand_off.Landed | hand_off.Released) -> None:
        """Take prefill's last word on a room: it counts once the pages are ours again, and looked at."""
        part = self._part_of(link, message.room)
        if part is None or (entry := self._parts[part]).has_last_word:
            return  # it came twice, or for a room of somebody else
        entry.has_last_word = True
        if isinstance(message, hand_off.Landed):
            entry.landed = message
        self._links.revoke(
            link,
            message.room,
            partial(self._look, entry, message),
            partial(self._apply, part),
            partial(self._not_taken_back, link, part),
        )

    def _look(self, entry: GrantRoom, word: hand_off.Landed | hand_off.Released) -> Event:
        """Compare what arrived with what was sent. In the link's worker."""
        if isinstance(word, hand_off.Released):
            return ReleasedArrived(None if word.error is None else error_of_far_side(word.error))
        if not word.checksums or not self._is_verified:
            return LandedArrived()
        if not (fault := entry.verify(word, self._layout, self._region)):
            return LandedArrived()
        log.warning(
            "kv_push.corrupted",
            room=word.room,
            reason=fault,
            see="tandem docs errors#kv_corrupted",
        )
        return CorruptedArrived(KVCorrupted(fault))

    def _not_taken_back(self, link: PrefillLink, part: Part, error: TandemError) -> None:
        """Only a fence makes these pages safe now."""
        self._apply(part, LinkLost(error))
        self._links.drop(link, error)

    def _apply(self, part: Part, event: Event) -> None:
        entry = self._parts.get(part)
        if entry is None:
            return  # over, and forgotten: this crossed with the last word
        self._num_corrupted += isinstance(event, CorruptedArrived)
        for action in entry.session.apply(event):
            self._told[action] += 1
            self._act(part, entry, action)
        if entry.session.is_over:
            del self._parts[part]
            if self._rooms[part.room].has_ended:
                del self._rooms[part.room]

    def _act(self, part: Part, entry: GrantRoom, action: Action) -> None:
        error = entry.session.error or PeerLost("prefill gave the request up")
        room, fan_in = part.room, self._rooms[part.room].fan_in
        match action:
            case Action.PERMIT:
                self._links.permit(entry.link, room, entry.page_ids)
            case Action.SEND_GRANT:
                now_s, parts = self._clock(), self._rooms[room]
                entry.deadline_s = now_s + self._timeouts.landed_s
                parts.granted_s = now_s if parts.granted_s is None else parts.granted_s
                self._send_grant(room, entry)
            case Action.SEND_WITHDRAW:
                self._send_withdraw(room, entry, error)
            case Action.REVOKE:
                pass  # it is done before the last word is looked at: see `_hear`
            case Action.FENCE:
                pass  # the whole link is: `PrefillLinks.drop` fences it when all its rooms know
            case Action.TELL_LANDED:
                self._tell(room, fan_in.ended(part.number))
            case Action.TELL_FAILED:
                self._tell(room, fan_in.failed(part.number, error))
            case Action.TELL_LOST:
                self._tell(room, fan_in.lost(error))
            case Action.TELL_SAFE:
                self._tell(room, fan_in.ended(part.number))
            case _:
                raise AssertionError(action)

    def _tell(self, room: Room, actions: Sequence[GroupAction]) -> None:
        """Do what follows from what one part said."""
        entry = self._rooms[room]
        error = entry.fan_in.error or PeerLost("prefill gave the request up")
        is_over = GroupAction.TELL_ENDED in actions
        for action in actions:
            match action:
                case GroupAction.END_OTHERS:
                    self._control.post(partial(self._end_parts, room, error))
                case GroupAction.TELL_LOST:
                    self._outbox.put(Failed(room, error) if is_over else Lost(room, error))
                case GroupAction.TELL_DONE:
                    if entry.granted_s is not None:
                        self.times.granted_seconds.observe(self._clock() - entry.granted_s)
                    self._tell_landed(room, entry.first)
                case GroupAction.TELL_ENDED if GroupAction.TELL_LOST not in actions:
                    self._outbox.put(Safe(room))

    def _give_up(self, room: Room, why: TandemError) -> None:
        entry = self._rooms.get(room)
        if entry is not None and entry.fan_in.give_up():
            self._end_parts(room, why)

    def _end_parts(self, room: Room, why: TandemError) -> None:
        entry = self._rooms.get(room)
        for part in () if entry is None else entry.parts:
            self._apply(part, WithdrawAsked(why))

    def _send_grant(self, room: Room, entry: GrantRoom) -> None:
        grant = hand_off.Grant(
            epoch=self._epoch,
            room=room,
            page_ids=list(entry.page_ids),
            have_tokens=entry.have_tokens,
        )
        self._links.send(entry.link, grant)

    def _send_withdraw(self, room: Room, entry: GrantRoom, error: TandemError) -> None:
        # It waits for the link's jobs. A link whose jobs take longer than this hangs, and is dropped.
        entry.deadline_s = self._clock() + self._timeouts.landed_s
        withdraw = hand_off.Withdraw(epoch=self._epoch, room=room, error=error.info())
        self._links.send(entry.link, withdraw)

        def sent() -> None:
            entry.deadline_s = self._clock() + self._timeouts.released_s

        entry.link.worker.after(sent)

    def _tell_landed(self, room: Room, entry: GrantRoom) -> None:
        landed = entry.landed
        assert landed is not None
        self._received_bytes += len(entry.page_ids) * self._layout.page_bytes
        self._saved_bytes += entry.have_tokens * self._layout.all_heads_bytes
        self._outbox.put(
            Landed(
                room, landed.first_token, landed.seed, landed.cached_tokens, landed.first_logprobs
            )
        )


def _too_late(entry: GrantRoom) -> TransferTimeout:
    if entry.has_last_word:
        return TransferTimeout("the transport did not take the pages back in time")
    return TransferTimeout("prefill did not push in time")
