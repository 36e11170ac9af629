"""Mooncake's transfer engine: one-sided writes over RDMA if the host has an adapter, else over TCP.

`tandem.kvtransfer.transports.one_sided` has the code and the guarantees that one-sided transports share.
Here each end is a separate engine, found by address and port (`P2PHANDSHAKE`, no metadata server).

**The fence is the destruction of the peer's engine.** On TCP the engine's threads read incoming bytes into
the pool; the destructor closes the sockets and joins the threads. On RDMA it ends the queue pairs and
deregisters the memory, which the adapter enforces. Deregistering alone is no fence: the engine checks a
registration when a write begins, and a running write continues (120 MB of it in a test).

The destructor takes up to a second if a peer was connected, and holds the GIL: no other thread of this
process runs. Each lost peer costs this once. Engines are destroyed one at a time, so that heartbeats are
sent in between.
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
    read_offer,
    require_cpu_memory,
)
from tandem.kvtransfer.transports.one_sided import (
    Memory,
    OneSidedConnection,
    OneSidedListener,
    PoolAddresses,
)
from tandem.kvtransfer.transports.tcp_stream import address_toward
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer

Protocol = Literal["tcp", "rdma"]
ADAPTERS = Path("/sys/class/infiniband")
DONE, IN_FLIGHT = 1, 0

# One engine transfer per copy; the connection waits for the oldest. The library's batches are not used: it waits for
# them by spinning, which halves the speed on two cores, and a wait for a hanging peer cannot be stopped.
PIECE_BYTES = 16 << 20
MAX_PIECES_IN_FLIGHT = 64
# Pause between two destructions, in which threads that waited for the GIL run. Each needs at most half a millisecond.
CLOSE_PAUSE_S = 0.01


class MooncakeTransport:
    """Mooncake's transfer engine."""

    name = "mooncake"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config or TransportConfig()
        # Mooncake's names of devices have no port.
        self._devices = ",".join(name.partition(":")[0] for name in self._config.devices)
        self._turn = threading.Lock()  # held while an engine is destroyed

    def listen(self, pool: Pool) -> Listener:
        """Start receiving.

        Raises:
            ConfigInvalid: The pool is not in CPU memory.
        """
        require_cpu_memory(self.name, pool)
        return OneSidedListener(
            pool,
            self.name,
            lambda host, token: _ReceivingEnd(
                pool,
                token,
                address_toward(host, self._config.host),
                self._devices,
                self._turn,
            ),
        )

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> OneSidedConnection:
        """Create an engine and connect it to the offer's engine.

        Raises:
            TransferRefused: The offer is invalid, or the peer does not answer.
        """
        facts = read_offer(offer, _Offer)
        return OneSidedConnection(
            facts,
            region,
            lambda token: _SendingEnd(facts, region, token, self._devices, self._turn),
            MAX_PIECES_IN_FLIGHT,
        )


class _Offer(PoolAddresses, frozen=True, kw_only=True):
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol: Protocol


class _End:
    """An engine with its registered memory.

    Args:
        turn: Lock held while any engine of this process is destroyed, because heartbeats stop meanwhile.
            Two destructions in a row would exceed a peer's heartbeat timeout.
    """

    def __init__(
        self,
        host: str,
        protocol: Protocol,
        devices: str,
        memory: Sequence[Memory],
        turn: threading.Lock,
    ) -> None:
        self._turn, self._memory = turn, memory
        self._engine: TransferEngine | None = TransferEngine()
        status = self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        for each in memory:
            status = status or self._engine.register_memory(each.address, each.size_bytes)
        if status:
            raise TransferRefused(f"Mooncake cannot register memory on {host}: status {status}")

    def close(self) -> None:
        """Destroy the engine, or wait until another thread has destroyed it."""
        with self._turn:
            self._engine = None  # the last reference
            self._memory = []
            time.sleep(CLOSE_PAUSE_S)

    @property
    def _living(self) -> TransferEngine:
        assert self._engine is not None
        return self._engine


class _ReceivingEnd(_End):
    """The engine that one peer writes through."""

    def __init__(
        self, pool: Pool, token: Int64s, host: str, devices: str, turn: threading.Lock
    ) -> None:
        protocol: Protocol = "tcp"
        with contextlib.suppress(OSError):
            if any(ADAPTERS.iterdir()):
                protocol = "rdma"
        memory = [Memory.of_pool(pool), Memory.of_token(token)]
        super().__init__(host, protocol, devices, memory, turn)
        port: int = self._living.get_rpc_port()
        self.facts: Mapping[str, str | int] = {"host": host, "port": port, "protocol": protocol}


class _SendingEnd(_End):
    """The engine that writes to one receiving end."""

    def __init__(
        self,
        offer: _Offer,
        region: MemoryRegion,
        token: Int64s,
        devices: str,
        turn: threading.Lock,
    ) -> None:
        self._target = f"{offer.host}:{offer.port}"
        memory = [Memory.of_region(region), Memory.of_token(token)]
        host = address_toward(offer.host, "0.0.0.0")
        super().__init__(host, offer.protocol, devices, memory, turn)

    def read(self, address: int, into: Int64s, *, is_in_pool: bool = False) -> int:
        """Start a read; return the transfer's id."""
        del is_in_pool
        return self._started(
            self._living.batch_transfer_async_read(
                self._target, [into.ctypes.data], [address], [into.nbytes]
            )
        )

    def writes(self, plan: CopyPlan) -> Iterator[int]:
        """Start the copies one by one; yield the id of each transfer."""
        for piece in plan.batches(PIECE_BYTES, max_copies=MAX_PIECES_IN_FLIGHT):
            for begin, to, size in piece.copies():
                yield self._started(
                    self._living.transfer_submit_write(self._target, begin, to, size)
                )

    def is_done(self, transfer: int) -> bool:
        """Return whether a transfer is complete. It must be a transfer of a single piece."""
        state = self._living.transfer_check_status(transfer)
        if state not in {DONE, IN_FLIGHT}:
            raise PeerLost(f"Mooncake failed in a transfer: status {state}")
        return bool(state == DONE)

    def _started(self, transfer: int) -> int:
        if transfer <= 0:
            raise PeerLost(f"Mooncake could not start a transfer: status {transfer}")
        return transfer
