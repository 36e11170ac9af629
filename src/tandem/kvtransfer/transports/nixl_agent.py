"""NIXL agents, restricted to links that a fence can cut. Loads the library."""

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
from tandem.kvtransfer.threads import CLOSE_S
from tandem.kvtransfer.transports.base import PeerKey, Pool
from tandem.kvtransfer.transports.one_sided import NO_GPU, Memory, OneSidedListener, PollInterval
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room

# The host's own libibverbs, if any, must be loaded before the copy in the wheel: otherwise symbols of both mix, and
# the process crashes at exit.
with contextlib.suppress(OSError):
    ctypes.CDLL("libibverbs.so.1")

# Read when UCX is loaded. UCX logs to standard output by default, which ranks use to answer rank 0.
os.environ.setdefault("UCX_LOG_FILE", "stderr")

import nixl_cu12._api as nixl
import nixl_cu12._bindings as bindings

# NIXL logs every new agent, also to standard output.
_nixl_log = logging.getLogger("nixl")
_nixl_log.setLevel(logging.WARNING)
_nixl_log.handlers.clear()
_nixl_log.propagate = True

Transfer: TypeAlias = nixl.nixl_xfer_handle

BATCH_BYTES, BATCH_COPIES = 1 << 30, 8192
IDLE_PAUSE_S = 0.02

# Held while UCX's variables are in the environment.
_making = threading.Lock()

# Every exception of the bindings; they have no common base class.
ERRORS: tuple[type[Exception], ...] = (
    *(
        each
        for each in vars(bindings).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ),
    ValueError,  # raised by the Python wrapper
)


def make_agent(settings: Mapping[str, str]) -> nixl.nixl_agent:
    """Return a new agent.

    Args:
        settings: UCX's environment variables for this agent.
    """
    # Names are unique: a peer that knew an earlier agent would confuse it with a later one of the same name.
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = nixl.nixl_agent(f"tandem-{secrets.token_hex(8)}", config)
    # Not in NIXL's own option for UCX's settings, `engine_config`: NIXL cuts that at each comma of a list.
    with _in_environment(settings):
        agent.create_backend("UCX")
    return agent


@contextlib.contextmanager
def _in_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the libraries that read the environment in this block."""
    with _making:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def gpu_of(device: str) -> int:
    """Return the index of a GPU by torch's name of it; `NO_GPU` for the CPU."""
    return NO_GPU if device == "cpu" else int(device.rpartition(":")[2])


def register(agent: nixl.nixl_agent, memory: Memory) -> object:
    """Let peers of the agent read and write this memory; return the registration."""
    kind, number = _kind_and_number(gpu_of(memory.device))
    return agent.register_memory([(memory.address, memory.size_bytes, number, "")], kind)


def descriptors(
    agent: nixl.nixl_agent, address: Int64s, size_bytes: Int64s, gpu: int = NO_GPU
) -> object:
    """Return ranges of GPU or CPU memory as NIXL descriptors."""
    kind, number = _kind_and_number(gpu)
    rows = np.stack([address, size_bytes, np.full_like(address, number)], axis=1)
    return agent.get_xfer_descs(rows.astype(np.uint64), kind)


def _kind_and_number(gpu: int) -> tuple[str, int]:
    return ("DRAM", 0) if gpu == NO_GPU else ("VRAM", gpu)


