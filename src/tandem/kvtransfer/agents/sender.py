"""Prefill's end: owns the bootstrap port, accepts grants, pushes pages, reports landings.

The role calls `expect`, then `push` as pages (or layers of them) are computed, and `finish` after the last
`push`. It may do so before the grant arrives; the agent queues the calls. One of two events ends the room:

- `PushDone`: all KV is in decode's memory and decode has been notified. The pages may be reused.
- `RoomReleased`: nothing more will be written, and decode has been notified. The pages may be reused.

`abort` may be called at any time before that; `RoomReleased(room)` follows. A room has one part for each
decode rank that our heads go to (`sender_rooms.py`); each part follows the table in `session.py`.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from typing_extensions import override

from tandem.kvtransfer.agents.control import ControlThread
from tandem.kvtransfer.agents.sender_links import BootstrapPort, DecodeLink, SenderEnd
from tandem.kvtransfer.agents.sender_rooms import (
    MIN_PUSH_BYTES,
    OnLayerWritten,
    PageRun,
    Push,
    PushPart,
    PushRoom,
    grant_fault,
    push_by_layer,
)
from tandem.kvtransfer.checksum import Verify, is_hashed
from tandem.kvtransfer.events import (
    PushDone,
    PushRooms,
    RoomGranted,
    RoomReleased,
    SenderEvent,
    SenderTimes,
)
from tandem.kvtransfer.session import Action, RoomEvent, SenderState
from tandem.kvtransfer.threads import Poll, poll_until_done
from tandem.telemetry.log import get_logger
from tandem.wire import hand_off
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat, Inbox, Waker
from tandem.wire.errors import (
    Aborted,
    PeerLost,
    TandemError,
    TransferRefused,
    TransferTimeout,
    error_of_other_half,
)
from tandem.wire.generation import Room, TokenLogprobs
from tandem.wire.keys import ChannelKey

log = get_logger("kvtransfer.sender")

# States that wait for the other half of the room, and time out.
STATES_WITH_DEADLINE = (SenderState.WAITING, SenderState.GRANTED_EARLY, SenderState.REFUSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderTimeouts:
    """How long one half of a room waits for the other.

    Attributes:
        grant_s: For a request without a grant: decode may be queueing for pages.
        early_grant_s: For a grant without a request: decode cannot use the pages meanwhile.
        heartbeat: Heartbeat settings of the links.
    """

    grant_s: float = 30.0
    early_grant_s: float = 30.0
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT


class SenderStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of a prefill agent. Each part of a room counts.

    Attributes:
        num_refused: Rejected links and grants of decode nodes.
        num_strangers: Connections to the bootstrap port that failed before the first message.
        ending_s: See `OpenRooms.ending_s`.
    """

    num_links: int
    num_waiting: int
    num_early_grants: int
    num_pushing: int
    num_landed: int
    num_released: int
    num_refused: int
    pushed_bytes: int
    saved_bytes: int
    num_strangers: int = 0
    ending_s: float = 0.0


