"""What rank 0 and the other ranks of one node tell each other, over a pipe: both are of one release.

```
 rank 0 ──▶ rank   RankStart (first), Forward, Expect Push FinishPush Abort, Request WithdrawRoom,
                   FetchPages PlacePages AbandonFetch SavePages
 rank 0 ◀── rank   RankReady or RankFailed, then the events of its transfer agent; those of its tiers at any time
```
"""

import msgspec
import numpy as np

from tandem.engine.forward import ForwardInputs
from tandem.kvtier.cost import TierCost
from tandem.kvtransfer import events
from tandem.node.config import NodeConfig
from tandem.wire.errors import ErrorInfo, TandemError, error_from_info
from tandem.wire.ids import Room
from tandem.wire.messages import Message, TierLoad

# ── rank 0 → rank ────────────────────────────────────────────────────────────────────────────────


class RankStart(Message, frozen=True, kw_only=True):
    """What a rank is.

    Attributes:
        config: With `engine.tp_rank` and `engine.device` of this rank.
        store: The file through which the ranks find each other.
    """

    config: NodeConfig
    store: str


class Forward(Message, frozen=True, kw_only=True):
    """Take part in a forward. Arrays are the bytes of those in `ForwardInputs`.

    Attributes:
        num_sampled: Length of the sampled ids that are broadcast first; 0 for none.
    """

    token_ids: bytes
    sources: bytes
    positions: bytes
    query_starts: bytes
    kv_lens: bytes
    page_table: bytes
    num_decodes: int
    logit_rows: bytes
    num_sampled: int = 0


class Expect(Message, frozen=True, kw_only=True):
    """See `Sender.expect`."""

    room: Room


class Push(Message, frozen=True, kw_only=True):
    """See `Sender.push`."""

    room: Room
    page_ids: list[int]
    first_page_index: int


class RunOfPages(msgspec.Struct, frozen=True, kw_only=True):
    """See `PageRun`."""

    room: Room
    page_ids: list[int]
    first_page_index: int


class PushByLayer(Message, frozen=True, kw_only=True):
    """See `Sender.push_by_layer`; about the `Forward` that follows."""

    runs: list[RunOfPages]


class FinishPush(Message, frozen=True, kw_only=True):
    """See `Sender.finish`."""

    room: Room
    first_token: int
    seed: int
    cached_tokens: int


class Abort(Message, frozen=True, kw_only=True):
    """See `Sender.abort`."""

    room: Room
    error: ErrorInfo | None = None


class Request(Message, frozen=True, kw_only=True):
    """See `Receiver.request`."""

    room: Room
    bootstrap_host: str
    bootstrap_port: int
    page_ids: list[int]
    have_tokens: int


class WithdrawRoom(Message, frozen=True, kw_only=True):
    """See `Receiver.withdraw`."""

    room: Room
    error: ErrorInfo | None = None


class FetchPages(Message, frozen=True, kw_only=True):
    """See `TierStack.fetch`.

    Attributes:
        digests: Of rank 0's keys; see `shard_key`.
    """

    number: int
    digests: list[bytes]


class PlacePages(Message, frozen=True, kw_only=True):
    """See `TierStack.place`."""

    number: int
    page_ids: list[int]


class AbandonFetch(Message, frozen=True, kw_only=True):
    """See `TierStack.abandon`."""

    number: int


class SavePages(Message, frozen=True, kw_only=True):
    """See `TierStack.save`; `SavedHere` follows in any case.

    Attributes:
        digests: As in `FetchPages`.
    """

    number: int
    digests: list[bytes]
    page_ids: list[int]


ToSender = Expect | PushByLayer | Push | FinishPush | Abort
ToReceiver = Request | WithdrawRoom
ToTiers = FetchPages | PlacePages | AbandonFetch | SavePages
ToRank = RankStart | Forward | ToSender | ToReceiver | ToTiers

# ── rank → rank 0 ────────────────────────────────────────────────────────────────────────────────


class RankReady(Message, frozen=True, kw_only=True):
    """The shard is loaded and the agent listens; the port is 0 where there is none."""

    bootstrap_port: int = 0


class RankFailed(Message, frozen=True, kw_only=True):
    """The rank could not start."""

    error: ErrorInfo


class GrantedHere(Message, frozen=True, kw_only=True):
    """See `events.Granted`."""

    room: Room
    have_tokens: int


class PushedHere(Message, frozen=True, kw_only=True):
    """See `events.PushDone`."""

    room: Room
    pushed_bytes: int


class ReleasedHere(Message, frozen=True, kw_only=True):
    """See `events.Released`."""

    room: Room
    error: ErrorInfo | None = None


class LandedHere(Message, frozen=True, kw_only=True):
    """See `events.Landed`."""

    room: Room
    first_token: int
    seed: int
    cached_tokens: int


class FailedHere(Message, frozen=True, kw_only=True):
    """See `events.Failed`."""

    room: Room
    error: ErrorInfo


