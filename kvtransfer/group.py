"""The agents of all ranks of a node as one agent: commands go to every rank, events come from all.

The role speaks to a group as to a single agent and is told the same, with one difference: where a
`DecodeAgent` says `Failed`, a group says `Lost` and, once every rank is safe, `Safe`. What is said
when is the table in `fan_in.py`. Everything here runs in the role's thread.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec
from typing_extensions import override

from tandem.kvtransfer.agent import Receiver, ReceiverRank, Sender, SenderRank
from tandem.kvtransfer.control import Outbox
from tandem.kvtransfer.events import (
    Failed,
    Granted,
    Landed,
    Lost,
    PushDone,
    ReceiverEvent,
    Released,
    Safe,
    SenderEvent,
)
from tandem.kvtransfer.fan_in import GroupAction, GroupState, RoomFanIn
from tandem.kvtransfer.layer_push import PageRun, Wrote
from tandem.kvtransfer.receiver import ReceiverStatistics
from tandem.kvtransfer.sender import SenderStatistics
from tandem.wire.errors import PeerLost, TandemError
from tandem.wire.generation import TokenLogprobs
from tandem.wire.ids import Room


class PrefillGroup:
    """The prefill agents of all ranks; see `PrefillAgent`.

    Args:
        own: Of rank 0.
        others: Of the other ranks, in order.
    """

    def __init__(self, own: Sender, others: Sequence[SenderRank]) -> None:
        self._own = own
        self._ranks: list[SenderRank] = [own, *others]
        self._rooms: dict[Room, RoomFanIn] = {}
        self._have_tokens: dict[Room, int] = {}
        self._pushed: dict[Room, int] = {}
        self._pushed_bytes = 0
        self._outbox: Outbox[SenderEvent] = Outbox(None, (PushDone, Released), Released)

    def expect(self, room: Room) -> None:
        """See `PrefillAgent.expect`."""
        self._outbox.open(room)
        self._rooms[room] = RoomFanIn(len(self._ranks))
        self._pushed[room] = self._have_tokens[room] = 0
        for rank in self._ranks:
            rank.expect(room)

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """See `PrefillAgent.push`."""
        for rank in self._ranks:
            rank.push(room, page_ids, first_page_index)

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """See `PrefillAgent.push_by_layer`. Each rank is told of layers by its own forward."""
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
        """See `PrefillAgent.finish`. What decode is told beside the KV comes from rank 0."""
        self._own.finish(room, first_token, seed, cached_tokens, logprobs=logprobs)
        for rank in self._ranks[1:]:
            rank.finish(room, first_token, seed, cached_tokens)

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """See `PrefillAgent.abort`."""
        if self._outbox.cancel(room) and room in self._rooms:
            self._act(room, self._rooms[room].give_up(), error)

    def events(self) -> Iterator[SenderEvent]:
        """See `PrefillAgent.events`."""
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                self._hear(number, event)
        return self._outbox.take()

    def statistics(self) -> SenderStatistics:
        """Return those of rank 0, with the bytes that all ranks pushed for rooms that are done."""
        own = self._own.statistics()
        saved_bytes = own.saved_bytes * len(self._ranks)
        return msgspec.structs.replace(
            own, pushed_bytes=self._pushed_bytes, saved_bytes=saved_bytes
        )

    def close(self) -> None:
        """Close rank 0's agent; the others end with their ranks."""
        self._own.close()

    def _hear(self, rank: int, event: SenderEvent) -> None:
        fan_in = self._rooms[event.room]
        self._act(event.room, self._count(fan_in, rank, event), fan_in.error)

    def _count(self, fan_in: RoomFanIn, rank: int, event: SenderEvent) -> list[GroupAction]:
        match event:
            case Granted():
                self._have_tokens[event.room] = event.have_tokens
                return fan_in.granted(rank)
            case PushDone():
                self._pushed[event.room] += event.pushed_bytes
                return fan_in.ended(rank)
            case Released():
                return fan_in.failed(rank, event.error)

    def _act(self, room: Room, actions: Sequence[GroupAction], error: TandemError | None) -> None:
        fan_in = self._rooms[room]
        for action in actions:
            match action:
                case GroupAction.TELL_GRANTED:
                    self._outbox.put(Granted(room, self._have_tokens[room]))
                case GroupAction.END_OTHERS:
                    for rank in fan_in.live_ranks:
                        self._ranks[rank].abort(room, error)
                case GroupAction.TELL_LOST:
                    pass  # prefill's pages are in use until the end, whatever the end
                case GroupAction.TELL_DONE:
                    self._pushed_bytes += self._pushed[room]
                    self._outbox.put(PushDone(room, self._pushed[room]))
                case GroupAction.TELL_ENDED:
                    self._outbox.put(Released(room, fan_in.error))
        if fan_in.state is GroupState.OVER:
            del self._rooms[room], self._pushed[room], self._have_tokens[room]

    @override
    def __repr__(self) -> str:
        return f"PrefillGroup({len(self._ranks)} ranks, {len(self._rooms)} rooms)"


