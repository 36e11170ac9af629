"""Messages from an engine process to edge workers: tokens in one message per step, failures immediately."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.telemetry.log import get_logger
from tandem.wire.channel import Inbox, Peer
from tandem.wire.errors import (
    Aborted,
    EngineFailed,
    InvalidRequest,
    MessageTooLarge,
    PeerBehind,
    PeerLost,
    TandemError,
)
from tandem.wire.generation import Epoch, Finish, Phase, RequestId, TokenLogprobs
from tandem.wire.messages import (
    AdapterChanged,
    CacheReport,
    FromEngine,
    Measured,
    NodeLoad,
    Pong,
    RequestFailed,
    ToEngine,
    TokenBatch,
    TokenDelta,
)
from tandem.wire.prefixes import PrefixJournal, pack_names

log = get_logger(__name__)

# Pings after which an edge worker has certainly read a message. The first ping may have crossed the message; the
# edge worker reads its link before it sends the second one.
PINGS_AFTER = 2


@dataclass(frozen=True, slots=True)
class Ticket:
    """One attempt at one edge worker's request.

    `stream`: the edge worker's short id of the token stream; 0: none. Not part of the identity.
    """

    peer: Peer
    request_id: RequestId
    attempt: int
    stream: int = field(default=0, compare=False)


class _Outgoing:
    """Output queued for one edge worker until the end of a pass."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.streams: list[int] = []
        self.indexes: list[int] = []
        self.token_ids: list[int] = []
        # The receiver reads columns before deltas, so tokens after a delta of the same stream must be deltas too.
        self.with_delta: set[int] = set()