class LostHere(Message, frozen=True, kw_only=True):
    """See `events.Lost`."""

    room: Room
    error: ErrorInfo


class SafeHere(Message, frozen=True, kw_only=True):
    """See `events.Safe`."""

    room: Room


class FetchedHere(Message, frozen=True, kw_only=True):
    """See `tandem.kvtier.events.Fetched`."""

    number: int
    num_pages: int
    by_tier: dict[str, int]


class PlacedHere(Message, frozen=True, kw_only=True):
    """See `tandem.kvtier.events.Placed`."""

    number: int
    is_whole: bool


class SavedHere(Message, frozen=True, kw_only=True):
    """See `tandem.kvtier.events.Saved`."""

    number: int


class TiersHere(Message, frozen=True, kw_only=True):
    """What this rank's tiers hold and did; see `TierStack.loads` and `costs`. Told now and then."""

    loads: list[TierLoad]
    costs: dict[str, TierCost]


FromSender = GrantedHere | PushedHere | ReleasedHere
FromReceiver = LandedHere | FailedHere | LostHere | SafeHere
FromAgent = FromSender | FromReceiver
FromTiers = FetchedHere | PlacedHere | SavedHere | TiersHere
FromRank = RankReady | RankFailed | FromAgent | FromTiers

# ── what they carry ──────────────────────────────────────────────────────────────────────────────


def pack_inputs(inputs: ForwardInputs, num_sampled: int) -> Forward:
    """Return a forward as a message."""
    return Forward(
        token_ids=inputs.token_ids.tobytes(),
        sources=inputs.sources.tobytes(),
        positions=inputs.positions.tobytes(),
        query_starts=inputs.query_starts.tobytes(),
        kv_lens=inputs.kv_lens.tobytes(),
        page_table=inputs.page_table.tobytes(),
        num_decodes=inputs.num_decodes,
        logit_rows=inputs.logit_rows.tobytes(),
        num_sampled=num_sampled,
    )


def unpack_inputs(message: Forward) -> ForwardInputs:
    """Return the forward in a message; its arrays may be written to."""

    def ints(data: bytes) -> np.ndarray:
        return np.frombuffer(bytearray(data), np.int64)

    def ints32(data: bytes) -> np.ndarray:
        return np.frombuffer(bytearray(data), np.int32)

    kv_lens = ints32(message.kv_lens)
    return ForwardInputs(
        token_ids=ints(message.token_ids),
        sources=ints(message.sources),
        positions=ints(message.positions),
        query_starts=ints32(message.query_starts),
        kv_lens=kv_lens,
        page_table=ints32(message.page_table).reshape(len(kv_lens), -1),
        num_decodes=message.num_decodes,
        logit_rows=ints(message.logit_rows),
    )


def pack_sender_event(event: events.SenderEvent) -> FromSender:
    """Return an event of a prefill agent as a message."""
    match event:
        case events.Granted():
            return GrantedHere(room=event.room, have_tokens=event.have_tokens)
        case events.PushDone():
            return PushedHere(room=event.room, pushed_bytes=event.pushed_bytes)
        case events.Released():
            return ReleasedHere(room=event.room, error=pack_error(event.error))


def unpack_sender_event(message: FromSender) -> events.SenderEvent:
    """Return the event in a message."""
    match message:
        case GrantedHere():
            return events.Granted(message.room, message.have_tokens)
        case PushedHere():
            return events.PushDone(message.room, message.pushed_bytes)
        case ReleasedHere():
            return events.Released(message.room, unpack_error(message.error))


def pack_receiver_event(event: events.ReceiverEvent) -> FromReceiver:
    """Return an event of a decode agent as a message."""
    match event:
        case events.Landed():
            return LandedHere(
                room=event.room,
                first_token=event.first_token,
                seed=event.seed,
                cached_tokens=event.cached_tokens,
            )
        case events.Failed():
            return FailedHere(room=event.room, error=event.error.info())
        case events.Lost():
            return LostHere(room=event.room, error=event.error.info())
        case events.Safe():
            return SafeHere(room=event.room)


def unpack_receiver_event(message: FromReceiver) -> events.ReceiverEvent:
    """Return the event in a message."""
    match message:
        case LandedHere():
            return events.Landed(
                message.room, message.first_token, message.seed, message.cached_tokens
            )
        case FailedHere():
            return events.Failed(message.room, error_from_info(message.error))
        case LostHere():
            return events.Lost(message.room, error_from_info(message.error))
        case SafeHere():
            return events.Safe(message.room)


def pack_error(error: TandemError | None) -> ErrorInfo | None:
    """Return an error, if there is one, in its travelling form."""
    return None if error is None else error.info()


def unpack_error(info: ErrorInfo | None) -> TandemError | None:
    """Return the error, if there is one, that `info` describes."""
    return None if info is None else error_from_info(info)
