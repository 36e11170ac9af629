"""NIXL: one-sided writes over RDMA, or over any other network that UCX finds between two hosts.

`one_sided.py` has the code of all one-sided transports and states what they enforce. Each end is a NIXL agent
that uses UCX.

**The fence destroys the peer's agent.** That suffices, because no link is allowed that could outlive the agent
(`nixl_agent.py`):

- *TCP*: bytes reach the pool only when this process reads the agent's sockets, which `_Poller` does under the
  end's lock. The fence takes that lock; then the sockets are closed.
- *RDMA*: deregistration and the end of the queue pair invalidate the key in the adapter. Deregistration does not
  return while the adapter may still write through the key.
- *Shared memory, CMA and similar* are excluded: there the remote process, or the kernel on its behalf, writes
  into our memory, and nothing that this process destroys stops it. Use `shm` on one host.

Pools may be in GPU memory (not tested on a GPU). A read follows each write there: see `OneSidedConnection`. `nixl_agent.py` loads the library, so that the environment can
be checked where NIXL is not installed.

Deregistration alone is no fence, because UCX on TCP does not check it; neither is releasing the writer's
transfer. Agents have no progress thread, which would use a third of a core when idle.
"""

import base64
import binascii
import os
from typing import Annotated

import msgspec

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Listener, Pool, TransportConfig, read_offer
from tandem.kvtransfer.transports.one_sided import NO_GPU, OneSidedConnection, PoolAddresses
from tandem.wire.errors import ConfigInvalid, TransferRefused
from tandem.wire.hand_off import TransportOffer

MAX_METADATA_CHARS = 1 << 16
MAX_BATCHES_IN_FLIGHT = 2
# UCX's links to exclude: those within one host. `sm` stands for all of CPU memory.
LINKS = "^sm,cuda_ipc"
# Links that an operator may name instead.
FENCEABLE = {"tcp", "self", "srd", "ib", "cuda_copy", "gdr_copy", "rocm_copy"} | {
    kind + verbs for kind in ("rc", "dc", "ud") for verbs in ("", "_v", "_x", "_verbs", "_mlx5")
}
# NIXL's default. With any other value UCX writes over TCP in fragments that it acknowledges one by one, and
# aborts the owner's process when it reads fragments of a writer that is gone.
RNDV_THRESH = "inf"


def ucx_settings(devices: str) -> dict[str, str]:
    """Return UCX's variables for an agent; without devices UCX chooses them.

    Raises:
        ConfigInvalid: The environment has a value that breaks the guarantees of this transport; the message names it.
    """
    links = os.environ.get("UCX_TLS") or LINKS
    if links != LINKS and (unsafe := set(links.split(",")) - FENCEABLE):
        raise ConfigInvalid(
            f"UCX_TLS allows {', '.join(sorted(unsafe))}: a writer on such a link cannot be cut off; "
            "unset UCX_TLS, or name only links between hosts, such as UCX_TLS=rc,tcp"
        )
    threshold = os.environ.get("UCX_RNDV_THRESH", RNDV_THRESH)
    if threshold != RNDV_THRESH:
        raise ConfigInvalid(
            f"UCX_RNDV_THRESH={threshold} makes UCX abort this process when a peer dies; "
            "unset UCX_RNDV_THRESH"
        )
    return {"UCX_TLS": links} | ({"UCX_NET_DEVICES": devices} if devices else {})


class NixlTransport:
    """NIXL with UCX.

    Raises:
        ConfigInvalid: The environment allows UCX links that cannot be fenced, or a value that aborts this process.
    """

    name = "nixl"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._settings = ucx_settings((config or TransportConfig()).ucx_devices)
        # Imported here, so that a missing library is an error at start and not at the first call.
        from tandem.kvtransfer.transports import nixl_agent

        # The classes, not the module: type checkers do not look into a module that is a value.
        self._listener, self._sending_end = nixl_agent.NixlListener, nixl_agent.NixlSendingEnd

    def listen(self, pool: Pool) -> Listener:
        """Start receiving."""
        return self._listener(pool, self._settings)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> OneSidedConnection:
        """Make an agent and connect it to the offer's."""
        facts = read_offer(offer, _NixlOffer)
        try:
            metadata = base64.b64decode(facts.metadata, validate=True)
        except binascii.Error as error:
            raise TransferRefused(f"invalid nixl offer: {error}") from error
        return OneSidedConnection(
            facts,
            region,
            lambda token: self._sending_end(
                metadata, facts.pool_gpu, region, token, self._settings
            ),
            MAX_BATCHES_IN_FLIGHT,
            reads_back=facts.pool_gpu != NO_GPU,
        )


class _NixlOffer(PoolAddresses, frozen=True, kw_only=True):
    metadata: Annotated[str, msgspec.Meta(max_length=MAX_METADATA_CHARS)]
    pool_gpu: int = NO_GPU
