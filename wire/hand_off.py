"""Every message between a decode node and the bootstrap port of a prefill node.

```
 decode      ──▶ prefill          Hello Grant Withdraw LinkPing
 prefill     ──▶ decode           Welcome Redirect Refused Landed Released LinkPing
```

The rules of change are those of `messages`; `PROTOCOL` counts the changes that those rules do not allow.
docs/protocol.md describes all of it for other implementations.
"""

from typing import Annotated

import msgspec

from tandem.wire.errors import ErrorInfo
from tandem.wire.generation import Epoch, SentRoom, TokenLogprobs
from tandem.wire.messages import Message

# The version that this release speaks, and the oldest one that it still speaks. Version 2 knows strips.
PROTOCOL, OLDEST_PROTOCOL = 2, 1
STRIPS_PROTOCOL = 2


class TransportOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to write into the decode pool, best first in a list of them.

    Attributes:
        descriptor: What the transport's `connect` needs, as JSON-like values of its own.
    """

    name: str
    descriptor: dict[str, str | int | float]


# Layers of one model.
MAX_LAYERS = 4096


class LayerKV(msgspec.Struct, frozen=True):
    """What one layer keeps of one token.

    Attributes:
        num_kv_heads: 0 where the layer reads what another layer keeps.
        key_dim: Elements of one head's K.
        value_dim: Elements of one head's V; 0 where V is a part of K, as in latent attention.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int


class Strip(msgspec.Struct, frozen=True):
    """Where a pool keeps some planes (K or V of one layer) of every page.

    Attributes:
        base: First byte of page 0.
        stride: Bytes from one page to the next.
        num_planes: How many planes of a page lie here, one after the other.
    """

    base: int
    stride: int
    num_planes: int


class LayoutInfo(msgspec.Struct, frozen=True):
    """A pool of pages. A page is C-contiguous as [layer][k, v][head][token][element], unless strips divide it.

    Attributes:
        page_size: Tokens in a page.
        num_kv_heads: Heads that one rank holds.
        dtype: Name of the element type; only compared.
        itemsize: Bytes of one element.
        layers: One for each layer where they differ, or K and V do; `num_kv_heads` is then 1 and
            `head_dim` all elements of a token. Empty where every layer is alike.
        strips: Where the planes of a page lie, in their order and in that of memory. Empty: pages lie one
            after the other, each with all of its planes.
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


# Ranks of one node. No group of GPUs that shares every layer is as large.
MAX_RANKS = 1024

Ports = Annotated[list[int], msgspec.Meta(max_length=MAX_RANKS)]


class Hello(Message, frozen=True, kw_only=True):
    """First message on a link. `fingerprint` names model, dtype and weights.

    Attributes:
        tp_rank: Whose this link is to be; a prefill's bootstrap port knows the ports of its ranks.
        model_kv_heads: Of the whole model; 0 means those in `layout`.
        protocol: The newest version that decode speaks.
    """

    epoch: Epoch
    fingerprint: str
    layout: LayoutInfo
    offers: list[TransportOffer]
    tp_rank: int = 0
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    model_kv_heads: int = 0
    protocol: int = 1


class Welcome(Message, frozen=True, kw_only=True):
    """The link stands; `transport` is the offer that prefill took.

    Attributes:
        more_ports: Of other ranks of prefill, on the same host, that hold heads of this rank.
        first_head: Of those that come over this link, counted in the rank's own pages.
        num_heads: That come over this link; None means all.
        protocol: The version of this link: the newest one that both ends speak.
    """

    epoch: Epoch
    transport: str
    more_ports: Ports = []
    first_head: int = 0
    num_heads: int | None = None
    protocol: int = 1


class Redirect(Message, frozen=True, kw_only=True):
    """The rank of this Hello takes it at another port of the same host; `more_ports` as in `Welcome`."""

    epoch: Epoch
    port: int
    more_ports: Ports = []


class Refused(Message, frozen=True, kw_only=True):
    """The link cannot be: another model or layout, or no common transport.

    Attributes:
        fingerprint: Prefill's own, in the answer to a Hello of another model or layout; else empty.
        layout: Likewise; None: not given.
    """

    error: ErrorInfo
    fingerprint: str = ""
    layout: LayoutInfo | None = None


class Grant(Message, frozen=True, kw_only=True):
    """Prefill may write these pages until `Landed` or `Released`.

    Attributes:
        page_ids: Decode's pages for prompt tokens `have_tokens` and on, in order.
        have_tokens: Prompt tokens decode already holds; a multiple of its page size.
    """

    epoch: Epoch
    room: SentRoom
    page_ids: list[int]
    have_tokens: int = 0


class Withdraw(Message, frozen=True, kw_only=True):
    """Decode wants its pages back; answered by `Released` once no write can follow, known room or not."""

    epoch: Epoch
    room: SentRoom
    error: ErrorInfo | None = None


class Landed(Message, frozen=True, kw_only=True):
    """Every page is written. The last message of prefill on this room.

    Attributes:
        first_token: Token of index `num_prior_tokens`, sampled by prefill.
        seed: Key of the request's random draws.
        checksums: xxh3-64 of what was written into each granted page, in the grant's order; empty
            when nothing was hashed.
        checksum_one_in: Of how many slabs (K or V of one layer) one is in `checksums`; which, follows
            from the room.
        end_token: One past the last token written; 0 means the end of the grant.
        first_logprobs: Of the first token, when wanted.
        prompt: A name of the prompt that was written, which decode compares with that of its own; 0: not given.
    """

    epoch: Epoch
    room: SentRoom
    first_token: int
    seed: int
    checksums: list[int] = []
    cached_tokens: int = 0
    first_logprobs: TokenLogprobs | None = None
    checksum_one_in: Annotated[int, msgspec.Meta(ge=0)] = 1
    end_token: int = 0
    prompt: int = 0


class Released(Message, frozen=True, kw_only=True):
    """Prefill will not write any more and did not finish. The last message on this room."""

    epoch: Epoch
    room: SentRoom
    error: ErrorInfo | None = None


class LinkPing(Message, frozen=True, kw_only=True):
    """Heartbeat, both ways. A peer silent for 2 s is lost."""

    epoch: Epoch


ToPrefill = Hello | Grant | Withdraw | LinkPing
FromPrefill = Welcome | Redirect | Refused | Landed | Released | LinkPing
