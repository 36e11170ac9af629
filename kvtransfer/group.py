"""The agents of all ranks of a node as one agent: calls go to every rank, events come from all.

The role uses a group as it uses a single agent. `fan_in.py` decides what the role receives when.
Everything here runs in the role's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from typing_extensions import override

from tandem.kvtransfer.control import Outbox, RoomEvent
from tandem.kvtransfer.events import (
    Failed,
    Landed,
    PushDone,
    ReceiverEvent,
    Released,
    Safe,
    SenderEvent,
)
from tandem.kvtransfer.fan_in import LandFanIn, PushFanIn, RoomFanIn
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.kvtransfer.receiver import ReceiverStatistics
from tandem.kvtransfer.sender import SenderStatistics
from tandem.wire.errors import TandemError
from tandem.wire.generation import Room, TokenLogprobs

E = TypeVar("E", bound=RoomEvent)


class SenderRank(Protocol):
    """What a group asks of the prefill agent of one rank; `PrefillAgent` has the contracts."""

    def expect(self, room: Room) -> None:
        """A request came."""
        ...

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """Queue own pages to be written."""
        ...

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """A forward begins that completes these pages."""
        ...

    def finish(self, room: Room, first_token: int, seed: int, cached_tokens: int = 0) -> None:
        """Every page was pushed."""
        ...

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """Give a room up."""
        ...

    def events(self) -> Iterator[SenderEvent]:
        """Yield what happened and was not taken yet."""
        ...


class Sender(SenderRank, Protocol):
    """What the role asks of its prefill agent, be it one or one on every rank."""

    @override
    def finish(
        self,
        room: Room,
        first_token: int,
        seed: int,
        cached_tokens: int = 0,
        *,
        logprobs: TokenLogprobs | None = None,
    ) -> None: ...

    def statistics(self) -> SenderStatistics:
        """Return what is held now and was done so far."""
        ...

    def close(self) -> None:
        """Hang up on everybody."""
        ...


class ReceiverRank(Protocol):
    """What a group asks of the decode agent of one rank; `DecodeAgent` has the contracts."""

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """Grant pages to a prefill."""
        ...

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """Take the pages back."""
        ...

    def events(self) -> Iterator[ReceiverEvent]:
        """Yield what happened and was not taken yet."""
        ...


class Receiver(ReceiverRank, Protocol):
    """What the role asks of its decode agent, be it one or one on every rank."""

    def statistics(self) -> ReceiverStatistics:
        """Return what is held now and was done so far."""
        ...

    def close(self) -> None:
        """Cut every prefill off."""
        ...


class _Group(ABC, Generic[E]):
    """The rooms of a node, each over all ranks."""

    def __init__(self, outbox: Outbox[E]) -> None:
        self._outbox = outbox
        self._rooms: dict[Room, RoomFanIn[E]] = {}

    @abstractmethod
    def _take(self) -> Iterator[tuple[int, E]]:
        """Yield what happened on each rank and was not taken yet."""

    @abstractmethod
    def _end(self, rank: int, room: Room, error: TandemError | None) -> None:
        """Have a rank end a room."""

    def events(self) -> Iterator[E]:
        """Yield what happened and was not taken yet, oldest first."""
        for rank, event in self._take():
            fan_in = self._rooms[event.room]
            was_ending = fan_in.is_ending
            for each in fan_in.hear(rank, event):
                self._outbox.put(each)
            if fan_in.is_over:
                del self._rooms[event.room]
            elif fan_in.is_ending and not was_ending:
                self._end_all(fan_in, fan_in.error)
        return self._outbox.take()

    def _open(self, fan_in: RoomFanIn[E]) -> None:
        self._outbox.open(fan_in.room)
        self._rooms[fan_in.room] = fan_in

    def _give_up(self, room: Room, error: TandemError | None) -> None:
        fan_in = self._rooms.get(room) if self._outbox.cancel(room) else None
        if fan_in is not None and not fan_in.is_ending:
            fan_in.give_up()
            self._end_all(fan_in, error)

    def _end_all(self, fan_in: RoomFanIn[E], error: TandemError | None) -> None:
        for rank in fan_in.live_members:
            self._end(rank, fan_in.room, error)


class PrefillGroup(_Group[SenderEvent]):
    """The prefill agents of all ranks.

    Args:
        own: Of rank 0.
        others: Of the other ranks, in order.
    """

    def __init__(self, own: Sender, others: Sequence[SenderRank]) -> None:
        super().__init__(Outbox(None, (PushDone, Released), Released))
        self._own = own
        self._ranks: list[SenderRank] = [own, *others]
        self._pushed_bytes = 0

    def expect(self, room: Room) -> None:
        """A request came: every rank waits for its grant."""
        self._open(PushFanIn(room, len(self._ranks)))
        for rank in self._ranks:
            rank.expect(room)

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """Queue own pages on every rank, to be written."""
        for rank in self._ranks:
            rank.push(room, page_ids, first_page_index)

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """A forward begins. The forward of each rank reports its layers to that rank's agent."""
        for rank in self._ranks[1:]:
            rank.push_by_layer(runs)
        return self._own.push_by_layer(runs)

    def finish(
        self,
        room: Room,
        first_token: int,
        seed: int,
        cached_tokens: int = 0,
        *,
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """Every page was pushed. What decode receives beside the KV comes from rank 0."""
        self._own.finish(room, first_token, seed, cached_tokens, logprobs=logprobs)
        for rank in self._ranks[1:]:
            rank.finish(room, first_token, seed, cached_tokens)

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """Give a room up on every rank."""
        self._give_up(room, error)

    def statistics(self) -> SenderStatistics:
        """Return those of rank 0, with the bytes that all ranks pushed and saved."""
        own = self._own.statistics()
        return msgspec.structs.replace(
            own,
            pushed_bytes=self._pushed_bytes,
            saved_bytes=own.saved_bytes * len(self._ranks),
        )

    def close(self) -> None:
        """Close rank 0's agent; the others end with their ranks."""
        self._own.close()

    @override
    def _take(self) -> Iterator[tuple[int, SenderEvent]]:
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                self._pushed_bytes += event.pushed_bytes if isinstance(event, PushDone) else 0
                yield number, event

    @override
    def _end(self, rank: int, room: Room, error: TandemError | None) -> None:
        self._ranks[rank].abort(room, error)


class DecodeGroup(_Group[ReceiverEvent]):
    """The decode agents of all ranks.

    Args:
        own: Of rank 0.
        others: Of the other ranks, in order.
    """

    def __init__(self, own: Receiver, others: Sequence[ReceiverRank]) -> None:
        super().__init__(Outbox(None, (Landed, Failed, Safe), Safe))
        self._own = own
        self._ranks: list[ReceiverRank] = [own, *others]

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """Grant the same pages of every rank."""
        self._open(LandFanIn(room, len(self._ranks)))
        for rank in self._ranks:
            rank.request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """Take the pages of every rank back."""
        self._give_up(room, error)

    def statistics(self) -> ReceiverStatistics:
        """Return those of rank 0, with the bytes of all ranks, whose pages are of one size."""
        own, num_ranks = self._own.statistics(), len(self._ranks)
        return msgspec.structs.replace(
            own,
            received_bytes=own.received_bytes * num_ranks,
            saved_bytes=own.saved_bytes * num_ranks,
        )

    def close(self) -> None:
        """Close rank 0's agent; the others end with their ranks."""
        self._own.close()

    @override
    def _take(self) -> Iterator[tuple[int, ReceiverEvent]]:
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                yield number, event

    @override
    def _end(self, rank: int, room: Room, error: TandemError | None) -> None:
        self._ranks[rank].withdraw(room, error)
