"""What a role asks of its transfer agent, whether that is one or one on every rank."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from typing_extensions import override

from tandem.kvtransfer.events import ReceiverEvent, SenderEvent
from tandem.kvtransfer.layer_push import PageRun, Wrote
from tandem.kvtransfer.receiver import ReceiverStatistics
from tandem.kvtransfer.sender import SenderStatistics
from tandem.wire.errors import TandemError
from tandem.wire.generation import TokenLogprobs
from tandem.wire.ids import Room


class SenderRank(Protocol):
    """Prefill's end of one rank, as `PrefillAgent` describes it."""

    def expect(self, room: Room) -> None:
        """See `PrefillAgent.expect`."""
        ...

    def push(self, room: Room, page_ids: Sequence[int], first_page_index: int) -> None:
        """See `PrefillAgent.push`."""
        ...

    def push_by_layer(self, runs: Sequence[PageRun]) -> Wrote:
        """See `PrefillAgent.push_by_layer`."""
        ...

    def finish(self, room: Room, first_token: int, seed: int, cached_tokens: int = 0) -> None:
        """See `PrefillAgent.finish`."""
        ...

    def abort(self, room: Room, error: TandemError | None = None) -> None:
        """See `PrefillAgent.abort`."""
        ...

    def events(self) -> Iterator[SenderEvent]:
        """See `PrefillAgent.events`."""
        ...


class Sender(SenderRank, Protocol):
    """Prefill's end, which the role owns."""

    @override
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
        ...

    def statistics(self) -> SenderStatistics:
        """See `PrefillAgent.statistics`."""
        ...

    def close(self) -> None:
        """See `PrefillAgent.close`."""
        ...


class ReceiverRank(Protocol):
    """Decode's end of one rank, as `DecodeAgent` describes it."""

    def request(
        self,
        room: Room,
        bootstrap_host: str,
        bootstrap_port: int,
        page_ids: Sequence[int],
        have_tokens: int = 0,
    ) -> None:
        """See `DecodeAgent.request`."""
        ...

    def withdraw(self, room: Room, error: TandemError | None = None) -> None:
        """See `DecodeAgent.withdraw`."""
        ...

    def events(self) -> Iterator[ReceiverEvent]:
        """See `DecodeAgent.events`."""
        ...


class Receiver(ReceiverRank, Protocol):
    """Decode's end, which the role owns."""

    def statistics(self) -> ReceiverStatistics:
        """See `DecodeAgent.statistics`."""
        ...

    def close(self) -> None:
        """See `DecodeAgent.close`."""
        ...
