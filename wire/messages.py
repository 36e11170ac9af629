"""Every message that two processes exchange, as msgspec structs; `generation` has what they carry.

Rules of change: a new field has a default, none is renamed or reused, unknown ones are ignored; so
one release of difference between two nodes is safe.

```
 edge worker ──▶ engine inbox     StartPrefill StartDecode StartColocated Cancel FlushCache Ping
 engine      ──▶ edge worker      TokenBatch RequestFailed Pong CacheReport
 decode      ──▶ prefill          Hello Grant Withdraw LinkPing         (prefill's bootstrap port)
 prefill     ──▶ decode           Welcome Redirect Refused Landed Released LinkPing
```
"""

from typing import Annotated

import msgspec

from wire.errors import ErrorInfo
from wire.generation import Finish, GenerateRequest, TokenIds, TokenLogprobs
from wire.ids import Epoch, RequestId, Room
from wire.prefix_blocks import MAX_BLOCKS, NAME_BYTES


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


# ── edge worker → engine ─────────────────────────────────────────────────────────────────────────


class StartPrefill(Message, frozen=True, kw_only=True):
    """Run the prompt, push its pages to whoever grants them in `room`, send the first token.

    Attributes:
        stream: Short name of the attempt's tokens on this link, of the edge's choice and used once;
            0 has each token name its request. See `TokenBatch`.
    """

    request: GenerateRequest
    room: Room
    attempt: int = 0
    stream: int = 0


class StartDecode(Message, frozen=True, kw_only=True):
    """Grant pages in `room` to the prefill at this bootstrap address; generate when they landed.

    Attributes:
        stream: See `StartPrefill`.
    """

    request: GenerateRequest
    room: Room
    bootstrap_host: str
    bootstrap_port: int
    attempt: int = 0
    stream: int = 0


class StartColocated(Message, frozen=True, kw_only=True):
    """Run prompt and generation in one engine: `tandem serve`, or a decode node without a prefill.

    Attributes:
        stream: See `StartPrefill`.
    """

    request: GenerateRequest
    attempt: int = 0
    stream: int = 0


class Cancel(Message, frozen=True, kw_only=True):
    """Stop a request, at whatever stage it is. No answer; cancelling the unknown is no error."""

    request_id: RequestId
    attempt: int = 0


class FlushCache(Message, frozen=True, kw_only=True):
    """Drop every cached page without a reader. Answered by `Pong`."""


class Ping(Message, frozen=True, kw_only=True):
    """I am here; tell me your load. An edge silent for 2 s is lost and its requests cancelled.

    Attributes:
        prefix_position: Up to where I know your prefix cache: tell me what changed since, by
            `CacheReport`. -1: I do not want to know.
    """

    prefix_position: int = -1


# ── engine → edge worker ─────────────────────────────────────────────────────────────────────────


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens of one request. Array-like: fields are only ever added at the end.

    Attributes:
        index: Index among the generated tokens of `token_ids[0]`, counted over all attempts.
        cached_tokens: How many prompt tokens came from a prefix cache (on the first delta).
        logprobs: One for each of `token_ids`, when wanted.
        prompt_index: Prompt position of `prompt_logprobs[0]`.
        prompt_logprobs: A run of positions; runs come in order and before the first token.
    """

    request_id: RequestId
    attempt: int
    index: int
    token_ids: TokenIds
    finish: Finish | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_index: int = 0
    prompt_logprobs: list[TokenLogprobs] = []


class TokenBatch(Message, frozen=True, kw_only=True):
    """All tokens of one step for one edge worker.

    Ordinary tokens, of which there is nothing more to say, come as columns: decoding one that way
    takes an edge a third of the time of a delta. Columns come before deltas: a stream with a delta in a
    batch has no ordinary token behind it there.

    Attributes:
        streams: Whose each ordinary token is; see `StartPrefill`.
        indexes: As `TokenDelta.index`, of each.
        token_ids: The tokens.
    """

    epoch: Epoch
    deltas: list[TokenDelta]
    streams: list[int] = []
    indexes: list[int] = []
    token_ids: TokenIds = []


class RequestFailed(Message, frozen=True, kw_only=True):
    """An attempt ended without its tokens; the node holds nothing of it any more."""

    epoch: Epoch
    request_id: RequestId
    error: ErrorInfo
    attempt: int = 0


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself: page states sum to `num_pages`.

    Attributes:
        max_running: Requests that it runs at once, at most; 0: an older node, which does not tell.
        num_edges: Edge workers that have requests here.
        num_own: Requests here of the edge worker that is told; both 0 from older nodes.
        num_refused_transfers: Writes, grants and words about KV that no live grant or link allows.
        num_strangers: Connections to the node's links that were turned away, by their key or the lack of
            one, or hung up while they were greeted.
        num_invalid: Frames that were no message.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_transferring: int = 0
    num_pages: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_held: int = 0
    pages_granted: int = 0
    pages_quarantined: int = 0
    page_size: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    pushed_bytes: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_retracted: int = 0
    received_bytes: int = 0
    saved_bytes: int = 0
    num_corrupted: int = 0
    max_running: int = 0
    num_edges: int = 0
    num_own: int = 0
    num_refused_transfers: int = 0
    num_strangers: int = 0
    num_invalid: int = 0
    # Prompt tokens that wait to be computed; -1: an older node, which does not tell.
    queued_tokens: int = -1


class Pong(Message, frozen=True, kw_only=True):
    """Answer to `Ping`."""

    epoch: Epoch
    load: NodeLoad


# Names of blocks, as `wire.prefix_blocks` packs them.
BlockNames = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCKS * NAME_BYTES)]


class CacheReport(Message, frozen=True, kw_only=True):
    """How to come from the position of a `Ping` to `position`: which blocks were cached and evicted.

    Attributes:
        is_whole: Forget what you knew: `added` is all there is.
    """

    epoch: Epoch
    position: int
    is_whole: bool = False
    added: BlockNames = b""
    removed: BlockNames = b""


# ── decode ↔ prefill, on prefill's bootstrap port ────────────────────────────────────────────────


class TransportOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write into the decode pool, best first in a list of them.

    Attributes:
        descriptor: What the transport's `connect` needs, as JSON-like values of its own.
    """

    name: str
    descriptor: dict[str, str | int | float]


class LayoutInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one page, [layer][k, v][head][token][element], and of the pool."""

    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize: int


# Ranks of one node. No group of GPUs that shares every layer is as large.
MAX_RANKS = 1024

Ports = Annotated[list[int], msgspec.Meta(max_length=MAX_RANKS)]


class Hello(Message, frozen=True, kw_only=True):
    """First message on a link. `fingerprint` names model, dtype and weights.

    Attributes:
        tp_rank: Whose this link is to be; a prefill's bootstrap port knows the ports of its ranks.
        tp_size: Ranks of this node; 1 to 1,024.
        model_kv_heads: Of the whole model; 0 means those in `layout`.
    """

    epoch: Epoch
    fingerprint: str
    layout: LayoutInfo
    offers: list[TransportOffer]
    tp_rank: int = 0
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    model_kv_heads: int = 0


class Welcome(Message, frozen=True, kw_only=True):
    """The link stands; `transport` is the offer that prefill took.

    Attributes:
        more_ports: Of other ranks of prefill, on the same host, that hold heads of this rank.
        first_head: Of those that come over this link, counted in the rank's own pages.
        num_heads: That come over this link; None means all.
    """

    epoch: Epoch
    transport: str
    more_ports: Ports = []
    first_head: int = 0
    num_heads: int | None = None


class Redirect(Message, frozen=True, kw_only=True):
    """The rank of this Hello takes it at another port of the same host.

    Attributes:
        more_ports: See `Welcome`.
    """

    epoch: Epoch
    port: int
    more_ports: Ports = []


class Refused(Message, frozen=True, kw_only=True):
    """The link cannot be: another model or layout, or no common transport."""

    error: ErrorInfo


class Grant(Message, frozen=True, kw_only=True):
    """Prefill may write these pages until `Landed` or `Released`.

    Attributes:
        page_ids: Decode's pages for prompt tokens `have_tokens` and on, in order.
        have_tokens: Prompt tokens decode already holds; a multiple of its page size.
    """

    epoch: Epoch
    room: Room
    page_ids: list[int]
    have_tokens: int = 0


class Withdraw(Message, frozen=True, kw_only=True):
    """Decode wants its pages back; answered by `Released` once no write can follow.

    Attributes:
        error: Why, where it is more than that its client is gone.
    """

    epoch: Epoch
    room: Room
    error: ErrorInfo | None = None


class Landed(Message, frozen=True, kw_only=True):
    """Every page is written. The last word of prefill on this room.

    Attributes:
        first_token: Token of index `num_prior_tokens`, sampled by prefill.
        seed: Key of the request's random draws.
        checksums: xxh3-64 of what was written into each granted page, in the grant's order; empty
            when nothing was hashed.
        checksum_one_in: Of how many slabs (K or V of one layer) one is in `checksums`; which, follows
            from the room.
        end_token: One past the last token written; 0 means the end of the grant.
        first_logprobs: Of the first token, when wanted.
    """

    epoch: Epoch
    room: Room
    first_token: int
    seed: int
    checksums: list[int] = []
    cached_tokens: int = 0
    first_logprobs: TokenLogprobs | None = None
    checksum_one_in: Annotated[int, msgspec.Meta(ge=0)] = 1
    end_token: int = 0


class Released(Message, frozen=True, kw_only=True):
    """Prefill will not write any more and did not finish. The last word on this room."""

    epoch: Epoch
    room: Room
    error: ErrorInfo | None = None


class LinkPing(Message, frozen=True, kw_only=True):
    """Heartbeat, both ways. A peer silent for 2 s is lost."""

    epoch: Epoch


ToEngine = StartPrefill | StartDecode | StartColocated | Cancel | FlushCache | Ping
FromEngine = TokenBatch | RequestFailed | Pong | CacheReport
ToPrefill = Hello | Grant | Withdraw | LinkPing
FromPrefill = Welcome | Redirect | Refused | Landed | Released | LinkPing
