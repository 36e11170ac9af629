"""From what a user calls a node to a kind that can be simulated: a card's name, or a measured profile."""

import re
from pathlib import Path

from tandem.engine.profile import Profile, read_profile
from tandem.plan.cards import CARDS, estimate
from tandem.plan.models import ModelFacts
from tandem.plan.seam import NodeKind
from tandem.wire.errors import ConfigInvalid

_CARD = re.compile(r"([a-z]\w*?)(?:-tp(\d+))?")


def read_profile_of(node: str, model: ModelFacts | None) -> Profile:
    """Return the profile that `--node` names: `h100`, `h100-tp4`, or a file.

    Args:
        model: Of the cluster, for the cards; None where none was named.

    Raises:
        ConfigInvalid: There is no such card or file, or it does not say enough.
    """
    match = _CARD.fullmatch(node)
    if match is not None and match[1] in CARDS:
        if model is None:
            raise ConfigInvalid(
                f"--node {node} depends on the model: give --model, a directory with config.json or one of "
                "the names that `tandem plan --help` lists",
                topic="plan#nodes",
            )
        return estimate(match[1], int(match[2] or 1), model)
    path = Path(node).expanduser()
    if not path.is_file():
        raise ConfigInvalid(
            f"--node {node} is neither a profile nor a card: give a file that `tandem profile` wrote, or "
            f"CARD-tpN, CARD one of {', '.join(CARDS)}",
            topic="plan#nodes",
        )
    profile = read_profile(path, "--node")
    if profile.node is None:
        raise ConfigInvalid(
            f"--node {node} says how long forwards take and nothing of the node's pool and links: add its "
            "`node`, as `tandem profile` writes it",
            topic="plan#nodes",
        )
    return profile


def kind_of(
    name: str, profile: Profile, *, cost: float | None, link_bytes_per_s: float
) -> NodeKind:
    """Return a kind of node.

    Args:
        name: As the user gave it.
        profile: With its `node`.
        cost: Of one; None: as many as it has devices.
        link_bytes_per_s: What the user said; 0: what the profile says.

    Raises:
        ConfigInvalid: Neither says what the link carries.
    """
    figures = profile.node
    assert figures is not None
    if not (link := link_bytes_per_s or figures.link_bytes_per_s):
        raise ConfigInvalid(
            f"--node {name} does not say what its link carries: give --link-gbit",
            topic="plan#nodes",
        )
    return NodeKind(
        name=Path(name).name.removesuffix(".json"),
        profile=profile,
        num_tokens=figures.num_tokens,
        kv_bytes_per_token=figures.kv_bytes_per_token,
        link_bytes_per_s=link,
        page_size=figures.page_size,
        cost=float(figures.num_devices) if cost is None else cost,
        tp=figures.num_devices,
        host_step_s=figures.host_step_ms / 1000,
        is_overlapped=figures.is_overlapped,
        num_layers=figures.num_layers,
        max_running=figures.max_running_requests,
        chunked_prefill_size=figures.chunked_prefill_size,
        context_length=figures.context_length,
    )
