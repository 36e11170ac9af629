"""The transfer of KV in virtual time: what the agents of `kvtransfer` tell their roles, and when.

```
 decode                                    prefill
 request ── message ──────────────────────▶ Granted
                                            pushes, layer after layer, while the forward runs
                                            finish: all is on its way
 Landed  ◀── bytes by both links, message ──┘ ──▶ PushDone
```

A link carries one thing after the other, at its own speed: a prefill's all its pushes, a decode's all that come.
A push is as slow as the busier of the two. What decode has already does not travel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.kvtransfer.events import (
    Granted,
    Landed,
    PushDone,
    ReceiverEvent,
    Released,
    Safe,
    SenderEvent,
)
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.kvtransfer.receiver import ReceiverStatistics
from tandem.kvtransfer.sender import SenderStatistics
from tandem.plan.agenda import Agenda, NodeClock
from tandem.plan.leaping import MAX_LAYER_PARTS
from tandem.plan.seam import NodeKind, Overheads
from tandem.wire.errors import TandemError
from tandem.wire.generation import TokenLogprobs
from tandem.wire.ids import Room

_NOTHING_SENT = SenderStatistics(
    num_links=0,
    num_waiting=0,
    num_early_grants=0,
    num_pushing=0,
    num_landed=0,
    num_released=0,
    num_refused=0,
    pushed_bytes=0,
    saved_bytes=0,
)
_NOTHING_RECEIVED = ReceiverStatistics(
    num_links=0,
    num_reserving=0,
    num_granted=0,
    num_withdrawn=0,
    num_fencing=0,
    num_landed=0,
    num_failed=0,
    num_corrupted=0,
    num_refused=0,
    received_bytes=0,
    saved_bytes=0,
)


class Link:
    """One direction of a node's link: bytes in, first come first served."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def carry(self, at_s: float, num_bytes: float) -> float:
        """Return when so many bytes that come at a time are through."""
        self._free_s = max(self._free_s, at_s) + num_bytes / self._bytes_per_s
        return self._free_s


@dataclass(slots=True)
class _Room:
    """One hand-off.

    Attributes:
        sender: Whose pages travel.
        first_page: Of the prompt's pages, the first that decode lacks.
        began_s: When the first bytes of it were ready; -1 before.
        sent_s: When the last bytes so far are out of prefill's link.
    """

    receiver: "PlannedReceiver"
    sender: "PlannedSender"
    first_page: int
    num_bytes: float = 0.0
    began_s: float = -1.0
    sent_s: float = 0.0


@dataclass(slots=True)
class Wires:
    """What all agents of a fleet have in common.

    Attributes:
        senders: By the bootstrap port that a prefill's has.
    """

    agenda: Agenda
    overheads: Overheads
    rooms: dict[Room, _Room] = field(default_factory=dict)
    senders: "list[PlannedSender]" = field(default_factory=list)


