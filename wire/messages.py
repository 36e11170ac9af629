"""Every message between an edge worker and an engine, as msgspec structs; `generation` has what they carry.

Those between a decode and a prefill are in `hand_off`.

Rules of change: a new field has a default, none is renamed or reused, unknown ones are ignored; so
one release of difference between two nodes is safe.

```
 edge worker ──▶ engine inbox     StartPrefill StartDecode StartColocated Cancel FlushCache Ping
 engine      ──▶ edge worker      TokenBatch RequestFailed Pong CacheReport Measured
```
"""

from typing import Annotated

import msgspec

from tandem.telemetry.histogram import Spread
from tandem.wire.errors import ErrorInfo
from tandem.wire.generation import (
    Epoch,
    Finish,
    GenerateRequest,
    Phase,
    RequestId,
    SamplingDefaults,
    SentRoom,
    TokenIds,
    TokenLogprobs,
)
from tandem.wire.prefixes import MAX_BLOCKS, NAME_BYTES


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
    room: SentRoom
    attempt: int = 0
    stream: int = 0


class StartDecode(Message, frozen=True, kw_only=True):
    """Grant pages in `room` to the prefill at this bootstrap address; generate when they landed."""

    request: GenerateRequest
    room: SentRoom
    bootstrap_host: str
    bootstrap_port: int
    attempt: int = 0
    stream: int = 0


class StartColocated(Message, frozen=True, kw_only=True):
    """Run prompt and generation in one engine: `tandem serve`, or a decode node without a prefill."""

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
    """An edge's heartbeat, answered by `Pong`. An edge silent for 2 s is lost and its requests cancelled.

    Attributes:
        prefix_position: Up to where the edge knows the prefix cache; a `CacheReport` has what changed since.
            -1: none is wanted.
        tier_positions: Likewise of the tiers behind it, by name; 0 for one not known yet.
        wants_measures: Whether `Measured` is wanted, too: by the node's own HTTP process.
    """

    prefix_position: int = -1
    tier_positions: dict[str, int] = {}
    wants_measures: bool = False


# ── engine → edge worker ─────────────────────────────────────────────────────────────────────────


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens of one request. Array-like: fields are only ever added at the end.

    Attributes:
        index: Index among the generated tokens of `token_ids[0]`, counted over all attempts.
        cached_tokens: How many prompt tokens came from a prefix cache (on the first delta).
        cached_by_tier: Of these, how many came into it for this request from which tier behind it.
        logprobs: One for each of `token_ids`, when wanted.
        prompt_index: Prompt position of `prompt_logprobs[0]`.
        prompt_logprobs: A run of positions; runs come in order and before the first token.
        phases: Where the time went since the last delta that told of it.
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
    phases: list[Phase] = []
    cached_by_tier: dict[str, int] = {}


class TokenBatch(Message, frozen=True, kw_only=True):
    """All tokens of one step for one edge worker.

    Ordinary tokens, of which there is nothing more to say, come as columns: decoding one that way
    takes an edge a third of the time of a delta. Columns come before deltas: a stream with a delta in a
    batch has no ordinary token behind it there.

    Attributes:
        streams: Whose each ordinary token is; see `StartPrefill`.
        indexes: As `TokenDelta.index`, of each.
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


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a node reports of one tier behind its prefix cache. Counts are of this process's life.

    Attributes:
        name: Of the tier, such as `host`; unique on a node.
        store: Equal on two nodes exactly when what one puts the other gets. Empty: the node's own.
        state: `up`; `backing_off` after a failure; `full` when it takes nothing.
        num_pages: In it, as far as this node knows.
        limit_bytes: 0: the store's own limit.
        hit_tokens: Prompt tokens that came from it into the pool.
        missed_tokens: Prompt tokens that were looked for in it and were not there.
        late_tokens: Prompt tokens that did not come in time.
        num_corrupted: Entries that were not what was put, and were removed.
        token_cost: Time to bring a token from it by the time to compute one. -1: not known yet.
    """

    name: str
    store: str = ""
    state: str = "up"
    num_pages: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0
    late_tokens: int = 0
    put_bytes: int = 0
    got_bytes: int = 0
    num_evicted: int = 0
    num_corrupted: int = 0
    num_failures: int = 0
    token_cost: float = -1.0


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a node reports of itself: page states sum to `num_pages`.

    Attributes:
        max_running: Requests that it runs at once, at most; 0: an older node, which does not report it.
        num_edges: Edge workers that have requests here.
        num_own: Requests here of the edge worker that the report goes to.
        num_refused_transfers: Messages about KV that no live grant or link allows.
        num_strangers: Connections to the node's links that failed in the handshake.
        num_invalid: Frames that were no message.
        queued_tokens: Prompt tokens that wait to be computed; -1: an older node.
        tiers: Behind the prefix cache, fastest first.
        is_draining: It takes nothing new.
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
    queued_tokens: int = -1
    tiers: list[TierLoad] = []
    is_draining: bool = False