class NixlListener(OneSidedListener["_NixlReceivingEnd"]):
    """A listener with one thread that polls all agents."""

    def __init__(self, pool: Pool, settings: Mapping[str, str]) -> None:
        self._poller = _Poller()
        super().__init__(
            pool, "nixl", lambda _, token: _NixlReceivingEnd(pool, token, settings, self._poller)
        )

    @override
    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Poll at short intervals, because writes are expected."""
        self._ends[peer].rooms.add(room)
        self._poller.wake()

    @override
    def revoke(self, peer: PeerKey, room: Room) -> None:
        """Poll at long intervals again, if no other room has a grant."""
        if end := self._ends.get(peer):
            end.rooms.discard(room)

    @override
    def close(self) -> None:
        """Fence all peers and end the thread."""
        super().close()
        self._poller.close()


class _NixlReceivingEnd:
    """The agent that one peer writes through."""

    def __init__(
        self, pool: Pool, token: Int64s, settings: Mapping[str, str], poller: "_Poller"
    ) -> None:
        self._poller = poller
        self._lock = threading.Lock()
        self._memory = [Memory.of_pool(pool), Memory.of_token(token)]
        try:
            self._agent: Any = make_agent(settings)
            self._registered = [register(self._agent, each) for each in self._memory]
            metadata = self._agent.get_agent_metadata()
        except ERRORS as error:
            raise TransferRefused(f"NIXL cannot register the pool: {error}") from error
        self.facts: Mapping[str, str | int] = {
            "metadata": base64.b64encode(metadata).decode(),
            "pool_gpu": gpu_of(pool.region.device),
        }
        self.rooms: set[Room] = set()  # rooms with a grant
        poller.add(self)

    def progress(self) -> None:
        """Read the bytes that have arrived."""
        with self._lock:
            if self._agent is not None:
                with contextlib.suppress(*ERRORS):  # the peer is gone, which its link reports
                    self._agent.get_new_notifs()

    def close(self) -> None:
        """Destroy the agent while the poller does not use it."""
        self._poller.remove(self)
        with self._lock:
            if self._agent is not None:
                with contextlib.suppress(*ERRORS):
                    for each in self._registered:
                        self._agent.deregister_memory(each)
                self._agent = None  # the last reference
                self._memory = []


class _Poller:
    """The thread that reads incoming bytes and answers reads of tokens."""

    def __init__(self) -> None:
        self._ends: tuple[_NixlReceivingEnd, ...] = ()
        self._changing = threading.Lock()
        self._woken = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()

    def add(self, end: _NixlReceivingEnd) -> None:
        """Start polling an end."""
        with self._changing:
            self._ends = (*self._ends, end)

    def remove(self, end: _NixlReceivingEnd) -> None:
        """Stop polling an end. A poll in progress may still run; the end's lock orders it."""
        with self._changing:
            self._ends = tuple(each for each in self._ends if each is not end)

    def wake(self) -> None:
        """End an idle pause."""
        self._woken.set()

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._woken.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        interval = PollInterval()
        while not self._is_closed:
            begin_s = time.monotonic()
            for end in self._ends:
                end.progress()
            pause_s = interval.next_pause_s(time.monotonic() - begin_s)
            if any(end.rooms for end in self._ends):
                time.sleep(pause_s)
            elif self._woken.wait(IDLE_PAUSE_S):
                self._woken.clear()


class NixlSendingEnd:
    """The agent that writes to one receiving end."""

    def __init__(
        self,
        metadata: bytes,
        pool_gpu: int,
        region: MemoryRegion,
        token: Int64s,
        settings: Mapping[str, str],
    ) -> None:
        self._memory = [Memory.of_region(region), Memory.of_token(token)]
        self._gpu, self._pool_gpu = gpu_of(region.device), pool_gpu
        self._numbers = itertools.count()
        # The only references: any other would keep the agent alive.
        self._in_flight: dict[int, Transfer] = {}
        try:
            self._agent: Any = make_agent(settings)
            for each in self._memory:
                register(self._agent, each)
            self._peer: str = self._agent.add_remote_agent(metadata)
        except ERRORS as error:
            raise TransferRefused(f"NIXL cannot connect to the offered agent: {error}") from error

    def read(self, address: int, into: Int64s, *, is_in_pool: bool = False) -> int:
        """Start reading the token, or a few bytes of the pool."""
        numbers = (into.ctypes.data, address, into.nbytes)
        plan = CopyPlan(*(np.array([each], np.int64) for each in numbers))
        return self._post("READ", plan, NO_GPU, self._pool_gpu if is_in_pool else NO_GPU)

    def writes(self, plan: CopyPlan) -> Iterator[int]:
        """Start one batch after another."""
        for batch in plan.batches(BATCH_BYTES, BATCH_COPIES):
            yield self._post("WRITE", batch, self._gpu, self._pool_gpu)

    def _post(self, what: str, plan: CopyPlan, gpu: int, peer_gpu: int) -> int:
        number = next(self._numbers)
        try:
            here = descriptors(self._agent, plan.source_offset, plan.size_bytes, gpu)
            there = descriptors(self._agent, plan.destination_offset, plan.size_bytes, peer_gpu)
            handle = self._agent.initialize_xfer(what, here, there, self._peer)
            self._in_flight[number] = handle
            self._agent.transfer(handle)
        except ERRORS as error:
            raise PeerLost(f"NIXL cannot start a transfer: {error}") from error
        return number

    def is_done(self, transfer: int) -> bool:
        """Poll a batch, which also makes progress on it."""
        try:
            state = self._agent.check_xfer_state(self._in_flight[transfer])
        except ERRORS as error:
            raise PeerLost(f"NIXL lost the owner of the pool: {error}") from error
        if state == "ERR":
            raise PeerLost("NIXL reported an error in the middle of a transfer")
        if state == "DONE":
            del self._in_flight[transfer]
        return bool(state == "DONE")

    def close(self) -> None:
        """Cancel the transfers in flight, and destroy the agent."""
        self._in_flight.clear()
        self._agent = None  # the last reference
        self._memory = []