class Answers:
    """Sends tokens, failures and reports to edge workers.

    `journal`: journal of the prefix cache; `tiers`: journal of each tier, by name.
    """

    def __init__(
        self,
        inbox: Inbox[ToEngine],
        epoch: Epoch,
        journal: PrefixJournal | None = None,
        tiers: Mapping[str, PrefixJournal] | None = None,
    ) -> None:
        self._inbox = inbox
        self._epoch = epoch
        self._journal, self._tiers = journal, tiers or {}
        self._outgoing: dict[Peer, _Outgoing] = defaultdict(_Outgoing)
        self._unreachable: set[Peer] = set()
        # Failures to resend to peers that were not reading; without them the streams would never end.
        self._unsent: dict[Peer, list[RequestFailed]] = defaultdict(list)
        # Number of pings until a peer has certainly read the last message.
        self._pings_left: dict[Peer, int] = {}
        self.num_failed = 0

    def token(
        self,
        ticket: Ticket,
        index: int,
        token_ids: list[int],
        finish: Finish | None = None,
        cached_tokens: int = 0,
        *,
        cached_by_tier: dict[str, int] | None = None,
        logprobs: TokenLogprobs | None = None,
        phases: list[Phase] | None = None,
    ) -> None:
        """Queue tokens until `flush`."""
        out = self._outgoing[ticket.peer]
        is_ordinary = finish is None and logprobs is None and not cached_tokens and not phases
        if (
            is_ordinary
            and ticket.stream
            and len(token_ids) == 1
            and ticket.stream not in out.with_delta
        ):
            out.streams.append(ticket.stream)
            out.indexes.append(index)
            out.token_ids += token_ids
            return
        self._queue(
            ticket,
            TokenDelta(
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                index=index,
                token_ids=token_ids,
                finish=finish,
                cached_tokens=cached_tokens,
                logprobs=[] if logprobs is None else [logprobs],
                phases=phases or [],
                cached_by_tier=cached_by_tier or {},
            ),
        )

    def prompt_logprobs(
        self, ticket: Ticket, first_position: int, entries: list[TokenLogprobs], index: int
    ) -> None:
        """Queue log-probabilities of prompt positions. `index`: index of the request's next token."""
        self._queue(
            ticket,
            TokenDelta(
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                index=index,
                token_ids=[],
                prompt_index=first_position,
                prompt_logprobs=entries,
            ),
        )

    def fail(self, ticket: Ticket, error: TandemError) -> None:
        """Send a failure of an attempt immediately."""
        # `Aborted` is not a failure: the other half was cancelled first.
        self.num_failed += not isinstance(error, Aborted)
        self._send(
            ticket.peer,
            RequestFailed(
                epoch=self._epoch,
                request_id=ticket.request_id,
                attempt=ticket.attempt,
                error=error.info(),
            ),
        )

    def pong(self, peer: Peer, load: NodeLoad) -> None:
        """Send the node's load."""
        self._send(peer, Pong(epoch=self._epoch, load=load))

    def adapter_changed(self, peer: Peer, number: int, result: str | TandemError) -> None:
        """Answer `LoadAdapter` or `UnloadAdapter` with the adapter's id, or an error."""
        adapter, error = (result, None) if isinstance(result, str) else ("", result.info())
        self._send(
            peer, AdapterChanged(epoch=self._epoch, number=number, adapter=adapter, error=error)
        )

    def prefixes(self, peer: Peer, position: int) -> None:
        """Send the changes of the prefix cache since the edge worker's position; none if it is negative."""
        if self._journal and position >= 0:
            self._changes(peer, self._journal, position)

    def tiers(self, peer: Peer, positions: Mapping[str, int]) -> None:
        """Send the changes of each named tier since the edge worker's position in its journal."""
        for name, position in positions.items():
            journal = self._tiers.get(name)
            if journal is not None and position >= 0:
                self._changes(peer, journal, position, name)

    def _changes(self, peer: Peer, journal: PrefixJournal, position: int, tier: str = "") -> None:
        changes = journal.since(position)
        if changes is not None:
            self._send(
                peer,
                CacheReport(
                    epoch=self._epoch,
                    position=changes.position,
                    is_whole=changes.is_whole,
                    tier=tier,
                    added=pack_names(changes.added),
                    removed=pack_names(changes.removed),
                ),
            )

    def measured(self, peer: Peer, report: Callable[[Epoch], Measured]) -> None:
        """Send the measurements of this process. `report`: makes the message for an epoch."""
        self._send(peer, report(self._epoch))

    def flush(self) -> list[Ticket]:
        """Send the queued output; return the requests that failed because their output cannot be sent."""
        self._send_unsent()
        failed: list[Ticket] = []
        while self._outgoing:
            peer, out = self._outgoing.popitem()
            try:
                self._send(peer, self._batch(out, out.deltas))
            except Exception:  # noqa: BLE001 - raised again for the request that causes it
                failed += self._send_singly(peer, out)
        return failed

    def _batch(self, out: _Outgoing, deltas: list[TokenDelta]) -> TokenBatch:
        return TokenBatch(
            epoch=self._epoch,
            deltas=deltas,
            streams=out.streams,
            indexes=out.indexes,
            token_ids=out.token_ids,
        )

    def _send_singly(self, peer: Peer, out: _Outgoing) -> list[Ticket]:
        """Send the columns, then each delta by itself; return the requests whose delta cannot be sent."""
        if out.streams:
            self._send(peer, self._batch(out, []))
        failed: dict[Ticket, None] = {}
        for delta in out.deltas:
            ticket = Ticket(peer, delta.request_id, delta.attempt)
            try:
                if ticket not in failed:
                    self._send(peer, self._batch(_Outgoing(), [delta]))
            except MessageTooLarge as error:
                failed[ticket] = None
                self.fail(ticket, _too_large(error))
            except Exception:
                log.exception("answers.not_sent", request_id=ticket.request_id)
                failed[ticket] = None
                self.fail(ticket, EngineFailed("the engine failed to send an answer"))
        return list(failed)

    def _queue(self, ticket: Ticket, delta: TokenDelta) -> None:
        out = self._outgoing[ticket.peer]
        out.deltas.append(delta)
        out.with_delta.add(ticket.stream)

    @property
    def are_read(self) -> bool:
        """Whether every live edge worker has read its last message."""
        return not self._pings_left

    def on_ping(self, peer: Peer) -> None:
        """Record a ping from an edge worker."""
        if (num := self._pings_left.pop(peer, 0)) > 1:
            self._pings_left[peer] = num - 1

    def on_lost(self, peer: Peer) -> None:
        """Stop waiting for a lost edge worker to read its messages."""
        self._pings_left.pop(peer, None)

    def take_unreachable(self) -> set[Peer]:
        """Return the edge workers to which sending failed since the last call."""
        unreachable, self._unreachable = self._unreachable, set()
        return unreachable

    def _send(self, peer: Peer, message: FromEngine) -> None:
        if not isinstance(message, Pong | CacheReport | Measured):
            self._pings_left[peer] = PINGS_AFTER
        try:
            self._inbox.send(peer, message)
        except PeerLost as error:
            # The message was dropped, so its requests must fail. The edge worker retries them.
            self._unreachable.add(peer)
            if isinstance(error, PeerBehind) and isinstance(message, RequestFailed):
                self._unsent[peer].append(message)

    def _send_unsent(self) -> None:
        unsent, self._unsent = self._unsent, defaultdict(list)
        for peer, messages in unsent.items():
            for failure in messages:
                self._send(peer, failure)


def _too_large(error: MessageTooLarge) -> InvalidRequest:
    return InvalidRequest(
        f"the log-probabilities of one step of this request take {error.size_bytes} bytes, more than a message "
        f"({error.limit_bytes}); request fewer top log-probabilities"
    )