class Pong(Message, frozen=True, kw_only=True):
    """Answer to `Ping`."""

    epoch: Epoch
    load: NodeLoad


class Measured(Message, frozen=True, kw_only=True):
    """What an engine process counted and timed since its start, beside its load; answer to a `Ping`.

    Attributes:
        pid: Of the engine process.
        spreads: By name of the metric, without `tandem_`, as `counts`.
        refused: Requests that were not taken, by the code of the error.
        tier_seconds: How long requests waited for tiers, by the slowest one that had something.
    """

    epoch: Epoch
    pid: int
    spreads: dict[str, Spread] = {}
    counts: dict[str, int] = {}
    refused: dict[str, int] = {}
    tier_seconds: dict[str, Spread] = {}


# Names of blocks, as `tandem.wire.prefixes` packs them.
BlockNames = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCKS * NAME_BYTES)]


class CacheReport(Message, frozen=True, kw_only=True):
    """How to come from the position of a `Ping` to `position`: which blocks were cached and evicted.

    Attributes:
        is_whole: Forget what you knew: `added` is all there is.
        tier: Of which tier behind the prefix cache this is; empty for the cache itself.
    """

    epoch: Epoch
    position: int
    is_whole: bool = False
    tier: str = ""
    added: BlockNames = b""
    removed: BlockNames = b""


ToEngine = StartPrefill | StartDecode | StartColocated | Cancel | FlushCache | Ping
FromEngine = TokenBatch | RequestFailed | Pong | CacheReport | Measured


# ── a node, at `GET /server_info` ────────────────────────────────────────────────────────────────

# What cannot be connected to is refused as it is read.
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model a node serves.

    Attributes:
        name: As clients name it (`--served-model-name`).
        fingerprint: Equal on two nodes exactly when their KV is interchangeable.
        context_length: Prompt plus generated tokens, at most.
        vocab_size: Ids are below this.
        tokenizer_hash: Of the files at `GET /tokenizer`; empty when the model has no tokenizer.
        default_sampling: Of its generation_config.json.
        weight_version: The name that the last update of the weights gave them; "default" before any.
        adapters: The LoRA adapters that requests may name. What they contain is part of the fingerprint.
    """

    name: str
    fingerprint: str
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    tokenizer_hash: str = ""
    default_sampling: SamplingDefaults = SamplingDefaults()
    weight_version: str = "default"
    adapters: list[str] = []


# The engine of nodes that report none.
OWN_ENGINE = "tandem"


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node. Ports are on the host its URL names.

    Attributes:
        epoch: Of the engine process; changes when it restarts.
        engine_port: Where its engine's inbox listens for edge workers.
        bootstrap_port: Where a prefill listens for grants; None on other roles.
        max_prompt_tokens: The longest prompt its pool can ever hold.
        tp_size: Processes that share its model; 0: an older node, which does not report it.
        heartbeat_interval_ms: Of its links (`--heartbeat-interval-ms`); 0: an older node.
        transports: By which its KV may move, best first; empty on other roles and older nodes.
        is_draining: It takes nothing new; what runs on it goes on.
        zone: Where it stands, as `--zone` said: nodes of one zone are near each other.
        takes_prompts: It takes whole requests (`StartColocated`); false on older decode nodes.
        engine: "tandem", or the name of another one, such as "vllm".
    """

    role: str
    version: str
    epoch: int
    engine_port: Port
    model: ModelInfo
    bootstrap_port: Port | None = None
    is_healthy: bool = True
    max_prompt_tokens: int = 0
    load: NodeLoad = NodeLoad()
    tp_size: int = 0
    transports: list[str] = []
    is_draining: bool = False
    zone: str = ""
    heartbeat_interval_ms: float = 0.0
    takes_prompts: bool = False
    engine: str = OWN_ENGINE
