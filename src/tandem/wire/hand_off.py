"""The messages between a decode node and the bootstrap port of a prefill node.

```
 decode      ──▶ prefill          Hello Grant Withdraw LinkPing
 prefill     ──▶ decode           Welcome Redirect Refused Landed Released LinkPing
```

The rules for changes are those of `messages`; a change that breaks them increments `PROTOCOL`.
docs/protocol.md specifies the protocol for other implementations.
"""

from typing import Annotated

import msgspec

from tandem.wire.errors import ErrorInfo
from tandem.wire.generation import Epoch, SentRoom, TokenLogprobs
from tandem.wire.messages import Message

# Version of the protocol. Both ends must speak the same one.
PROTOCOL = 1


class TransportOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A transport by which prefill may write into decode's pool. Lists of offers are sorted, best first.

    Attributes:
        descriptor: Transport-specific arguments of `connect`, as JSON values.
    """

    name: str
    descriptor: dict[str, str | int | float]


# Maximum number of layers of a model.
MAX_LAYERS = 4096


class LayerKV(msgspec.Struct, frozen=True):
    """Shape of one layer's KV for one token, in each of the layout's heads.

    Attributes:
        num_kv_heads: KV heads; 0 if the layer reads the KV of a different layer.
        key_dim: Elements of one head's K.
        value_dim: Elements of one head's V; 0 if V is a part of K, as in latent attention.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int


class Strip(msgspec.Struct, frozen=True):
    """Memory that holds some planes (K or V of one layer) of every page.

    Attributes:
        base: Byte offset of page 0 in the pool.
        stride: Bytes from one page to the next.
        num_planes: Consecutive planes of a page in this strip.
    """

    base: int
    stride: int
    num_planes: int


class LayoutInfo(msgspec.Struct, frozen=True):
    """Layout of a pool. A page is C-contiguous as [layer][k, v][head][token][element], unless strips divide it.

    Attributes:
        page_size: Tokens per page.
        num_kv_heads: KV heads per rank, or parts that ranks divide if `layers` is set.
        dtype: Name of the element type; compared, not interpreted.
        itemsize: Bytes per element.
        layers: Shape of each layer, if layers differ or K and V do. `head_dim` is then the number of elements
            per token and head in all layers. Empty: all layers are alike.
        strips: Strips that hold the planes of a page, in plane order; memory has the same order. Empty: pages are
            consecutive, each with all of its planes.
    """

    num_pages: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    itemsize: int
    layers: Annotated[tuple[LayerKV, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()
    strips: Annotated[tuple[Strip, ...], msgspec.Meta(max_length=2 * MAX_LAYERS)] = ()


# Maximum number of ranks of a node; no tensor-parallel group is that large.
MAX_RANKS = 1024

# At most `channel.MAX_INTERVAL_S`: a peer must not declare an interval in which its death goes unnoticed.
HeartbeatInterval = Annotated[float, msgspec.Meta(ge=0, le=60)]


class RankAddress(msgspec.Struct, frozen=True):
    """Where a prefill rank listens for links.

    Attributes:
        host: IP address; empty: the host to which decode sent its first Hello.
    """

    port: int
    host: str = ""


Addresses = Annotated[list[RankAddress], msgspec.Meta(max_length=MAX_RANKS)]


class Hello(Message, frozen=True, kw_only=True):
    """First message on a link.

    Attributes:
        fingerprint: Id of model, dtype and weights.
        tp_rank: Decode's rank that sends this, from which prefill chooses its own rank for the link.
        stage: Decode's pipeline stage; prefill's rank is of the same one.
        model_kv_heads: KV heads of the whole model; 0: as many as in `layout`.
        protocol: Protocol version of decode.
        heartbeat_s: Interval of decode's pings; 0: that of prefill.
    """

    epoch: Epoch
    fingerprint: str
    layout: LayoutInfo
    offers: list[TransportOffer]
    tp_rank: int = 0
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    stage: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)] = 0
    model_kv_heads: int = 0
    protocol: int = 1
    heartbeat_s: HeartbeatInterval = 0.0


class Welcome(Message, frozen=True, kw_only=True):
    """Prefill accepts the link.

    Attributes:
        transport: Name of the offer that prefill accepted.
        more_addresses: Addresses of further prefill ranks that hold heads of this decode rank.
        first_head: First head of decode's pages that is sent over this link.
        num_heads: Heads that are sent over this link; None: all.
        protocol: Protocol version of prefill.
        heartbeat_s: Interval of prefill's pings; 0: that of decode.
    """

    epoch: Epoch
    transport: str
    more_addresses: Addresses = []
    first_head: int = 0
    num_heads: int | None = None
    protocol: int = 1
    heartbeat_s: HeartbeatInterval = 0.0


class Redirect(Message, frozen=True, kw_only=True):
    """A different prefill rank holds the heads: send the Hello to its `address`.

    `more_addresses`: see `Welcome`.
    """

    epoch: Epoch
    address: RankAddress
    more_addresses: Addresses = []


class Refused(Message, frozen=True, kw_only=True):
    """Prefill rejects or ends the link: different model or layout, no common transport, or a broken rule.

    Attributes:
        fingerprint: Prefill's fingerprint, if model or layout differ; else empty.
        layout: Prefill's layout, if model or layout differ; else None.
    """

    error: ErrorInfo
    fingerprint: str = ""
    layout: LayoutInfo | None = None


class Grant(Message, frozen=True, kw_only=True):
    """Decode lets prefill write these pages until `Landed` or `Released`.

    Attributes:
        page_ids: Decode's pages for the prompt tokens from `have_tokens` on, in order.
        have_tokens: Leading prompt tokens that decode holds already; a multiple of its page size.
    """

    epoch: Epoch
    room: SentRoom
    page_ids: list[int]
    have_tokens: int = 0


class Withdraw(Message, frozen=True, kw_only=True):
    """Decode requests its pages back. Once no write can follow, prefill answers `Released`, even for an unknown room."""

    epoch: Epoch
    room: SentRoom
    error: ErrorInfo | None = None


class Landed(Message, frozen=True, kw_only=True):
    """Every page is written. Prefill's last message for the room.

    Attributes:
        first_token: Token of index `num_prior_tokens`, sampled by prefill.
        seed: Key of the request's random generator.
        checksums: XXH3-64 of the bytes written into each granted page, in the order of the grant; empty if
            nothing was hashed.
        cached_tokens: Prompt tokens that prefill found in its prefix cache.
        end_token: One past the last token written; 0: the end of the grant.
        first_logprobs: Log-probabilities of the first token, if requested.
        prompt: Hash of the written prompt, which decode compares with its own; 0: not sent.
    """

    epoch: Epoch
    room: SentRoom
    first_token: int
    seed: int
    checksums: list[int] = []
    cached_tokens: int = 0
    first_logprobs: TokenLogprobs | None = None
    end_token: int = 0
    prompt: int = 0


class Released(Message, frozen=True, kw_only=True):
    """Prefill stopped writing before the end. Its last message for the room."""

    epoch: Epoch
    room: SentRoom
    error: ErrorInfo | None = None


class LinkPing(Message, frozen=True, kw_only=True):
    """Heartbeat in both directions. A connected peer that sends nothing for 10 s is lost.

    Attributes:
        is_last: Whether the sender closes the link now.
    """

    epoch: Epoch
    is_last: bool = False


ToPrefill = Hello | Grant | Withdraw | LinkPing
FromPrefill = Welcome | Redirect | Refused | Landed | Released | LinkPing
