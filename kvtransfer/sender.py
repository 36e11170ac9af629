"""Prefill's end: owns the bootstrap port, takes grants, pushes pages, says what landed.

The role calls `expect`, then `push` as pages (or layers of them) are computed and `finish` after the
last; it may do so before the grant has come, the agent keeps it. Then one of

- `PushDone`: all of it is in decode's memory and decode has been told. The pages may be reused.
- `Released`: nothing more will be written, decode has been told. The pages may be reused.

ends the room. `abort` may be called at any time before that, and then `Released(room)` follows. What
happens in between, and what decode and the network may do to it, is the table in `session.py`; it
holds for each part of the room, that is for each rank of decode that our heads go to (`parts.py`).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from typing_extensions import override

from tandem.kvtransfer.bootstrap import BootstrapPort, DecodeLink, SenderEnd
from tandem.kvtransfer.checksum import PushSums, Verify, one_in, sampled_slabs
from tandem.kvtransfer.control import ControlThread, Outbox
from tandem.kvtransfer.events import Granted, PushDone, Released, SenderEvent
from tandem.kvtransfer.fan_in import GroupAction
from tandem.kvtransfer.layer_push import LEAST_BYTES, PageRun, Wrote, push_by_layer
from tandem.kvtransfer.parts import Part
from tandem.kvtransfer.push_room import Push, PushRoom, grant_fault
from tandem.kvtransfer.push_rooms import PushRooms
from tandem.kvtransfer.session import (
    AbortAsked,
    Action,
    Event,
    Expected,
    GrantArrived,
    LinkLost,
    SenderState,
    TimedOut,
    WithdrawArrived,
    WriteFailed,
    WritesDone,
    WritesStopped,
)
from tandem.kvtransfer.transfer_times import SenderTimes
from tandem.kvtransfer.transports.base import Connection
from tandem.telemetry.log import get_logger
from tandem.wire import hand_off, messages
from tandem.wire.channel import Inbox, Waker
from tandem.wire.errors import (
    Aborted,
    PeerLost,
    TandemError,
    TransferRefused,
    TransferTimeout,
    error_of_far_side,
)
from tandem.wire.generation import TokenLogprobs
from tandem.wire.heartbeat import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.ids import Room
from tandem.wire.keys import ChannelKey

log = get_logger("kvtransfer.sender")

# States in which the other half of the room is awaited, so that time counts.
WAITS = (SenderState.WAITING, SenderState.GRANTED_EARLY, SenderState.REFUSING)


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderTimeouts:
    """How long one half of a room waits for the other.

    Attributes:
        grant_s: A request without a grant: decode may be queueing for pages.
        early_grant_s: A grant without a request, whose pages nobody else can use meanwhile.
        heartbeat: Of the links.
    """

    grant_s: float = 30.0
    early_grant_s: float = 30.0
    heartbeat: Heartbeat = DEFAULT_HEARTBEAT


class SenderStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill agent holds now and has done so far. Each part of a room counts.

    Attributes:
        num_refused: Links and grants of decode nodes that cannot be.
        num_strangers: Connections to the bootstrap port that did not get as far as a word.
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


@contextmanager
def _no_byte_under_way() -> Iterator[None]:
    """Raise `TransferRefused` for any error of our checksums: every write before has returned.

    It fails this room, where another error would cost the link.
    """
    try:
        yield
    except Exception as error:
        log.exception("kv_checksum.failed")
        raise TransferRefused(f"prefill cannot compute checksums: {error!r}") from error


class PrefillAgent:
    """The sending end of every room of one prefill node.

    `expect`, `push`, `finish`, `abort` and `events` belong to one thread, the role's loop; none of
    them blocks. `statistics` may be called from any.

    Args:
        address: Where decode nodes reach us, such as `tcp://0.0.0.0:8998`.
        end: Who we are and the pool we push from.
        waker: Rung whenever `events` has something.
        key: Requires decode nodes to know the cluster's secret.
        least_bytes: Of a push of layers; see `layer_push`.
        verify: How much of each page is in the checksums that decode is given, to find a corrupted one.

    Attributes:
        port: The bootstrap port that was bound.
        times: How long hand-offs took.

    Raises:
        ConfigInvalid: The address is in use or not ours.
    """

    def __init__(
        self,
        address: str,
        end: SenderEnd,
        *,
        waker: Waker | None = None,
        key: ChannelKey | None = None,
        timeouts: SenderTimeouts | None = None,
        verify: Verify = "sample",
        least_bytes: int = LEAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._clock = end, clock
        self._timeouts = timeouts or SenderTimeouts()
        self._one_in, self._least_bytes = one_in(verify), least_bytes
        heartbeat = self._timeouts.heartbeat
        inbox: Inbox[hand_off.ToPrefill] = Inbox(address, hand_off.ToPrefill, key, heartbeat)
        self.port = inbox.port
        self._bootstrap = BootstrapPort(
            end, inbox, heartbeat=heartbeat, clock=clock, heard=self._hear, lost=self._lose
        )
        self._outbox: Outbox[SenderEvent] = Outbox(waker, (PushDone, Released), Released)
        self._rooms = PushRooms()
        self.times = SenderTimes()
        self._num_landed = self._num_released = self._pushed_bytes = self._saved_bytes = 0
        self._control = ControlThread("kv-prefill", self._turn)
        self._control.start()

    # ── the role's side ──────────────────────────────────────────────────────────────────────────

    def expect(self, room: Room) -> None:
        """A request came: wait for its grant."""
        self._outbox.open(room)
        now_s = self._clock()
        self._control.post(lambda: self._expect(room, now_s))

    def push(
        self,
        room: Room,
        page_ids: Sequence[int],
        first_page_index: int,
        layers: range | None = None,
    ) -> None:
        """Queue own pages, that hold the prompt's pages `first_page_index` on, to be written.

        They must keep their content until `PushDone` or `Released`. What decode already has is
        left out.

        Args:
            layers: Those that are computed, from the first not pushed yet on; None means all. The
                same pages are then pushed again with their other layers: what went before is left out.
        """
        push = Push(page_ids, first_page_index, layers)
        now_s = self._clock()
        self._control.post(lambda: self._push_room(room, push, now_s))

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """A forward begins that completes these pages: return what it tells of its layers.

        They are pushed while it runs. At its end `push` is called for each run as ever: it adds what
        is left.
        """
        return push_by_layer(self.push, runs, self._end.layout, self._least_bytes)

    def finish(
        self,
        room: Room,
        first_token: int,
        seed: int,
        cached_tokens: int = 0,
        *,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Every page was pushed: tell decode as soon as all of them landed."""
        landed = hand_off.Landed(
            epoch=self._end.epoch,
            room=room,
            first_token=first_token,
            seed=seed,
            cached_tokens=cached_tokens,
            first_logprobs=logprobs,
            checksum_one_in=self._one_in,
        )
        now_s = self._clock()
        self._control.post(lambda: self._finish_room(room, landed, now_s))

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """Give a room up; decode is told `error`. `Released` follows. No-op when it is over."""
        if self._outbox.cancel(room):
            why = error or Aborted("prefill gave the request up")
            self._control.post(lambda: self._give_up(room, why))

    def events(self) -> Iterator[SenderEvent]:
        """Yield what happened and was not taken yet, oldest first."""
        return self._outbox.take()

    def statistics(self) -> SenderStatistics:
        """Return what is held now and was done so far."""
        states = self._rooms.states()
        return SenderStatistics(
            num_links=self._bootstrap.num_links,
            num_waiting=states[SenderState.WAITING],
            num_early_grants=states[SenderState.GRANTED_EARLY],
            num_pushing=states[SenderState.PUSHING] + states[SenderState.RELEASING],
            num_landed=self._num_landed,
            num_released=self._num_released,
            num_refused=self._bootstrap.num_refused,
            num_strangers=self._bootstrap.num_strangers,
            pushed_bytes=self._pushed_bytes,
            saved_bytes=self._saved_bytes,
        )

    def close(self) -> None:
        """Hang up on everybody; rooms still open get no last event. Safe to call twice."""
        self._control.stop()
        self._bootstrap.close()

    @override
    def __repr__(self) -> str:
        return f"PrefillAgent(port={self.port}, {self.statistics()})"

    # ── the control thread ───────────────────────────────────────────────────────────────────────

    def _turn(self, waker: Waker) -> None:
        self._bootstrap.turn(waker, self._control)
        now_s = self._clock()
        for part, entry in self._rooms.parts():
            if entry.session.state in WAITS and now_s >= entry.deadline_s:
                self._apply(part, TimedOut(TransferTimeout("the other half did not come in time")))

    def _hear(self, link: DecodeLink, message: hand_off.Grant | hand_off.Withdraw) -> None:
        part = Part(message.room, link.part)
        if isinstance(message, hand_off.Grant):
            return self._take_grant(link, message, part)
        entry = self._rooms.part(part)
        if entry is None or entry.link is not link:
            # Over, and forgotten, or never granted over this link: no write of it is under way here.
            word = hand_off.Released(epoch=self._end.epoch, room=message.room)
            return self._bootstrap.send(link, word)
        told = message.error
        why = Aborted("decode withdrew its grant") if told is None else error_of_far_side(told)
        return self._apply(part, WithdrawArrived(why))

    def _lose(self, link: DecodeLink, error: TandemError) -> None:
        self.times.num_lost_links += 1
        for part, entry in self._rooms.parts():
            if entry.link is link:
                self._apply(part, LinkLost(error))

    def _expect(self, room: Room, now_s: float) -> None:
        for part in self._rooms.expect(room, now_s, self._clock() + self._timeouts.grant_s):
            self._apply(part, Expected())

    def _for_parts(self, room: Room, do: Callable[[Part], None]) -> None:
        """Do something for each part; nothing when the room ended while the role computed."""
        entry = self._rooms.room(room)
        for part in () if entry is None else entry.parts:
            do(part)

    def _take_grant(self, link: DecodeLink, grant: hand_off.Grant, part: Part) -> None:
        entry = self._rooms.part(part)
        if entry is not None and entry.grant is not None and entry.link is link:
            # Released would end the first grant at decode, under writes that are still going on.
            self._bootstrap.num_refused += 1
            return self._bootstrap.drop(link, PeerLost("decode granted a room twice"))
        if fault := grant_fault(grant, link.layout) or self._rooms.grant_fault(part, link):
            self._bootstrap.num_refused += 1
            info = TransferRefused(fault).info()
            word = hand_off.Released(epoch=self._end.epoch, room=grant.room, error=info)
            return self._bootstrap.send(link, word)
        deadline_s = self._clock() + self._timeouts.early_grant_s
        entry = self._rooms.granted(part, link, deadline_s)
        entry.link, entry.grant = link, grant
        if self._one_in and link.heads.num_heads:
            slabs = sampled_slabs(grant.room, self._end.layout, self._one_in)
            entry.sums = PushSums(self._end.region, entry.destination, slabs, link.heads)
        return self._apply(part, GrantArrived())

    def _push_room(self, room: Room, push: Push, now_s: float) -> None:
        entry = self._rooms.room(room)
        if entry is not None and entry.times.pushed_s is None:
            entry.times.pushed_s = now_s
        self._for_parts(room, partial(self._push, push=push))

    def _push(self, part: Part, push: Push) -> None:
        entry = self._rooms.part(part)
        if entry is None:
            return  # it ended while the role computed
        if entry.session.state is SenderState.WAITING:
            entry.pending.append(push)
        elif entry.session.state is SenderState.PUSHING:
            self._write(part, entry, push)

    def _write(self, part: Part, entry: PushRoom, push: Push) -> None:
        own, layers = entry.take(push, self._end.layout)
        if not layers:
            return None  # they were pushed while they were computed

        def write(connection: Connection) -> None:
            # This takes seconds for a long prompt between pages of unlike sizes.
            plan = entry.plan(own, layers)
            if not len(plan):
                return  # decode has it all
            connection.write(part.room, plan)
            if entry.sums is not None:
                with _no_byte_under_way():
                    entry.sums.add(own, layers)

        return self._submit(part, entry, write, None)

    def _finish_room(self, room: Room, landed: hand_off.Landed, now_s: float) -> None:
        if (entry := self._rooms.room(room)) is not None:
            entry.times.finished_s = now_s
        self._for_parts(room, partial(self._finish, landed=landed))

    def _finish(self, part: Part, landed: hand_off.Landed) -> None:
        entry = self._rooms.part(part)
        if entry is None:
            return
        entry.landed = landed
        if entry.session.state is SenderState.PUSHING:
            self._conclude(part, entry)

    def _conclude(self, part: Part, entry: PushRoom) -> None:
        """Queue the end behind the writes: checksums, then Landed."""
        try:
            entry.check_complete(self._end.layout.page_size)
        except TransferRefused as error:
            return self._apply(part, WriteFailed(error))

        def sum_up(_connection: Connection) -> None:
            with _no_byte_under_way():
                entry.sum_up(self._end.layout)

        return self._submit(part, entry, sum_up, WritesDone())

    def _submit(
        self, part: Part, entry: PushRoom, job: Callable[[Connection], None], success: Event | None
    ) -> None:
        assert entry.link is not None

        def do(connection: Connection) -> None:
            if entry.refusal is not None:
                raise entry.refusal  # of a job before this one: the room is about to be stopped
            try:
                job(connection)
            except TransferRefused as error:
                entry.refusal = error
                raise

        entry.worker.submit(part.room, do, partial(self._report, part, entry.link, success))

    def _report(
        self, part: Part, link: DecodeLink, success: Event | None, error: TandemError | None
    ) -> None:
        """A worker is done with a job; called from its thread."""
        if isinstance(error, TransferRefused):
            self._control.post(partial(self._apply, part, WriteFailed(error)))
        elif error is not None:
            # Bytes may still be under way: only decode's fence ends them, so no Released may be sent.
            self._control.post(partial(self._bootstrap.drop, link, error))
        elif success is not None:
            self._control.post(partial(self._apply, part, success))

    def _apply(self, part: Part, event: Event) -> None:
        entry = self._rooms.part(part)
        if entry is None:
            return  # over, and forgotten: this crossed with the last word
        before = entry.session.state
        for action in entry.session.apply(event):
            self._act(part, entry, action)
        state = entry.session.state
        if state is SenderState.REFUSING and before is not state:
            entry.deadline_s = self._clock() + self._timeouts.early_grant_s
        if entry.session.is_over:
            self._rooms.end(part)

    def _act(self, part: Part, entry: PushRoom, action: Action) -> None:
        error, room = entry.session.error, self._rooms.room(part.room)
        assert room is not None
        match action:
            case Action.TELL_GRANTED:
                self._tell(part.room, room.fan_in.granted(part.number), entry)
                self._flush(part, entry)
            case Action.STOP_WRITES:
                stopped = partial(self._apply, part, WritesStopped())
                entry.worker.stop(part.room, lambda: self._control.post(stopped))
            case Action.SEND_LANDED:
                assert entry.landed is not None
                self._num_landed += 1
                self._pushed_bytes += entry.pushed_bytes
                self._saved_bytes += (
                    entry.destination.first_token * self._end.layout.all_heads_bytes
                )
                self._send(entry, entry.landed)
            case Action.SEND_RELEASED:
                info = None if error is None else error.info()
                word = hand_off.Released(epoch=self._end.epoch, room=part.room, error=info)
                self._send(entry, word)
            case Action.TELL_PUSHED:
                room.pushed_bytes += entry.pushed_bytes
                self._tell(part.room, room.fan_in.ended(part.number), entry)
            case Action.TELL_RELEASED:
                self._num_released += 1
                self._tell(part.room, room.fan_in.failed(part.number, error), entry)
            case _:
                raise AssertionError(action)

    def _tell(self, room: Room, actions: Sequence[GroupAction], entry: PushRoom) -> None:
        """Do what follows from what one part said."""
        parts = self._rooms.room(room)
        assert parts is not None
        for action in actions:
            match action:
                case GroupAction.TELL_GRANTED:
                    self.times.granted(parts.times, self._clock())
                    self._outbox.put(Granted(room, entry.destination.first_token))
                case GroupAction.END_OTHERS:
                    why = parts.fan_in.error or Aborted("another part of the request ended")
                    self._control.post(partial(self._end_parts, room, why))
                case GroupAction.TELL_LOST:
                    pass  # the own pages are in use until the end, whatever the end
                case GroupAction.TELL_DONE:
                    if parts.pushed_bytes:  # else decode had it all
                        self.times.landed(parts.times, self._clock())
                    self._outbox.put(PushDone(room, parts.pushed_bytes))
                case GroupAction.TELL_ENDED:
                    self._outbox.put(Released(room, parts.fan_in.error))

    def _give_up(self, room: Room, why: TandemError) -> None:
        entry = self._rooms.room(room)
        if entry is not None and not entry.has_ended and entry.fan_in.give_up():
            self._end_parts(room, why)

    def _end_parts(self, room: Room, why: TandemError) -> None:
        entry = self._rooms.room(room)
        if entry is not None and not entry.has_ended:
            self._for_parts(room, lambda part: self._apply(part, AbortAsked(why)))

    def _send(self, entry: PushRoom, message: messages.Message) -> None:
        assert entry.link is not None
        self._bootstrap.send(entry.link, message)

    def _flush(self, part: Part, entry: PushRoom) -> None:
        """Do what the role asked for before the grant came."""
        pending, entry.pending = entry.pending, []
        for push in pending:
            self._push(part, push)
        if entry.landed is not None:
            self._finish(part, entry.landed)
