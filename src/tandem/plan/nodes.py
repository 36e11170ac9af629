"""Kinds of nodes: measured by `tandem profile`, or estimated from the figures of their cards.

An estimated forward time is a sum: reading all weights once, the arithmetic of the tokens, attention, and
all-reduces between cards. Real compute and reads overlap, so small batches are overestimated. Each forward is
assumed to read every expert. Attention windows are ignored, so long contexts are overestimated for models
with windows.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem.engine.profile import DecodeTimes, NodeFigures, PrefillTimes, Profile, read_profile
from tandem.plan.models import ModelFacts, read_model
from tandem.wire.errors import ConfigInvalid

# Fractions of a card's figures that good kernels reach: dense bfloat16 arithmetic in large matrix products and
# in attention over long contexts, memory bandwidth, and the links between cards.
MATMUL, ATTENTION, READ, COLLECTIVE = 0.5, 0.35, 0.7, 0.6
# Fixed time of a step: launches, sampling and the gaps between a recorded graph's kernels.
STEP_S = 0.5e-3
# A node's `--mem-fraction-static`; the rest is for activations.
STATIC = 0.85
# Fraction of the network's rate that TCP or RDMA leave to KV.
NETWORK = 0.8
CHUNK, MAX_RUNNING = 8192, 256


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, by its vendor's figures.

    Attributes:
        flops: Dense bfloat16 operations per second.
        card_bytes_per_s: The bandwidth to the other cards of the host, one way.
        hop_s: The latency of an all-reduce.
        network_bytes_per_s: The bandwidth, one way, of the network adapter that hosts commonly have per card.
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
_CARD = re.compile(r"([a-z]\w*?)(?:-tp(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """One kind of node: its profile, link rate and cost.

    Attributes:
        profile: A profile whose `node` is set.
        link_bytes_per_s: The rate of KV over the link, one way.
        cost: The cost of one node, in the operator's unit.
    """

    name: str
    profile: Profile
    link_bytes_per_s: float
    cost: float

    @property
    def figures(self) -> NodeFigures:
        """The profile's figures besides times."""
        assert self.profile.node is not None
        return self.profile.node

    @property
    def label(self) -> str:
        """The name, with a leading `~` for an estimate."""
        return f"~{self.name}" if self.figures.is_estimated else self.name

    @property
    def most_tokens(self) -> int:
        """The maximum tokens of one request, prompt plus answer."""
        return min(self.figures.context_length, self.figures.num_tokens)


def node_kind(node: str, model: str, *, cost: float | None, link_bytes_per_s: float) -> NodeKind:
    """Return the kind that `--node` names: `h100`, `h100-tp4`, or a file of `tandem profile`.

    Args:
        model: The model of cards; empty if none was given.
        cost: The cost of one node; None: its number of devices.
        link_bytes_per_s: The rate of the link; 0: as in the profile.

    Raises:
        ConfigInvalid: The card or file does not exist, or its figures are incomplete.
    """
    try:
        profile, figures = _profile(node, model, link_bytes_per_s)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"--node {node}: {error.message}", topic="plan#nodes") from error
    return NodeKind(
        name=Path(node).name.removesuffix(".json"),
        profile=profile,
        link_bytes_per_s=link_bytes_per_s or figures.link_bytes_per_s,
        cost=float(figures.num_devices) if cost is None else cost,
    )


def _profile(node: str, model: str, link_bytes_per_s: float) -> tuple[Profile, NodeFigures]:
    match, path = _CARD.fullmatch(node), Path(node).expanduser()
    if match is not None and match[1] in CARDS:
        if not model:
            raise ConfigInvalid("the times of a card depend on the model: give --model")
        tp = int(match[2] or 1)
        found = estimate(CARDS[match[1]], tp, read_model(model, tp))
        assert found.node is not None
        return found, found.node
    if not path.is_file():
        raise ConfigInvalid(
            "neither a file nor a card: give a file that `tandem profile` wrote, or CARD-tpN with one of "
            f"the cards {', '.join(CARDS)}"
        )
    profile = read_profile(path, "--node")
    if profile.node is None:
        raise ConfigInvalid(
            "the file has times of forwards, but no pool and no link: add `node`, as `tandem profile` writes it"
        )
    if not (link_bytes_per_s or profile.node.link_bytes_per_s):
        raise ConfigInvalid("the profile has no rate of the link: give --link-gbit")
    return profile, profile.node


def estimate(card: Card, tp: int, model: ModelFacts) -> Profile:
    """Return the estimated profile of a node of `tp` cards; the module docstring explains the estimate.

    Raises:
        ConfigInvalid: The model does not fit.
    """
    num_tokens = int((tp * card.memory_bytes * STATIC - model.weight_bytes) / model.kv_bytes)
    if num_tokens < CHUNK:
        raise ConfigInvalid(
            f"{model.name} has {model.weight_bytes / 1e9:.0f} GB of weights, which leave no room for KV on {tp} x "
            f"{card.title}: give a larger tp"
        )
    prefill, decode = _times(card, tp, model)
    return Profile(
        prefill=prefill,
        decode=decode,
        origin=f"Estimated, not measured: {model.name} on {tp} x {card.title}, from its vendor's figures.",
        node=NodeFigures(
            model=model.name,
            device=card.title,
            num_devices=tp,
            num_tokens=num_tokens,
            kv_bytes_per_token=model.kv_bytes,
            num_layers=model.num_layers,
            context_length=model.context_length,
            max_running_requests=MAX_RUNNING,
            chunked_prefill_size=CHUNK,
            link_bytes_per_s=tp * card.network_bytes_per_s * NETWORK,
            is_estimated=True,
        ),
    )


def _times(card: Card, tp: int, model: ModelFacts) -> tuple[PrefillTimes, DecodeTimes]:
    base_s = STEP_S + model.weight_bytes / (tp * card.bytes_per_s * READ)
    base_s += 2 * model.num_layers * card.hop_s if tp > 1 else 0.0
    # Two all-reduces per layer, each over a ring.
    reduced_bytes = 4 * model.num_layers * model.hidden * model.item_bytes * (tp - 1) / tp
    reduce_s = reduced_bytes / (card.card_bytes_per_s * COLLECTIVE)
    matmul, attention = tp * card.flops * MATMUL, tp * card.flops * ATTENTION
    token_s = 2 * model.layer_params / matmul + reduce_s
    answer_s = 2 * (model.layer_params + model.head_params) / matmul + reduce_s
    return (
        PrefillTimes(
            base_ms=_ms(base_s),
            per_token_ms=_ms(token_s),
            per_pair_ms=_ms(model.pair_flops / attention),
        ),
        DecodeTimes(
            base_ms=_ms(base_s),
            per_request_ms=_ms(answer_s),
            per_context_token_ms=_ms(model.kv_bytes / (tp * card.bytes_per_s * READ)),
        ),
    )


def _ms(seconds: float) -> float:
    return float(f"{1000 * seconds:.4g}")