class PrefillAgent:
    """The sending end of every room of one prefill rank.

    Only one thread, the role's loop, may call `expect`, `push`, `finish`, `abort` and `events`; none of
    them blocks. Any thread may call `statistics`.

    Args:
        address: Address to bind the bootstrap port to, such as `tcp://0.0.0.0:8998`.
        end: Identity of this rank, and the pool to push from.
        waker: Woken whenever `events` has an event.
        key: The cluster's secret, which decode nodes must prove to know.
        verify: Whether decode gets checksums of the pages.
        min_push_bytes: Minimum size of a push of layers; see `sender_rooms.py`.

    Attributes:
        port: The bound bootstrap port.
        times: Histograms of hand-off times.

    Raises:
        ConfigInvalid: The address is in use, or does not belong to this machine.
    """

    def __init__(
        self,
        address: str,
        end: SenderEnd,
        *,
        waker: Waker,
        key: ChannelKey | None = None,
        timeouts: SenderTimeouts | None = None,
        verify: Verify = "auto",
        min_push_bytes: int = MIN_PUSH_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._clock = end, clock
        self._timeouts = timeouts or SenderTimeouts()
        self._is_verified, self._min_push_bytes = is_hashed(verify, end.region), min_push_bytes
        heartbeat = self._timeouts.heartbeat
        self._inbox: Inbox[hand_off.ToPrefill] = Inbox(address, hand_off.ToPrefill, key, heartbeat)
        self.port = self._inbox.port
        self._control = ControlThread("kv-prefill", self._turn)
        self._bootstrap = BootstrapPort(
            end,
            self._inbox,
            self._control,
            heartbeat=heartbeat,
            clock=clock,
            on_message=self._handle,
            on_lost=self._link_lost,
        )
        self._open_rooms = PushRooms(self._end_parts, waker.wake, clock)
        self._rooms: dict[Room, PushRoom] = {}  # each until its last part is over
        self.times = SenderTimes()
        self._done: Counter[Action] = Counter()
        self._pushed_bytes = self._saved_bytes = 0
        self._control.start()

    # ── the role's side ──────────────────────────────────────────────────────────────────────────

    def expect(self, room: Room) -> None:
        """Register a request, and wait for its grant."""
        self._open_rooms.open(room)
        now_s = self._clock()
        self._control.post(lambda: self._expect(room, now_s))

    def push(
        self,
        room: Room,
        page_ids: Sequence[int],
        first_page_index: int,
        layers: range | None = None,
    ) -> None:
        """Queue writes of own pages, which hold the prompt's pages from `first_page_index` on.

        The pages must keep their content until `PushDone` or `RoomReleased`. Tokens that decode already
        has are skipped.

        Args:
            layers: Layers computed so far, from layer 0; None means all. Push the same pages again as more
                layers are computed; layers pushed before are skipped.
        """
        push = Push(page_ids, first_page_index, layers)
        now_s = self._clock()
        self._control.post(lambda: self._push(room, push, now_s))

    def push_by_layer(self, runs: Sequence[PageRun]) -> OnLayerWritten:
        """Return the callback that the forward which completes these pages calls after each layer.

        The pages are pushed while the forward runs. Call `push` for each run at its end as usual; it adds the
        layers that are left.
        """
        return push_by_layer(self.push, runs, self._end.layout, self._min_push_bytes)

    def finish(
        self,
        room: Room,
        first_token: int,
        seed: int,
        cached_tokens: int = 0,
        *,
        logprobs: TokenLogprobs | None = None,
        prompt: int = 0,
    ) -> None:
        """Notify decode once all pages have landed. Call it after the last `push`.

        Args:
            prompt: Id of the prompt, passed on to decode's role; 0: none.
        """
        landed = hand_off.Landed(
            epoch=self._end.epoch,
            room=room,
            first_token=first_token,
            seed=seed,
            cached_tokens=cached_tokens,
            first_logprobs=logprobs,
            prompt=prompt,
        )
        now_s = self._clock()
        self._control.post(lambda: self._finish(room, landed, now_s))

    def recall(self, room: Room) -> None:
        """Forget what was pushed to a room, because its pages lose their content. The role pushes all of it again.

        The grant stays. A write in flight may still copy other content; a later one overwrites it before Landed.
        """
        self._control.post(lambda: self._recall(room))

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """Abort a room; decode receives `error`. `RoomReleased` follows. No-op if the room is over."""
        self._open_rooms.cancel(room, error)

    def events(self) -> Iterator[SenderEvent]:
        """Yield the queued events, oldest first."""
        return self._open_rooms.events()

    def statistics(self) -> SenderStatistics:
        """Return current gauges and cumulative counters."""
        states = Counter(part.session.state for part in self._parts())
        return SenderStatistics(
            num_links=len(self._bootstrap.links),
            num_waiting=states[SenderState.WAITING],
            num_early_grants=states[SenderState.GRANTED_EARLY],
            num_pushing=states[SenderState.PUSHING] + states[SenderState.RELEASING],
            num_landed=self._done[Action.SEND_LANDED],
            num_released=self._done[Action.REPORT_RELEASED],
            num_refused=self._bootstrap.num_refused,
            num_strangers=self._inbox.num_strangers,
            pushed_bytes=self._pushed_bytes,
            saved_bytes=self._saved_bytes,
            ending_s=self._open_rooms.ending_s(),
        )

    def close(self) -> None:
        """Close all links; open rooms get no last event. Safe to call twice."""
        self._control.stop()
        self._bootstrap.close()

    @override
    def __repr__(self) -> str:
        return f"PrefillAgent(port={self.port}, {self.statistics()})"

    def _end_parts(self, room: Room, error: TandemError | None) -> None:
        reason = error or Aborted("prefill cancelled the request")
        self._control.post(lambda: self._abort(room, reason))

    # ── the control thread ───────────────────────────────────────────────────────────────────────

    def _turn(self, waker: Waker) -> None:
        self._bootstrap.turn(waker)
        now_s = self._clock()
        for part in self._parts():
            if part.session.state in STATES_WITH_DEADLINE and now_s >= part.deadline_s:
                error = TransferTimeout("the other half of the request did not arrive in time")
                self._apply(part, RoomEvent.TIMED_OUT, error)

    def _parts(self) -> list[PushPart]:
        """Return all unfinished parts. Any thread may call it."""
        rooms = list(self._rooms.values())
        return [part for room in rooms for part in list(room.parts.values())]

    def _handle(self, link: DecodeLink, message: hand_off.Grant | hand_off.Withdraw) -> None:
        room = self._rooms.get(message.room)
        part = None if room is None else room.parts.get(link.part)
        if isinstance(message, hand_off.Grant):
            return self._take_grant(link, message, part)
        if part is None or part.link is not link:
            # The room is over or was never granted over this link: it has no write in flight here.
            return self._release(link, message.room, None)
        info = message.error
        reason = Aborted("decode withdrew its grant") if info is None else error_of_other_half(info)
        return self._apply(part, RoomEvent.WITHDRAW_ARRIVED, reason)

    def _link_lost(self, link: DecodeLink, error: TandemError) -> None:
        # A refused offer does not count as a lost link: decode may offer a different transport.
        self.times.num_lost_links += not isinstance(error, TransferRefused)
        for part in self._parts():
            if part.link is link:
                self._apply(part, RoomEvent.LINK_LOST, error)

    def _expect(self, room: Room, now_s: float) -> None:
        entry = self._rooms.setdefault(room, PushRoom(room))
        for part in entry.expect(now_s, self._clock() + self._timeouts.grant_s):
            self._apply(part, RoomEvent.EXPECTED)

    def _take_grant(self, link: DecodeLink, grant: hand_off.Grant, known: PushPart | None) -> None:
        if known is not None and known.may_write(link):
            # Drop the link: a Released would end the first grant at decode while writes to its pages are in flight.
            self._bootstrap.num_refused += 1
            return self._bootstrap.drop(link, PeerLost("decode granted a room twice"))
        room = self._rooms.get(grant.room) or PushRoom(grant.room)
        if fault := grant_fault(grant, link.layout) or room.grant_fault(link):
            self._bootstrap.num_refused += 1
            return self._release(link, grant.room, TransferRefused(fault))
        self._rooms[grant.room] = room
        part = room.part_of(link, self._clock() + self._timeouts.early_grant_s)
        part.link, part.grant = link, grant
        return self._apply(part, RoomEvent.GRANT_ARRIVED)

    def _push(self, room: Room, push: Push, now_s: float) -> None:
        if (entry := self._rooms.get(room)) is None:
            return  # the room ended during the forward
        if entry.pushed_s is None:
            entry.pushed_s = now_s
        self._when_granted(entry, lambda part: self._write(part, push))

    def _recall(self, room: Room) -> None:
        if (entry := self._rooms.get(room)) is None:
            return
        for part in entry.parts.values():
            part.recall()
            if part.session.state is SenderState.PUSHING:
                assert part.link is not None
                worker = part.link.worker
                worker.stop(room, lambda: None)
                # After the writes in flight, and before those that follow.
                worker.submit(
                    part.forget_writes, lambda _none: None, partial(self._write_failed, part), room
                )

    def _finish(self, room: Room, landed: hand_off.Landed, now_s: float) -> None:
        if (entry := self._rooms.get(room)) is not None:
            entry.finished_s = now_s
            self._when_granted(entry, lambda part: self._conclude(part, landed))

    def _when_granted(self, room: PushRoom, do: Callable[[PushPart], None]) -> None:
        for part in list(room.parts.values()):
            if part.session.state is SenderState.WAITING:
                part.pending.append(do)
            elif part.session.state is SenderState.PUSHING:
                do(part)

    def _write(self, part: PushPart, push: Push) -> None:
        if (own := part.record(push, self._end.layout)) is None:
            return  # already pushed layer by layer

        def begin() -> Poll | None:
            assert part.link is not None
            poll = None
            # Planning a long prompt between pages of different sizes takes seconds: overlap it with the writes.
            for plan in part.plans(own):
                if poll is not None:
                    poll_until_done(poll)
                poll = part.link.write(part.room.room, plan)
            return poll

        assert part.link is not None
        part.link.worker.write(
            partial(_unless_refused, part, begin), partial(self._write_failed, part), part.room.room
        )

    def _conclude(self, part: PushPart, landed: hand_off.Landed) -> None:
        """Queue checksums and Landed after the writes."""
        part.landed = landed
        try:
            part.check_complete(self._end.layout.page_size)
        except TransferRefused as error:
            return self._apply(part, RoomEvent.WRITE_FAILED, error)

        def add_checksums() -> None:
            try:
                if self._is_verified:
                    part.add_checksums(self._end.region, self._end.layout)
            except Exception as error:
                # All earlier writes have returned, so only the room fails, not the link.
                log.exception("kv_checksum.failed")
                raise TransferRefused(f"prefill cannot compute checksums: {error!r}") from error

        assert part.link is not None
        return part.link.worker.submit(
            partial(_unless_refused, part, add_checksums),
            lambda _none: self._apply(part, RoomEvent.WRITES_DONE),
            partial(self._write_failed, part),
            part.room.room,
        )

    def _write_failed(self, part: PushPart, error: TandemError) -> None:
        if isinstance(error, TransferRefused):
            return self._apply(part, RoomEvent.WRITE_FAILED, error)
        # Bytes may still be in flight, and only decode's fence stops them: do not send Released.
        assert part.link is not None
        return self._bootstrap.drop(part.link, error)

    def _apply(self, part: PushPart, event: RoomEvent, error: TandemError | None = None) -> None:
        if part.session.is_over:
            return  # crossed with the last message
        before = part.session.state
        for action in part.session.apply(event, error):
            self._done[action] += 1
            self._act(part, action)
        state, room = part.session.state, part.room
        if state is SenderState.REFUSING and before is not state:
            part.deadline_s = self._clock() + self._timeouts.early_grant_s
        if part.session.is_over:
            del room.parts[part.number]
            if not room.parts:
                del self._rooms[room.room]

    def _act(self, part: PushPart, action: Action) -> None:
        error, room = part.session.error, part.room.room
        match action:
            case Action.REPORT_GRANTED:
                self._report(part, RoomGranted(room, part.destination.first_token))
                pending, part.pending = part.pending, []
                for do in pending:  # jobs that the role queued before the grant
                    if part.session.state is SenderState.PUSHING:
                        do(part)
            case Action.STOP_WRITES:
                assert part.link is not None
                part.link.worker.stop(room, partial(self._apply, part, RoomEvent.WRITES_STOPPED))
            case Action.SEND_LANDED:
                assert part.landed is not None
                assert part.link is not None
                self._bootstrap.send(part.link, part.landed)
            case Action.SEND_RELEASED:
                assert part.link is not None
                self._release(part.link, room, error)
            case Action.REPORT_PUSHED:
                self._report(part, PushDone(room, part.pushed_bytes))
            case Action.REPORT_RELEASED:
                self._report(part, RoomReleased(room, error))
            case _:
                raise AssertionError(action)

    def _release(self, link: DecodeLink, room: Room, error: TandemError | None) -> None:
        info = None if error is None else error.info()
        self._bootstrap.send(link, hand_off.Released(epoch=self._end.epoch, room=room, error=info))

    def _report(self, part: PushPart, event: SenderEvent) -> None:
        room = part.room
        self._observe(part, event)
        self._open_rooms.report(part.number, room.num_parts, event)

    def _observe(self, part: PushPart, event: SenderEvent) -> None:
        """Record times of events that all parts have reached."""
        now_s, times, room = self._clock(), self.times, part.room
        if isinstance(event, RoomGranted):
            room.num_granted += 1
            if room.num_granted == room.num_parts and room.expected_s is not None:
                times.bootstrap_seconds.observe(now_s - room.expected_s)
        if isinstance(event, PushDone):
            room.num_landed += 1
            room.pushed_bytes += event.pushed_bytes
            if room.num_landed == room.num_parts:
                self._observe_landed(part, now_s)

    def _observe_landed(self, last: PushPart, now_s: float) -> None:
        times, room = self.times, last.room
        self._pushed_bytes += room.pushed_bytes
        self._saved_bytes += last.destination.first_token * self._end.layout.all_heads_bytes
        if room.pushed_bytes and room.pushed_s is not None:  # else decode held the whole prompt
            times.push_seconds.observe(now_s - room.pushed_s)
            if room.finished_s is not None:
                times.push_exposed_seconds.observe(now_s - room.finished_s)

    def _abort(self, room: Room, reason: TandemError) -> None:
        if (entry := self._rooms.get(room)) is not None:
            for part in list(entry.parts.values()):
                self._apply(part, RoomEvent.ABORT_REQUESTED, reason)


T = TypeVar("T")


def _unless_refused(part: PushPart, job: Callable[[], T]) -> T:
    """Run a job of a part; if an earlier job was refused, raise its error instead. Runs on the worker."""
    if part.refusal is not None:
        raise part.refusal
    try:
        return job()
    except TransferRefused as error:
        part.refusal = error
        raise