class PlannedSender:
    """Prefill's end; a `Sender`.

    Args:
        deliver: Has the node act on something, in its next pass.
    """

    def __init__(
        self,
        kind: NodeKind,
        clock: NodeClock,
        wires: Wires,
        deliver: Callable[[Callable[[], None]], None],
    ) -> None:
        self._page_bytes = kind.page_size * kind.kv_bytes_per_token
        self._num_parts = min(kind.num_layers, MAX_LAYER_PARTS)
        self._clock, self._wires, self._deliver = clock, wires, deliver
        self._link = Link(kind.link_bytes_per_s)
        self._expected: set[Room] = set()
        # Told before prefill heard of the request.
        self._early: dict[Room, Granted] = {}
        self._events: list[SenderEvent] = []

    def expect(self, room: Room) -> None:
        """See `PrefillAgent.expect`."""
        self._expected.add(room)
        if (granted := self._early.pop(room, None)) is not None:
            self._events.append(granted)

    def granted(self, event: Granted) -> None:
        """Decode's grant arrives."""
        self._deliver(lambda: self._take(event))

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """See `PrefillAgent.push`; their layers went as they were computed."""

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """See `PrefillAgent.push_by_layer`."""
        going = [(self._wires.rooms[run.room], self._bytes_of(run)) for run in runs]

        def wrote(_layer: int) -> None:
            now = self._clock.now()
            for room, num_bytes in going:
                room.began_s = now if room.began_s < 0 else room.began_s
                room.num_bytes += num_bytes
                room.sent_s = self._link.carry(now, num_bytes)

        return wrote

    def finish(
        self,
        room: Room,
        first_token: int,
        seed: int,
        cached_tokens: int = 0,
        *,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """See `PrefillAgent.finish`."""
        number, wires, now = room, self._wires, self._clock.now()
        self._expected.discard(number)
        found = wires.rooms[number]
        landed = Landed(number, first_token, seed, cached_tokens)
        wires.agenda.at(now, lambda: found.receiver.receive(found, landed))

    def pushed(self, room: Room, num_bytes: float) -> None:
        """Decode has said that it has all."""
        self._deliver(lambda: self._events.append(PushDone(room, round(num_bytes))))

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """See `PrefillAgent.abort`. Only of what no decode has granted: nobody cancels in a plan."""
        self._expected.discard(room)
        self._events.append(Released(room))
        self._deliver(lambda: None)

    def events(self) -> Iterator[SenderEvent]:
        """See `PrefillAgent.events`."""
        events, self._events = self._events, []
        return iter(events)

    def statistics(self) -> SenderStatistics:
        """See `PrefillAgent.statistics`; nobody reads these."""
        return _NOTHING_SENT

    def close(self) -> None:
        """See `PrefillAgent.close`."""

    def _take(self, event: Granted) -> None:
        if event.room in self._expected:
            self._events.append(event)
        else:
            self._early[event.room] = event

    def _bytes_of(self, run: PageRun) -> float:
        """Return the bytes of one part of the layers, of those pages that decode lacks."""
        first = max(run.first_page_index, self._wires.rooms[run.room].first_page)
        num_pages = max(0, run.first_page_index + len(run.page_ids) - first)
        return num_pages * self._page_bytes / self._num_parts


class PlannedReceiver:
    """Decode's end; a `Receiver`.

    Args:
        deliver: See `PlannedSender`.
    """

    def __init__(
        self,
        kind: NodeKind,
        clock: NodeClock,
        wires: Wires,
        deliver: Callable[[Callable[[], None]], None],
    ) -> None:
        self._page_size, self._clock, self._wires = kind.page_size, clock, wires
        self._deliver, self._link = deliver, Link(kind.link_bytes_per_s)
        self._events: list[ReceiverEvent] = []
        self._withdrawn: set[Room] = set()
        self.num_granted = 0

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """See `DecodeAgent.request`."""
        self.num_granted += 1
        wires, sender = self._wires, self._wires.senders[bootstrap_port]
        wires.rooms[room] = _Room(self, sender, have_tokens // self._page_size)
        event = Granted(room, have_tokens)
        wires.agenda.at(
            self._clock.now() + wires.overheads.message_s, lambda: sender.granted(event)
        )

    def receive(self, room: _Room, landed: Landed) -> None:
        """Prefill has given all of a room to its link."""
        wires = self._wires
        in_s = self._link.carry(room.began_s, room.num_bytes) if room.num_bytes else 0.0
        there_s = max(wires.agenda.now, room.sent_s, in_s)
        there_s += wires.overheads.transfer_s + wires.overheads.message_s
        wires.agenda.at(there_s, lambda: self._land(room, landed))

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """See `DecodeAgent.withdraw`: of an answer whose one token prefill gave."""
        self._withdrawn.add(room)

    def events(self) -> Iterator[ReceiverEvent]:
        """See `DecodeAgent.events`."""
        events, self._events = self._events, []
        for event in events:
            if event.room in self._withdrawn:
                self._withdrawn.remove(event.room)
                yield Safe(event.room)
            else:
                yield event

    def statistics(self) -> ReceiverStatistics:
        """See `DecodeAgent.statistics`; nobody reads these."""
        return _NOTHING_RECEIVED

    def close(self) -> None:
        """See `DecodeAgent.close`."""

    def _land(self, room: _Room, landed: Landed) -> None:
        del self._wires.rooms[landed.room]
        room.sender.pushed(landed.room, room.num_bytes)
        self._deliver(lambda: self._events.append(landed))
