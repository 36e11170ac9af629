"""NIXL's library: how it is loaded, what it raises, and agents on links that can be fenced and survived."""

import base64
import contextlib
import ctypes
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import PeerKey, Pool
from tandem.kvtransfer.transports.one_sided import Memory, OneSidedListener, Pace
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room

# The host's own libibverbs, where there is one, has to come before the copy in the wheel: else both are
# entangled at load and the process crashes as it exits.
with contextlib.suppress(OSError):
    ctypes.CDLL("libibverbs.so.1")

# Read as UCX is loaded, which by itself speaks on standard output, where a rank answers rank 0.
os.environ.setdefault("UCX_LOG_FILE", "stderr")

import nixl_cu12._api as nixl
import nixl_cu12._bindings as bindings

# It announces every agent, and on standard output, too.
_chatter = logging.getLogger("nixl")
_chatter.setLevel(logging.WARNING)
_chatter.handlers.clear()
_chatter.propagate = True

Transfer: TypeAlias = nixl.nixl_xfer_handle

NO_GPU = -1

BATCH_BYTES, BATCH_COPIES = 1 << 30, 8192
IDLE_PAUSE_S = 0.02

# Which links UCX may take: all but those of one host. UCX calls those of CPU memory `sm` together.
LINKS = "^sm,cuda_ipc"

# All that the bindings raise; they have no class in common.
ERRORS: tuple[type[Exception], ...] = (
    *(
        each
        for each in vars(bindings).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ),
    ValueError,  # of the wrapper
)


def make_agent(interface: str) -> nixl.nixl_agent:
    """Return a new agent; an empty interface leaves the choice to UCX."""
    # A name is never used twice: a peer that has known the first would take the second for it.
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = nixl.nixl_agent(f"tandem-{secrets.token_hex(8)}", config)
    devices = f",NET_DEVICES={interface}" if interface else ""
    agent.create_backend("UCX", {"engine_config": f"TLS={LINKS}{devices}"})
    return agent


def gpu_of(device: str) -> int:
    """Return the number of the GPU that torch calls by this name; `NO_GPU` for the CPU."""
    return NO_GPU if device == "cpu" else int(device.rpartition(":")[2])


def register(agent: nixl.nixl_agent, memory: Memory) -> object:
    """Let peers of the agent read and write a piece of memory; return what takes it back."""
    kind, number = _kind_and_number(gpu_of(memory.device))
    return agent.register_memory([(memory.address, memory.size_bytes, number, "")], kind)


def descriptors(
    agent: nixl.nixl_agent, address: Int64s, size_bytes: Int64s, gpu: int = NO_GPU
) -> object:
    """Return ranges of a GPU's or the CPU's memory as the agent takes them."""
    kind, number = _kind_and_number(gpu)
    rows = np.stack([address, size_bytes, np.full_like(address, number)], axis=1)
    return agent.get_xfer_descs(rows.astype(np.uint64), kind)


def _kind_and_number(gpu: int) -> tuple[str, int]:
    return ("DRAM", 0) if gpu == NO_GPU else ("VRAM", gpu)


class NixlListener(OneSidedListener["_ReceivingEnd"]):
    """A listener with one thread that serves all agents."""

    def __init__(self, pool: Pool, interface: str) -> None:
        self._poller = _Poller()
        super().__init__(
            pool, "nixl", lambda _, token: _ReceivingEnd(pool, token, interface, self._poller)
        )

    @override
    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Have the poller hurry: writes are coming."""
        self._ends[peer].rooms.add(room)
        self._poller.wake()

    @override
    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Let the poller rest, if there is no other room."""
        if end := self._ends.get(peer):
            end.rooms.discard(room)

    @override
    def close(self) -> None:
        """Fence everybody and end the thread."""
        super().close()
        self._poller.close()


class _ReceivingEnd:
    """The agent that one peer writes through."""

    def __init__(self, pool: Pool, token: Int64s, interface: str, poller: "_Poller") -> None:
        self._poller = poller
        self._lock = threading.Lock()
        self._memory = [Memory.of_pool(pool), Memory.of_token(token)]
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
        self.rooms: set[Room] = set()  # those with a grant
        poller.serve(self)

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
    """The thread in which incoming bytes are read, and reads of tokens answered."""

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
            if any(end.rooms for end in self._ends):
                time.sleep(pause_s)
            elif self._woken.wait(IDLE_PAUSE_S):
                self._woken.clear()


class SendingEnd:
    """The agent that writes to one receiving end."""

    def __init__(
        self, metadata: bytes, pool_gpu: int, region: MemoryRegion, token: Int64s, interface: str
    ) -> None:
        self._memory = [Memory.of_region(region), Memory.of_token(token)]
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
        """Begin to read the token."""
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
