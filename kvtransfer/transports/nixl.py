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

Pools may be in GPUs' memory (which has not run on one).

Neither deregistering alone (UCX on TCP does not look at it) nor releasing the writer's transfer is a
fence. Agents have no progress thread, which would take a third of a core when idle.
"""

import base64
import binascii
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from typing_extensions import override

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.nixl_agent import (
    ERRORS,
    NO_GPU,
    Transfer,
    descriptors,
    gpu_of,
    make_agent,
    register,
)
from tandem.kvtransfer.transports.nixl_environment import check_environment
from tandem.kvtransfer.transports.one_sided import (
    Destroyer,
    Memory,
    OneSidedConnection,
    OneSidedListener,
    Pace,
    Places,
)
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer

MAX_METADATA_CHARS = 1 << 16
BATCH_BYTES, BATCH_COPIES = 1 << 30, 8192
BATCHES_UNDER_WAY = 2
IDLE_PAUSE_S = 0.02


class NixlTransport:
    """NIXL with UCX.

    Raises:
        ConfigInvalid: The environment asks UCX for what cannot be fenced, or not survived.
    """

    name = "nixl"

    def __init__(self, config: TransportConfig | None = None) -> None:
        check_environment()
        self._interface = (config or TransportConfig()).interface
        self._destroyer = Destroyer()

    def listen(self, pool: Pool) -> "NixlListener":
        """Begin to receive."""
        return NixlListener(pool, self._interface, self._destroyer)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> OneSidedConnection:
        """Make an agent and connect it to the offer's.

        Raises:
            TransferRefused: This offer is not understood, or nobody answers.
        """
        try:
            facts = msgspec.convert(offer.descriptor, _Offer)
            metadata = base64.b64decode(facts.metadata, validate=True)
        except (msgspec.ValidationError, binascii.Error) as error:
            raise TransferRefused(f"this is no offer of NIXL: {error}") from error
        return OneSidedConnection(
            facts,
            region,
            lambda rooms: _SendingEnd(metadata, facts.pool_gpu, region, rooms, self._interface),
            BATCHES_UNDER_WAY,
            self._destroyer,
        )


class _Offer(Places, frozen=True, kw_only=True):
    metadata: Annotated[str, msgspec.Meta(max_length=MAX_METADATA_CHARS)]
    pool_gpu: int = NO_GPU


class NixlListener(OneSidedListener):
    """A listener with one thread that serves all agents."""

    def __init__(self, pool: Pool, interface: str, destroyer: Destroyer) -> None:
        self._poller = _Poller()
        super().__init__(
            pool,
            "nixl",
            lambda _, rooms: _ReceivingEnd(pool, rooms, interface, self._poller),
            destroyer,
        )

    @override
    def close(self) -> None:
        """Fence everybody and end the thread."""
        super().close()
        self._poller.close()


class _ReceivingEnd:
    """The agent that one peer writes through."""

    def __init__(self, pool: Pool, rooms: Int64s, interface: str, poller: "_Poller") -> None:
        self._poller = poller
        self._lock = threading.Lock()
        self._memory = [Memory.of_pool(pool), Memory.of_table(rooms)]
        try:
            self._agent: Any = make_agent(interface)
            self._registered = [register(self._agent, each) for each in self._memory]
            metadata = self._agent.get_agent_metadata()
        except ERRORS as error:
            raise TransferRefused(f"NIXL cannot register the pool: {error}") from error
        self.facts: Mapping[str, str | int] = {
            "metadata": base64.b64encode(metadata).decode(),
            "pool_gpu": gpu_of(pool.region.device),
        }
        self.are_writes_expected = False
        poller.serve(self)

    def expect_writes(self, *, are_expected: bool) -> None:
        """Tell the poller to hurry."""
        self.are_writes_expected = are_expected
        self._poller.wake()

    def progress(self) -> None:
        """Take in what has come."""
        with self._lock:
            if self._agent is not None:
                with contextlib.suppress(*ERRORS):  # of a peer that is gone: its link says so
                    self._agent.get_new_notifs()

    def close(self) -> None:
        """Destroy the agent, when the poller is not inside it."""
        self._poller.forget(self)
        with self._lock:
            if self._agent is not None:
                with contextlib.suppress(*ERRORS):
                    for each in self._registered:
                        self._agent.deregister_memory(each)
                self._agent = None  # the last reference
                self._memory = []


class _Poller:
    """The thread in which incoming bytes are read, and table reads answered."""

    def __init__(self) -> None:
        self._ends: tuple[_ReceivingEnd, ...] = ()
        self._changing = threading.Lock()
        self._woken = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def serve(self, end: _ReceivingEnd) -> None:
        """Begin to look at an end."""
        with self._changing:
            self._ends = (*self._ends, end)

    def forget(self, end: _ReceivingEnd) -> None:
        """Look at it no more, after the look under way."""
        with self._changing:
            self._ends = tuple(each for each in self._ends if each is not end)

    def wake(self) -> None:
        """Begin to look often."""
        self._woken.set()

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        pace = Pace()
        while not self._is_closed:
            begin_s = time.monotonic()
            for end in self._ends:
                end.progress()
            pause_s = pace.next_pause_s(time.monotonic() - begin_s)
            if any(end.are_writes_expected for end in self._ends):
                time.sleep(pause_s)
            elif self._woken.wait(IDLE_PAUSE_S):
                self._woken.clear()


class _SendingEnd:
    """The agent that writes to one receiving end."""

    def __init__(
        self, metadata: bytes, pool_gpu: int, region: MemoryRegion, rooms: Int64s, interface: str
    ) -> None:
        self._memory = [Memory.of_region(region), Memory.of_table(rooms)]
        self._gpu, self._pool_gpu = gpu_of(region.device), pool_gpu
        self._numbers = itertools.count()
        # Only here: whoever else held one would keep the agent alive.
        self._under_way: dict[int, Transfer] = {}
        try:
            self._agent: Any = make_agent(interface)
            for each in self._memory:
                register(self._agent, each)
            self._peer: str = self._agent.add_remote_agent(metadata)
        except ERRORS as error:
            raise TransferRefused(f"NIXL does not understand the offer: {error}") from error

    def read(self, address: int, into: Int64s) -> int:
        """Begin to read into a part of the table."""
        numbers = (into.ctypes.data, address, into.nbytes)
        plan = CopyPlan(*(np.array([each], np.int64) for each in numbers))
        return self._post("READ", plan, NO_GPU, NO_GPU)

    def writes(self, plan: CopyPlan) -> Iterator[int]:
        """Begin a batch at a time."""
        for batch in plan.batches(BATCH_BYTES, BATCH_COPIES):
            yield self._post("WRITE", batch, self._gpu, self._pool_gpu)

    def _post(self, what: str, plan: CopyPlan, gpu: int, peer_gpu: int) -> int:
        number = next(self._numbers)
        try:
            here = descriptors(self._agent, plan.source_offset, plan.size_bytes, gpu)
            there = descriptors(self._agent, plan.destination_offset, plan.size_bytes, peer_gpu)
            handle = self._agent.initialize_xfer(what, here, there, self._peer)
            self._under_way[number] = handle
            self._agent.transfer(handle)
        except ERRORS as error:
            raise PeerLost(f"NIXL cannot begin a transfer: {error}") from error
        return number

    def is_done(self, transfer: int) -> bool:
        """Look at a batch, which also moves it along."""
        try:
            state = self._agent.check_xfer_state(self._under_way[transfer])
        except ERRORS as error:
            raise PeerLost(f"NIXL lost the owner of the pool: {error}") from error
        if state == "ERR":
            raise PeerLost("NIXL failed in the middle of a transfer")
        if state == "DONE":
            del self._under_way[transfer]
        return bool(state == "DONE")

    def close(self) -> None:
        """Give up what is under way, and destroy the agent."""
        self._under_way.clear()
        self._agent = None  # the last reference
        self._memory = []
