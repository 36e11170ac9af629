"""What the environment may ask of UCX under NIXL; needs no NIXL."""

import os

from tandem.wire.errors import ConfigInvalid

# The environment wins over what a program asks for, so it has to keep to links that can be fenced.
FENCEABLE = {"tcp", "self", "srd", "ib", "cuda_copy", "gdr_copy", "rocm_copy"} | {
    kind + verbs for kind in ("rc", "dc", "ud") for verbs in ("", "_v", "_x", "_verbs", "_mlx5")
}
# What NIXL asks for where the environment is silent. With anything else UCX writes over TCP in pieces that
# it acknowledges one by one, and aborts the owner's process when it reads pieces of a writer that is gone.
RNDV_THRESH = "inf"


def check_environment() -> None:
    """Refuse settings of UCX that break what this transport promises.

    Raises:
        ConfigInvalid: Naming the variable.
    """
    links = os.environ.get("UCX_TLS", "")
    if unsafe := set(links.split(",") if links else ()) - FENCEABLE:
        raise ConfigInvalid(
            f"UCX_TLS allows {', '.join(sorted(unsafe))}: a writer on such a link cannot be cut off; "
            "unset it, or name only links between hosts, such as UCX_TLS=rc,tcp"
        )
    threshold = os.environ.get("UCX_RNDV_THRESH", RNDV_THRESH)
    if threshold != RNDV_THRESH:
        raise ConfigInvalid(
            f"UCX_RNDV_THRESH={threshold} makes UCX abort this process when a peer dies: unset it"
        )
