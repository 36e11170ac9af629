"""Mooncake's transfer engine: one-sided writes over RDMA where there is an adapter, else over TCP.

What all one-sided transports share, and what is enforced against whom, is in
`tandem.kvtransfer.transports.one_sided`. Here each end
is an engine of its own, found by address and port (`P2PHANDSHAKE`, no metadata server).

**The fence is the destruction of the peer's engine.** On TCP the engine's own threads read what comes
into the pool; its destructor closes the sockets and joins them. On RDMA it ends the queue pairs and
deregisters the memory, which the adapter obeys. Taking the registration back is no fence: it is looked at
when a write begins, and one that has begun goes on (120 MB of it, when tried).

The destructor takes up to a second where a peer was connected, and holds the interpreter meanwhile: no
other thread of this process runs. That is paid once for each peer that is lost, and for one at a time:
heartbeats go out between two.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from mooncake.engine import TransferEngine

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import (
    Listener,
    Pool,
    TransportConfig,
    need_cpu_memory,
    read_offer,
)
from tandem.kvtransfer.transports.one_sided import (
    Memory,
    OneSidedConnection,
    OneSidedListener,
    Places,
)
from tandem.kvtransfer.transports.tcp_stream import address_toward
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer

Protocol = Literal["tcp", "rdma"]
ADAPTERS = Path("/sys/class/infiniband")
DONE, UNDER_WAY = 1, 0

# One engine-side transfer a copy, and we wait for the oldest. The library's own batches are waited for
# by spinning: half the speed on two cores, and no way to stop waiting for a peer that hangs.
PIECE_BYTES = 16 << 20
PIECES_UNDER_WAY = 64
# In which threads that waited for the interpreter have it: each takes half a millisecond at most.
BREATH_S = 0.01


class MooncakeTransport:
    """Mooncake's transfer engine."""

    name = "mooncake"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config or TransportConfig()
        self._turn = threading.Lock()  # to destroy an engine

    def listen(self, pool: Pool) -> Listener:
        """Begin to receive.

        Raises:
            ConfigInvalid: The pool is not in CPU memory.
        """
        need_cpu_memory(self.name, pool)
        return OneSidedListener(
            pool,
            self.name,
            lambda host, token: _ReceivingEnd(
                pool,
                token,
                address_toward(host, self._config.host),
                self._config.interface,
                self._turn,
            ),
        )

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> OneSidedConnection:
        """Make an engine and connect it to the offer's.

        Raises:
            TransferRefused: This offer is not understood, or nobody answers.
        """
        facts = read_offer(offer, _Offer)
        return OneSidedConnection(
            facts,
            region,
            lambda token: _SendingEnd(facts, region, token, self._config.interface, self._turn),
            PIECES_UNDER_WAY,
        )


class _Offer(Places, frozen=True, kw_only=True):
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol: Protocol


class _End:
    """An engine around some memory.

    Args:
        turn: Held while any engine of this process is destroyed. Heartbeats go out before it and after
            it; two in a row would last longer than a peer waits for one.
    """

    def __init__(
        self,
        host: str,
        protocol: Protocol,
        interface: str,
        memory: Sequence[Memory],
        turn: threading.Lock,
    ) -> None:
        self._turn, self._memory = turn, memory
        self._engine: TransferEngine | None = TransferEngine()
        status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, interface)
        for each in memory:
            status = status or self._engine.register_memory(each.address, each.size_bytes)
        if status:
            raise TransferRefused(f"Mooncake cannot register memory on {host}: status {status}")

    def close(self) -> None:
        """Destroy the engine, or wait until another thread has."""
        with self._turn:
            self._engine = None  # the last reference
            self._memory = []
            time.sleep(BREATH_S)

    @property
    def _living(self) -> TransferEngine:
        assert self._engine is not None
        return self._engine


class _ReceivingEnd(_End):
    """The engine that one peer writes through."""

    def __init__(
        self, pool: Pool, token: Int64s, host: str, interface: str, turn: threading.Lock
    ) -> None:
        protocol: Protocol = "tcp"
        with contextlib.suppress(OSError):
            if any(ADAPTERS.iterdir()):
                protocol = "rdma"
        memory = [Memory.of_pool(pool), Memory.of_token(token)]
        super().__init__(host, protocol, interface, memory, turn)
        port: int = self._living.get_rpc_port()
        self.facts: Mapping[str, str | int] = {"host": host, "port": port, "protocol": protocol}


class _SendingEnd(_End):
    """The engine that writes to one receiving end."""

    def __init__(
        self,
        offer: _Offer,
        region: MemoryRegion,
        token: Int64s,
        interface: str,
        turn: threading.Lock,
    ) -> None:
        self._target = f"{offer.host}:{offer.port}"
        memory = [Memory.of_region(region), Memory.of_token(token)]
        host = address_toward(offer.host, "0.0.0.0")
        super().__init__(host, offer.protocol, interface, memory, turn)

    def read(self, address: int, into: Int64s) -> int:
        """Begin to read the token."""
        return self._begun(
            self._living.batch_transfer_async_read(
                self._target, [into.ctypes.data], [address], [into.nbytes]
            )
        )

    def writes(self, plan: CopyPlan) -> Iterator[int]:
        """Begin one copy after another."""
        for piece in plan.batches(PIECE_BYTES, max_copies=PIECES_UNDER_WAY):
            for begin, to, size in piece.copies():
                yield self._begun(self._living.transfer_submit_write(self._target, begin, to, size))

    def is_done(self, transfer: int) -> bool:
        """Look at a copy. Only transfers of a single piece may be asked about like this."""
        state = self._living.transfer_check_status(transfer)
        if state not in {DONE, UNDER_WAY}:
            raise PeerLost(f"Mooncake could not transfer: status {state}")
        return bool(state == DONE)

    def _begun(self, transfer: int) -> int:
        if transfer <= 0:
            raise PeerLost(f"Mooncake could not begin a transfer: status {transfer}")
        return transfer
