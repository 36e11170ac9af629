"""Mooncake's transfer engine: one-sided writes over RDMA where there is an adapter, else over TCP.

What all one-sided transports share, and what is enforced against whom, is in `one_sided`. Here each end
is an engine of its own, found by address and port (`P2PHANDSHAKE`, no metadata server).

**The fence is the destruction of the peer's engine.** On TCP the engine's own threads read what comes
into the pool; its destructor closes the sockets and joins them. On RDMA it ends the queue pairs and
deregisters the memory, which the adapter obeys. Taking the registration back is no fence: it is looked at
when a write begins, and one that has begun goes on (120 MB of it, when tried).

The destructor takes up to a second where a peer was connected, and holds the interpreter meanwhile: no
other thread of this process runs. That is paid once for each peer that is lost, and for one at a time:
heartbeats go out between two (`one_sided.Destroyer`).
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from mooncake.engine import TransferEngine

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig, need_cpu_memory
from tandem.kvtransfer.transports.one_sided import (
    Destroyer,
    Memory,
    OneSidedConnection,
    OneSidedListener,
    Places,
)
from tandem.kvtransfer.transports.tcp_listener import address_toward
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer

Protocol = Literal["tcp", "rdma"]
ADAPTERS = Path("/sys/class/infiniband")
DONE, UNDER_WAY = 1, 0

# One engine-side transfer a copy, and we wait for the oldest. The library's own batches are waited for
# by spinning: half the speed on two cores, and no way to stop waiting for a peer that hangs.
PIECE_BYTES = 16 << 20
PIECES_UNDER_WAY = 64


class MooncakeTransport:
    """Mooncake's transfer engine."""

    name = "mooncake"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config or TransportConfig()
        self._destroyer = Destroyer()

    def listen(self, pool: Pool) -> OneSidedListener:
        """Begin to receive.

        Raises:
            ConfigInvalid: The pool is not in CPU memory.
        """
        need_cpu_memory(self.name, pool)
        return OneSidedListener(
            pool,
            self.name,
            lambda host, rooms: _ReceivingEnd(
                pool, rooms, address_toward(host, self._config.host), self._config.interface
            ),
            self._destroyer,
        )

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> OneSidedConnection:
        """Make an engine and connect it to the offer's.

        Raises:
            TransferRefused: This offer is not understood, or nobody answers.
        """
        try:
            facts = msgspec.convert(offer.descriptor, _Offer)
        except msgspec.ValidationError as error:
            raise TransferRefused(f"this is no offer of Mooncake: {error}") from error
        return OneSidedConnection(
            facts,
            region,
            lambda rooms: _SendingEnd(facts, region, rooms, self._config.interface),
            PIECES_UNDER_WAY,
            self._destroyer,
        )


class _Offer(Places, frozen=True, kw_only=True):
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    protocol: Protocol


class _ReceivingEnd:
    """The engine that one peer writes through."""

    def __init__(self, pool: Pool, rooms: Int64s, host: str, interface: str) -> None:
        protocol: Protocol = "tcp"
        with contextlib.suppress(OSError):
            if any(ADAPTERS.iterdir()):
                protocol = "rdma"
        self._memory = [Memory.of_pool(pool), Memory.of_table(rooms)]
        self._engine: TransferEngine | None = _make_engine(host, protocol, interface, self._memory)
        port: int = self._engine.get_rpc_port()
        self.facts: Mapping[str, str | int] = {"host": host, "port": port, "protocol": protocol}

    def expect_writes(self, *, are_expected: bool) -> None:
        """Nothing to do: the engine's threads sleep until something comes."""

    def close(self) -> None:
        """Destroy the engine."""
        self._engine = None  # the last reference
        self._memory = []


class _SendingEnd:
    """The engine that writes to one receiving end."""

    def __init__(self, offer: _Offer, region: MemoryRegion, rooms: Int64s, interface: str) -> None:
        self._target = f"{offer.host}:{offer.port}"
        self._memory = [Memory.of_region(region), Memory.of_table(rooms)]
        host = address_toward(offer.host, "0.0.0.0")
        self._engine: TransferEngine | None = _make_engine(
            host, offer.protocol, interface, self._memory
        )

    def read(self, address: int, into: Int64s) -> int:
        """Begin to read into a part of the table."""
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

    def close(self) -> None:
        """Destroy the engine."""
        self._engine = None  # the last reference
        self._memory = []

    @property
    def _living(self) -> TransferEngine:
        assert self._engine is not None
        return self._engine

    def _begun(self, transfer: int) -> int:
        if transfer <= 0:
            raise PeerLost(f"Mooncake could not begin a transfer: status {transfer}")
        return transfer


def _make_engine(
    host: str, protocol: Protocol, interface: str, memory: Sequence[Memory]
) -> TransferEngine:
    engine = TransferEngine()
    status = engine.initialize(host, "P2PHANDSHAKE", protocol, interface)
    for each in memory:
        status = status or engine.register_memory(each.address, each.size_bytes)
    if status:
        raise TransferRefused(f"Mooncake cannot register memory on {host}: status {status}")
    return engine
