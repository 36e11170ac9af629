"""One agent for all ranks of a node: forwards calls to every rank and merges their events.

The role uses a group like a single agent. `events.py` merges the events.
Everything here runs in the role's thread.
"""

from collections.abc import Iterator, Sequence

import msgspec

from tandem.kvtransfer.agents.receiver import DecodeAgent, ReceiverStatistics
from tandem.kvtransfer.agents.sender import PrefillAgent, SenderStatistics
from tandem.kvtransfer.agents.sender_rooms import OnLayerWritten, PageRun
from tandem.kvtransfer.events import LandRooms, PushDone, PushRooms, ReceiverEvent, SenderEvent
from tandem.wire.errors import TandemError
from tandem.wire.generation import Room, TokenLogprobs


class PrefillGroup:
    """The prefill agents of all ranks.

    Args:
        own: The agent of rank 0.
        others: The agents of the other ranks, in order.
    """

    def __init__(self, own: PrefillAgent, others: Sequence[PrefillAgent]) -> None:
        self._ranks = [own, *others]
        self._rooms = PushRooms(self._end)
        self._pushed_bytes = 0

    def expect(self, room: Room) -> None:
        """Register a request on every rank, and wait for its grants."""
        self._rooms.open(room, len(self._ranks))
        for rank in self._ranks:
            rank.expect(room)

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """Queue writes of own pages on every rank."""
        for rank in self._ranks:
            rank.push(room, page_ids, first_page_index)

    def push_by_layer(self, runs: Sequence[PageRun]) -> OnLayerWritten:
        """Return rank 0's callback; the forward of every other rank reports to that rank's own agent."""
        own, *_ = [rank.push_by_layer(runs) for rank in self._ranks]
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
        """Finish the room on every rank. Only rank 0 sends the log-probabilities."""
        own, *others = self._ranks
        own.finish(room, first_token, seed, cached_tokens, logprobs=logprobs)
        for rank in others:
            rank.finish(room, first_token, seed, cached_tokens)

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """Abort a room on every rank."""
        self._rooms.cancel(room, error)

    def events(self) -> Iterator[SenderEvent]:
        """Yield the queued events, oldest first."""
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                if (merged := self._rooms.apply(number, event)) is not None:
                    if isinstance(merged, PushDone):
                        self._pushed_bytes += merged.pushed_bytes
                    yield merged

    def _end(self, room: Room, error: TandemError | None) -> None:
        for rank in self._ranks:
            rank.abort(room, error)

    def statistics(self) -> SenderStatistics:
        """Return the statistics of rank 0, with the bytes of landed rooms summed over all ranks."""
        own = self._ranks[0].statistics()
        return msgspec.structs.replace(
            own,
            pushed_bytes=self._pushed_bytes,
            saved_bytes=own.saved_bytes * len(self._ranks),
            ending_s=self._rooms.ending_s(),
        )

    def close(self) -> None:
        """Close rank 0's agent; the others end with their ranks."""
        self._ranks[0].close()


class DecodeGroup:
    """The decode agents of all ranks.

    Args:
        own: The agent of rank 0.
        others: The agents of the other ranks, in order.
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
        """Grant the same pages on every rank."""
        self._rooms.open(room, len(self._ranks))
        for rank in self._ranks:
            rank.request(room, bootstrap_host, bootstrap_port, page_ids, have_tokens)

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """Withdraw the grant on every rank."""
        self._rooms.cancel(room, error)

    def events(self) -> Iterator[ReceiverEvent]:
        """Yield the queued events, oldest first."""
        for number, rank in enumerate(self._ranks):
            for event in rank.events():
                if (merged := self._rooms.apply(number, event)) is not None:
                    yield merged

    def _end(self, room: Room, error: TandemError | None) -> None:
        for rank in self._ranks:
            rank.withdraw(room, error)

    def statistics(self) -> ReceiverStatistics:
        """Return the statistics of rank 0, with its bytes multiplied by the number of ranks: all have equal pages."""
        own, num_ranks = self._ranks[0].statistics(), len(self._ranks)
        return msgspec.structs.replace(
            own,
            received_bytes=own.received_bytes * num_ranks,
            saved_bytes=own.saved_bytes * num_ranks,
            ending_s=self._rooms.ending_s(),
        )

    def close(self) -> None:
        """Close rank 0's agent; the others end with their ranks."""
        self._ranks[0].close()


Sender = PrefillAgent | PrefillGroup
"""The prefill agent of a role: a single one, or the group of all ranks."""

Receiver = DecodeAgent | DecodeGroup
"""The decode agent of a role: a single one, or the group of all ranks."""