class DecodeGroup:
    """The decode agents of all ranks; see `DecodeAgent`.

    Args:
        own: Of rank 0.
        others: Of the other ranks, in order.
    """

    def __init__(self, own: Receiver, others: Sequence[ReceiverRank]) -> None:
        self._own = own
        self._ranks: list[ReceiverRank] = [own, *others]
        self._rooms: dict[Room, RoomFanIn] = {}
        self._landed: dict[Room, Landed] = {}
        self._outbox: Outbox[ReceiverEvent] = Outbox(None, (Landed, Safe), Safe)

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """See `DecodeAgent.request`."""
        self._outbox.open(room)
        self._rooms[room] = RoomFanIn(len(self._ranks))
        for rank in self._ranks:
            rank.request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """See `DecodeAgent.withdraw`."""
        if self._outbox.cancel(room) and room in self._rooms:
            self._act(room, self._rooms[room].give_up(), error)

    def events(self) -> Iterator[ReceiverEvent]:
        """See `DecodeAgent.events`."""
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                self._hear(number, event)
        return self._outbox.take()

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

    def _hear(self, rank: int, event: ReceiverEvent) -> None:
        fan_in = self._rooms[event.room]
        self._act(event.room, self._count(fan_in, rank, event), fan_in.error)

    def _count(self, fan_in: RoomFanIn, rank: int, event: ReceiverEvent) -> list[GroupAction]:
        match event:
            case Landed():
                if rank == 0:  # all say the same of the prompt, and rank 0 the most
                    self._landed[event.room] = event
                return fan_in.ended(rank)
            case Safe():
                return fan_in.ended(rank)
            case Failed():
                return fan_in.failed(rank, event.error)
            case Lost():
                return fan_in.lost(event.error)

    def _act(self, room: Room, actions: Sequence[GroupAction], error: TandemError | None) -> None:
        fan_in = self._rooms[room]
        tell: dict[GroupAction, Callable[[], ReceiverEvent]] = {
            GroupAction.TELL_LOST: lambda: Lost(
                room, fan_in.error or PeerLost("a rank of prefill gave the request up")
            ),
            GroupAction.TELL_DONE: lambda: self._landed[room],
            GroupAction.TELL_ENDED: lambda: Safe(room),
        }
        for action in actions:
            if action is GroupAction.END_OTHERS:
                for rank in fan_in.live_ranks:
                    self._ranks[rank].withdraw(room, error)
            else:
                self._outbox.put(tell[action]())
        if fan_in.state is GroupState.OVER:
            self._rooms.pop(room)
            self._landed.pop(room, None)

    @override
    def __repr__(self) -> str:
        return f"DecodeGroup({len(self._ranks)} ranks, {len(self._rooms)} rooms)"
