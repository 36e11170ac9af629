"""The messages between an edge worker and an engine, as msgspec structs, and a node's `/server_info`.

`generation` has the requests and tokens that they carry; `hand_off` has the messages between decode and prefill.

Rules for changes: a new field has a default, no field is renamed or reused, and unknown fields are ignored.
Nodes of two consecutive releases therefore understand each other.

```
 edge worker ──▶ engine inbox     StartPrefill StartDecode StartColocated Cancel FlushCache Ping
                                  LoadAdapter UnloadAdapter
 engine      ──▶ edge worker      TokenBatch RequestFailed Pong CacheReport Measured AdapterChanged
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
    """Compute the prompt, push its KV into the pages granted for `room`, and send the first token.

    Attributes:
        stream: Token stream id, chosen by the edge, unique on this link. 0: tokens come as `TokenDelta`, which
            names the request. See `TokenBatch`.
        waits_for_grant: Whether the prompt is computed only once decode has pages for it. Otherwise its own pages are
            held until the grant comes, and the request must be for one token, which ends this half for the edge.
    """

    request: GenerateRequest
    room: SentRoom
    attempt: int = 0
    stream: int = 0
    waits_for_grant: bool = True


class StartDecode(Message, frozen=True, kw_only=True):
    """Grant pages for `room` to the prefill node at this bootstrap address; generate once they have landed."""

    request: GenerateRequest
    room: SentRoom
    bootstrap_host: str
    bootstrap_port: int
    attempt: int = 0
    stream: int = 0


class StartColocated(Message, frozen=True, kw_only=True):
    """Run the whole request on this engine: `tandem serve`, or decode computes the prompt itself."""

    request: GenerateRequest
    attempt: int = 0
    stream: int = 0


class Cancel(Message, frozen=True, kw_only=True):
    """Stop an attempt at any stage. There is no answer; an unknown attempt is ignored."""

    request_id: RequestId
    attempt: int = 0


class FlushCache(Message, frozen=True, kw_only=True):
    """Evict every cached page that no request uses. Answered by `Pong`."""


class LoadAdapter(Message, frozen=True, kw_only=True):
    """Load a LoRA adapter. Answered by `AdapterChanged`, also if it is loaded already.

    Attributes:
        number: Number of this message on the link, which the answer repeats.
        path: Directory on the node, or a repository on the Hub.
        digest: Digest that the files must have; empty: any.
        in_place: Whether the name may have an adapter with other content, which stays loaded.
    """

    name: str
    path: str
    number: int = 0
    digest: str = ""
    in_place: bool = False


class UnloadAdapter(Message, frozen=True, kw_only=True):
    """Report an adapter no more, and remove it once no request needs it. Answered by `AdapterChanged`."""

    adapter: str
    number: int = 0


class Ping(Message, frozen=True, kw_only=True):
    """An edge worker's heartbeat, answered by `Pong`.

    An edge worker that is silent for 3.5 intervals is lost, and its requests are cancelled.

    Attributes:
        prefix_position: Last change of the prefix cache that the edge has; a `CacheReport` lists the later ones.
            -1: send no report.
        tier_positions: The same for each tier behind the prefix cache, by name; 0 for a new tier.
        wants_measures: Whether to answer with `Measured` too; set by the node's own HTTP process.
    """

    prefix_position: int = -1
    tier_positions: dict[str, int] = {}
    wants_measures: bool = False


# ── engine → edge worker ─────────────────────────────────────────────────────────────────────────


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tokens of one request. Array-like: new fields go at the end.

    Attributes:
        index: Index of `token_ids[0]` among the generated tokens of all attempts.
        cached_tokens: Prompt tokens found in a prefix cache; on the first delta.
        cached_by_tier: How many of `cached_tokens` were fetched from each tier, by name.
        logprobs: One entry for each of `token_ids`, if requested.
        prompt_index: Prompt position of `prompt_logprobs[0]`.
        prompt_logprobs: Log-probabilities of consecutive positions. Runs arrive in order, before the first token.
        phases: Phases of the request's time since the last report.
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

    Ordinary tokens, which carry only an id, travel in parallel columns, which the edge decodes three times as
    fast as deltas. Read the columns first: in a batch, no ordinary token follows a delta of the same stream.

    Attributes:
        deltas: All other tokens, and ends of requests.
        streams: Stream id of each ordinary token; see `StartPrefill`.
        indexes: Index of each ordinary token; see `TokenDelta`.
        token_ids: Id of each ordinary token.
    """

    epoch: Epoch
    deltas: list[TokenDelta]
    streams: list[int] = []
    indexes: list[int] = []
    token_ids: TokenIds = []


class RequestFailed(Message, frozen=True, kw_only=True):
    """An attempt failed. The node has released everything it held for it."""

    epoch: Epoch
    request_id: RequestId
    error: ErrorInfo
    attempt: int = 0


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one tier behind a node's prefix cache. Counts start with the process.

    Attributes:
        name: Name of the tier, such as `host`; unique on a node.
        store: Id of a shared store: two nodes with the same id read each other's pages. Empty: not shared.
        state: `up`, `backing_off` after a failure, or `full` if it accepts no pages.
        num_pages: Pages in it that this node knows of.
        num_bytes: Bytes of those pages.
        limit_bytes: Capacity in bytes; 0: set by the store itself.
        hit_tokens: Prompt tokens fetched from it into the pool.
        missed_tokens: Prompt tokens looked up and not found.
        late_tokens: Prompt tokens found and not fetched in time.
        put_bytes: Bytes written to it.
        got_bytes: Bytes read from it.
        num_evicted: Pages evicted from it.
        num_corrupted: Entries removed because their content was not what had been written.
        num_failures: Failed operations.
        token_cost: Fetch time per token divided by compute time per token; -1: unknown.
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


class LoadedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that a node serves.

    Attributes:
        id: `NAME@DIGEST`, with a hash of its files: equal ids have equal weights.
        path: Where the node has loaded it from.
    """

    id: str
    path: str

    @property
    def name(self) -> str:
        """The name for clients."""
        return self.id.rpartition("@")[0]

    @property
    def digest(self) -> str:
        """The hash of its files."""
        return self.id.rpartition("@")[2]


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a node. The page states `pages_*` sum to `num_pages`.

    Attributes:
        max_running: Maximum number of running requests; 0: not reported (older node).
        num_edges: Edge workers that have requests on the node.
        num_own: Requests of the edge worker that receives the report.
        num_refused_transfers: KV transfer messages refused because no live grant or link allows them.
        num_strangers: Connections to the node's links that failed the handshake.
        num_invalid: Received frames that were not a valid message.
        queued_tokens: Prompt tokens waiting to be computed; -1: not reported (older node).
        tiers: Tiers behind the prefix cache, fastest first.
        is_draining: Whether the node is draining and accepts no new requests.
        ending_s: Age of the oldest failed hand-off whose pages may still be read or written; 0: none.
        adapters: LoRA adapters that requests may name, in the order of loading.
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
    ending_s: float = 0.0
    adapters: list[LoadedAdapter] = []

    def has_adapter(self, adapter: str) -> bool:
        """Return whether an adapter's id is reported, or is empty: every node serves the base model."""
        return not adapter or any(each.id == adapter for each in self.adapters)


class Pong(Message, frozen=True, kw_only=True):
    """Answer to `Ping`."""

    epoch: Epoch
    load: NodeLoad


class Measured(Message, frozen=True, kw_only=True):
    """An engine process's counters and timings since its start, without its load. Answer to a `Ping`.

    Attributes:
        pid: Process id of the engine.
        spreads: Histograms by metric name without `tandem_`.
        counts: Counters by metric name without `tandem_`.
        refused: Number of refused requests by error code.
        tier_seconds: Seconds that requests waited for tiers, by the slowest tier that had pages for them.
    """

    epoch: Epoch
    pid: int
    spreads: dict[str, Spread] = {}
    counts: dict[str, int] = {}
    refused: dict[str, int] = {}
    tier_seconds: dict[str, Spread] = {}


class AdapterChanged(Message, frozen=True, kw_only=True):
    """Answer to `LoadAdapter` and `UnloadAdapter`. Every edge worker is sent the new load before.

    Attributes:
        adapter: The adapter's id, unless there is an error.
    """

    epoch: Epoch
    number: int
    adapter: str = ""
    error: ErrorInfo | None = None


# Block names, packed by `tandem.wire.prefixes.pack_names`.
BlockNames = Annotated[bytes, msgspec.Meta(max_length=MAX_BLOCKS * NAME_BYTES)]


class CacheReport(Message, frozen=True, kw_only=True):
    """Blocks cached and evicted since the position in a `Ping`.

    Attributes:
        position: Last change that this report covers.
        is_whole: Whether `added` is the full set, which replaces all earlier reports.
        tier: Name of the tier that this report is about; empty: the prefix cache.
        added: Names of the cached blocks.
        removed: Names of the evicted blocks.
    """

    epoch: Epoch
    position: int
    is_whole: bool = False
    tier: str = ""
    added: BlockNames = b""
    removed: BlockNames = b""


ChangeAdapter = LoadAdapter | UnloadAdapter
ToEngine = StartPrefill | StartDecode | StartColocated | Cancel | FlushCache | Ping | ChangeAdapter
FromEngine = TokenBatch | RequestFailed | Pong | CacheReport | Measured | AdapterChanged


# ── a node, at `GET /server_info` ────────────────────────────────────────────────────────────────

# Ports out of range are rejected when the message is decoded.
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a node serves.

    Attributes:
        name: Name for clients (`--served-model-name`).
        fingerprint: Equal on two nodes if and only if their KV is interchangeable.
        context_length: Maximum number of prompt and generated tokens together.
        vocab_size: Exclusive upper bound of token ids.
        tokenizer_hash: Hash of the files at `GET /tokenizer`; empty if the model has no tokenizer.
        default_sampling: Sampling defaults of its generation_config.json.
        weight_version: Version set by the last weight update; "default" before the first.
        aliases: More names for clients.
    """

    name: str
    fingerprint: str
    context_length: int
    vocab_size: int
    eos_token_ids: list[int]
    tokenizer_hash: str = ""
    default_sampling: SamplingDefaults = SamplingDefaults()
    weight_version: str = "default"
    aliases: list[str] = []


# Default of `NodeInfo.engine`.
OWN_ENGINE = "tandem"


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node. Its ports are on the host of its URL.

    Attributes:
        epoch: Epoch of the engine process; changes when it restarts.
        engine_port: Port on which the engine accepts links of edge workers.
        bootstrap_port: Port on which a prefill node accepts grants; None for other roles.
        max_prompt_tokens: Longest prompt that fits the pool, in tokens.
        tp_size: Tensor-parallel ranks; 0: not reported (older node).
        heartbeat_interval_ms: Heartbeat interval of its links; 0: not reported (older node).
        transports: Transports for its KV, best first; empty for other roles and older nodes.
        is_draining: Whether it is draining: it accepts no new requests and finishes the running ones.
        zone: Zone of the node (`--zone`); nodes of one zone are near each other.
        takes_prompts: Whether it accepts whole requests (`StartColocated`); false for older decode nodes.
        engine: Name of its engine: "tandem", or a different one such as "vllm".
        continues_sampling: Whether it continues an answer of another node as that one would have: its seeded draws,
            penalties and grammar. If false, it continues only greedy answers so.
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
    continues_sampling: bool = True
