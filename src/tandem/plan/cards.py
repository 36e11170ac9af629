"""Profiles of nodes that nobody measured, worked out from the figures of their cards.

With t cards of F FLOP/s, B bytes/s of memory and C bytes/s to one another, a model of W bytes of weights, P
parameters in the layers and H in the head that a token passes through, L layers, A attention heads of D, hidden
width N, K bytes of KV a token, i bytes an element, and the efficiencies below:

```
 a forward      step + W / (t B read) + 2 L hop                          base_ms, of prompts and of answers
 a prompt token 2 P / (t F matmul) + 4 L N i (t - 1)/t / (C collective)  per_token_ms
 a pair         4 L A D / (t F attention)                                per_pair_ms
 an answer      2 (P + H) / (t F matmul) + the same for the all-reduces  per_request_ms
 a token read   K / (t B read)                                           per_context_token_ms, of answers
 the pool       (t M static - W) / K tokens
```

`hop` (an all-reduce of nothing) and C count where t > 1. A forward is the sum: what really overlaps, computing
and reading of weights, is counted twice in small batches. Of experts, every one is read in each forward.
These are estimates: `tandem profile` measures.
"""

from dataclasses import dataclass

from tandem.engine.profile import DecodeTimes, NodeFigures, PrefillTimes, Profile
from tandem.plan.models import ModelFacts
from tandem.wire.errors import ConfigInvalid

# What well-made kernels reach of a card's figures: of dense bfloat16 arithmetic in large matrix products and
# in attention over long contexts, of memory bandwidth, and of the links between cards.
MATMUL, ATTENTION, READ, COLLECTIVE = 0.5, 0.35, 0.7, 0.6
# Launches, sampling and what a recorded graph leaves between kernels.
STEP_S = 0.5e-3
# A node's `--mem-fraction-static`; what is left is for activations.
STATIC = 0.85
# Of an engine's loop beside the device, which overlaps.
HOST_STEP_MS = 0.5
# KV travels at what TCP or RDMA leave of the network's rate.
NETWORK = 0.8
CHUNK, MAX_RUNNING = 8192, 256


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, by its vendor's figures.

    Attributes:
        flops: Of dense bfloat16.
        card_bytes_per_s: To the other cards of the host, one way.
        hop_s: Latency of an all-reduce.
        network_bytes_per_s: Of the adapter that hosts commonly have for each card, one way.
    """

    title: str
    memory_bytes: float
    bytes_per_s: float
    flops: float
    card_bytes_per_s: float
    hop_s: float
    network_bytes_per_s: float


CARDS = {
    "h100": Card("H100 SXM 80 GB", 80e9, 3.35e12, 989e12, 450e9, 10e-6, 50e9),
    "h200": Card("H200 SXM 141 GB", 141e9, 4.8e12, 989e12, 450e9, 10e-6, 50e9),
    "a100": Card("A100 SXM 80 GB", 80e9, 2.039e12, 312e12, 300e9, 10e-6, 25e9),
    "l40s": Card("L40S 48 GB", 48e9, 0.864e12, 362e12, 32e9, 25e-6, 12.5e9),
}
SIZES = (1, 2, 4, 8)


def estimate(name: str, tp: int, model: ModelFacts) -> Profile:
    """Return the profile of a node of `tp` cards.

    Args:
        name: Of the card, one of `CARDS`.

    Raises:
        ConfigInvalid: The model does not fit, or cannot be shared by so many.
    """
    card = CARDS[name]
    if tp < 1 or model.num_kv_heads % tp or model.num_heads % tp:
        raise ConfigInvalid(
            f"--node {name}-tp{tp}: {model.name} has {model.num_kv_heads} KV heads, which {tp} cards cannot "
            "share evenly: give a tp that divides them",
            topic="plan#nodes",
        )
    pool_bytes = tp * card.memory_bytes * STATIC - model.total_bytes
    num_tokens = int(pool_bytes / model.kv_bytes_per_token)
    if num_tokens < CHUNK:
        raise ConfigInvalid(
            f"--node {name}-tp{tp}: {model.name} has {model.total_bytes / 1e9:.0f} GB of weights, and {tp} x "
            f"{card.title} no room for KV beside them: give a larger tp",
            topic="plan#nodes",
        )
    return Profile(
        prefill=_prefill(card, tp, model),
        decode=_decode(card, tp, model),
        origin=f"Worked out, not measured: {model.name} on {tp} x {card.title}, by its vendor's figures; "
        f"{MATMUL:.0%} of the arithmetic, {ATTENTION:.0%} in attention, {READ:.0%} of the bandwidth and "
        f"{COLLECTIVE:.0%} of the links between cards assumed to be reached.",
        node=NodeFigures(
            model=model.name,
            device=card.title,
            num_devices=tp,
            num_tokens=num_tokens,
            kv_bytes_per_token=model.kv_bytes_per_token,
            num_layers=model.num_layers,
            context_length=model.context_length,
            max_running_requests=MAX_RUNNING,
            chunked_prefill_size=CHUNK,
            link_bytes_per_s=tp * card.network_bytes_per_s * NETWORK,
            host_step_ms=HOST_STEP_MS,
            is_estimated=True,
        ),
    )


def _prefill(card: Card, tp: int, model: ModelFacts) -> PrefillTimes:
    token_s = 2 * model.active_in_layers / (tp * card.flops * MATMUL)
    pair_s = 4 * model.num_layers * model.num_heads * model.head_dim / (tp * card.flops * ATTENTION)
    return PrefillTimes(
        base_ms=_ms(_base_s(card, tp, model)),
        per_token_ms=_ms(token_s + _reduce_s(card, tp, model)),
        per_pair_ms=_ms(pair_s),
    )


def _decode(card: Card, tp: int, model: ModelFacts) -> DecodeTimes:
    answer_s = 2 * (model.active_in_layers + model.in_head) / (tp * card.flops * MATMUL)
    return DecodeTimes(
        base_ms=_ms(_base_s(card, tp, model)),
        per_request_ms=_ms(answer_s + _reduce_s(card, tp, model)),
        per_context_token_ms=_ms(model.kv_bytes_per_token / (tp * card.bytes_per_s * READ)),
    )


def _base_s(card: Card, tp: int, model: ModelFacts) -> float:
    hops_s = 2 * model.num_layers * card.hop_s if tp > 1 else 0.0
    return STEP_S + model.total_bytes / (tp * card.bytes_per_s * READ) + hops_s


def _reduce_s(card: Card, tp: int, model: ModelFacts) -> float:
    """Return what a token costs on the links between cards: two all-reduces a layer, each over a ring."""
    moved_bytes = 4 * model.num_layers * model.hidden * model.item_bytes * (tp - 1) / tp
    return moved_bytes / (card.card_bytes_per_s * COLLECTIVE)


def _ms(seconds: float) -> float:
    return float(f"{1000 * seconds:.4g}")
