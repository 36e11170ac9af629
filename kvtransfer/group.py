"""The agents of all ranks of a node as one agent: calls go to every rank, events come from all.

The role uses a group as it uses a single agent. `events.py` decides what the role receives when.
Everything here runs in the role's thread.
"""

from collections.abc import Iterator, Sequence

import msgspec

from tandem.kvtransfer.events import LandRooms, PushDone, PushRooms, ReceiverEvent, SenderEvent
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.kvtransfer.receiver import DecodeAgent, ReceiverStatistics
from tandem.kvtransfer.sender import PrefillAgent, SenderStatistics
from tandem.wire.errors import TandemError
from tandem.wire.generation import Room, TokenLogprobs


class PrefillGroup:
    """The prefill agents of all ranks.

    Args:
        own: Of rank 0.
        others: Of the other ranks, in order.
    """

    def __init__(self, own: PrefillAgent, others: Sequence[PrefillAgent]) -> None:
        self._ranks = [own, *others]
        self._rooms = PushRooms(self._end)
        self._pushed_bytes = 0

    def expect(self, room: Room) -> None:
        """A request came: every rank waits for its grant."""
        self._rooms.open(room, len(self._ranks))
        for rank in self._ranks:
            rank.expect(room)

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """Queue own pages on every rank, to be written."""
        for rank in self._ranks:
            rank.push(room, page_ids, first_page_index)

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """A forward begins. The forward of each rank reports its layers to that rank's agent."""
        own, *_others = [rank.push_by_layer(runs) for rank in self._ranks]
        return own

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
        own, *others = self._ranks
        own.finish(room, first_token, seed, cached_tokens, logprobs=logprobs)
        for rank in others:
            rank.finish(room, first_token, seed, cached_tokens)

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """Give a room up on every rank."""
        self._rooms.give_up(room, error)

    def events(self) -> Iterator[SenderEvent]:
        """Yield what happened and was not taken yet, oldest first."""
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                if (told := self._rooms.hear(number, event)) is not None:
                    self._pushed_bytes += told.pushed_bytes if isinstance(told, PushDone) else 0
                    yield told

    def _end(self, room: Room, error: TandemError | None) -> None:
        for rank in self._ranks:
            rank.abort(room, error)

    def statistics(self) -> SenderStatistics:
        """Return those of rank 0, with the bytes of all ranks in rooms that landed."""
        own = self._ranks[0].statistics()
        return msgspec.structs.replace(
            own, pushed_bytes=self._pushed_bytes, saved_bytes=own.saved_bytes * len(self._ranks)
        )

    def close(self) -> None:
        """Close rank 0's agent; the others end with their ranks."""
        self._ranks[0].close()


class DecodeGroup:
    """The decode agents of all ranks.

    Args:
        own: Of rank 0.
        others: Of the other ranks, in order.
    """

    def __init__(self, own: DecodeAgent, others: Sequence[DecodeAgent]) -> None:
        self._ranks = [own, *others]
        self._rooms = LandRooms(self._end)

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """Grant the same pages of every rank."""
        self._rooms.open(room, len(self._ranks))
        for rank in self._ranks:
            rank.request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """Take the pages of every rank back."""
        self._rooms.give_up(room, error)

    def events(self) -> Iterator[ReceiverEvent]:
        """Yield what happened and was not taken yet, oldest first."""
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                if (told := self._rooms.hear(number, event)) is not None:
                    yield told

    def _end(self, room: Room, error: TandemError | None) -> None:
        for rank in self._ranks:
            rank.withdraw(room, error)

    def statistics(self) -> ReceiverStatistics:
        """Return those of rank 0, with the bytes of all ranks, whose pages are of one size."""
        own, num_ranks = self._ranks[0].statistics(), len(self._ranks)
        return msgspec.structs.replace(
            own,
            received_bytes=own.received_bytes * num_ranks,
            saved_bytes=own.saved_bytes * num_ranks,
        )

    def close(self) -> None:
        """Close rank 0's agent; the others end with their ranks."""
        self._ranks[0].close()


Sender = PrefillAgent | PrefillGroup
"""What the role asks of its prefill agent, be it one or one on every rank."""

Receiver = DecodeAgent | DecodeGroup
"""What the role asks of its decode agent, be it one or one on every rank."""
