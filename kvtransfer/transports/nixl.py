"""NIXL: one-sided writes over RDMA, or over whatever else UCX finds between two hosts.

What all one-sided transports share, and what is enforced against whom, is in `one_sided`. Here each end
is a NIXL agent with UCX below it.

**The fence is the destruction of the peer's agent**, because no link is used that could outlive it (`nixl_agent`):

- *TCP*: bytes reach the pool only when this process reads the agent's sockets, which `_Poller` does
  under the end's lock. The fence takes that lock; then the sockets are closed.
- *RDMA*: deregistration and the end of the queue pair invalidate the key in the adapter. It does not
  return while the adapter may still write through it.
- *Shared memory, CMA and the like* are excluded: there the far process, or the kernel on its
  behalf, writes into our memory, and nothing that we destroy stops it. On one host there is `shm`.

Pools may be in GPUs' memory (which has not run on one). The library and its agents are in `nixl_agent`, so that
the environment can be checked where NIXL is not installed.

Neither deregistering alone (UCX on TCP does not look at it) nor releasing the writer's transfer is a
fence. Agents have no progress thread, which would take a third of a core when idle.
"""

import base64
import binascii
import os
from typing import Annotated

import msgspec

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Listener, Pool, TransportConfig, read_offer
from tandem.kvtransfer.transports.one_sided import OneSidedConnection, Places
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.hand_off import TransportOffer

MAX_METADATA_CHARS = 1 << 16
BATCHES_UNDER_WAY = 2
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


class NixlTransport:
    """NIXL with UCX.

    Raises:
        ConfigInvalid: The environment asks UCX for what cannot be fenced, or not survived.
    """

    name = "nixl"

    def __init__(self, config: TransportConfig | None = None) -> None:
        check_environment()
        # Here and not at the first call, so that a missing library is an error at start.
        from tandem.kvtransfer.transports import nixl_agent

        self._library = nixl_agent
        self._interface = (config or TransportConfig()).interface

    def listen(self, pool: Pool) -> Listener:
        """Begin to receive."""
        return self._library.NixlListener(pool, self._interface)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> OneSidedConnection:
        """Make an agent and connect it to the offer's."""
        facts = read_offer(offer, _Offer)
        try:
            metadata = base64.b64decode(facts.metadata, validate=True)
        except binascii.Error as error:
            raise TransferRefused(f"an invalid offer of nixl: {error}") from error
        return OneSidedConnection(
            facts,
            region,
            lambda token: self._library.SendingEnd(
                metadata, facts.pool_gpu, region, token, self._interface
            ),
            BATCHES_UNDER_WAY,
        )


class _Offer(Places, frozen=True, kw_only=True):
    metadata: Annotated[str, msgspec.Meta(max_length=MAX_METADATA_CHARS)]
    pool_gpu: int = -1
