"""A torch.distributed group for each pair of processes: NCCL between GPUs, gloo between CPUs.

`lanes.py` and `tcp_stream.py` implement the messages on the stream and the checks of writes. A group of two is made
when a peer connects and ends with it; the process's global group is not used. The stream is the group's store, so
that only an authenticated peer can join.

```
 pool ── copy ─▶ staging ══ send, receive ═▶ staging ── copy ─▶ pool       two pieces in flight
```

The fence. A posted receive cannot be cancelled, so none is posted on the pool: the library writes into staging
memory, and only the copy out of it, while the pages are open, writes into the pool. A fence waits for that copy.
Shutting the stream down aborts the group, which ends everything else.

Pools in CPU memory use gloo. The NCCL group has never run.
"""

import contextlib
import os
import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from tandem.kvtransfer import copying
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import DeviceRegion, MemoryRegion
from tandem.kvtransfer.threads import CLOSE_S
from tandem.kvtransfer.transports import lanes
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.tcp_stream import OpenPages, TcpListener
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

# One piece is copied while the previous one is in flight.
PIECE_BYTES = 4 << 20
NUM_PIECES = 2
TAKEN = b"\x04"
# For one piece. The stream detects a dead peer immediately; this ends the wait for a stopped one.
TIMEOUT = timedelta(seconds=120)
LISTENER, SENDER = 0, 1
DATA_TAG, ABORT_TAG = 0, 1
NONCE_BYTES = 16
# torch reads this variable when a group is made, and has no equivalent option. The lock serializes changes to it.
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()


class NcclTransport:
    """Send and receive of torch.distributed."""

    name = "nccl"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config or TransportConfig()

    def listen(self, pool: Pool) -> TcpListener:
        """Start receiving."""
        return TcpListener(
            pool,
            self._config.host,
            self.name,
            lambda stream, region: GroupLane(stream, _tensor(region), LISTENER),
        )

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> lanes.StreamConnection:
        """Make a group with the listener."""
        return lanes.StreamConnection(
            offer, region, lambda stream, region: GroupLane(stream, _tensor(region), SENDER)
        )


def _tensor(region: MemoryRegion) -> torch.Tensor:
    if isinstance(region, DeviceRegion):
        assert region.tensor is not None
        return region.tensor
    return torch.from_numpy(region.array())


class GroupLane:
    """A group of two, next to an authenticated stream. Used at both ends.

    Args:
        memory: The bytes of the own pool. Their device decides between gloo and NCCL.
        rank: LISTENER or SENDER.
    """

    def __init__(self, stream: socket.socket, memory: torch.Tensor, rank: int) -> None:
        self._stream = stream
        shape = (NUM_PIECES, 2 * PIECE_BYTES)
        self._slots = torch.empty(shape, dtype=torch.uint8, device=memory.device)
        is_cpu = memory.device.type == "cpu"
        # Slicing an array costs a fifth of slicing a tensor.
        self._memory = memory.numpy() if is_cpu else memory
        self._staging = self._slots.numpy() if is_cpu else self._slots
        try:
            with lanes.handshake(stream):
                store = StreamStore(stream)
                self._group = (
                    GlooGroup(store, rank, stream)
                    if is_cpu
                    else NcclGroup(store, rank, memory.device)
                )
                with self._group.working():
                    self._check_peer(rank)
        except RuntimeError as error:
            raise PeerLost(f"no group with the peer: {error}") from error
        self._closing = os.eventfd(0)
        self._watcher = threading.Thread(target=self._watch, name="kv-group", daemon=True)
        self._watcher.start()

    def send(self, room: Room, batch: CopyPlan) -> None:
        """Send the pieces, at most `NUM_PIECES` ahead of the listener's acknowledgements."""
        sends: deque[Any] = deque()
        with (
            self._breaking(),
            self._group.working(),
            lanes.announced(self._stream, room, batch),
        ):
            for number, piece in enumerate(batch.batches(PIECE_BYTES, len(batch))):
                if len(sends) == NUM_PIECES:
                    self._finish_send(sends)
                slot = number % NUM_PIECES
                _gather(self._memory, piece, self._staging[slot])
                sends.append(self._group.send(self._slots[slot, : piece.total_bytes]))
            while sends:
                self._finish_send(sends)

    def _finish_send(self, sends: deque[Any]) -> None:
        # First wait for the acknowledgement: unlike gloo's wait, this wait also ends when the stream does.
        if frames.receive_exactly(self._stream, 1) != TAKEN:
            raise PeerLost("the listener stopped in the middle of a batch")
        self._group.finish(sends.popleft())

    def receive(self, batch: CopyPlan, open_pages: OpenPages) -> None:
        """Receive the pieces, and copy each one out while the next ones arrive."""
        with open_pages(batch):
            pieces = list(batch.batches(PIECE_BYTES, len(batch)))
        with self._breaking(), self._group.working():
            receives = deque(self._post(pieces, number) for number in range(NUM_PIECES))
            frames.send_bytes(self._stream, lanes.READY)
            for number, piece in enumerate(pieces):
                self._group.finish(receives.popleft())
                frames.send_bytes(self._stream, TAKEN)
                with open_pages(piece):
                    _scatter(self._staging[number % NUM_PIECES], piece, self._memory)
                    self._group.settle()
                receives.append(self._post(pieces, number + NUM_PIECES))

    def close(self) -> None:
        """Abort the group, which makes pending sends and receives fail."""
        os.eventfd_write(self._closing, 1)
        self._watcher.join(CLOSE_S)
        os.close(self._closing)

    def _post(self, pieces: list[CopyPlan], number: int) -> Any:
        if number >= len(pieces):
            return None
        slot = self._slots[number % NUM_PIECES]
        return self._group.receive(slot[: pieces[number].total_bytes])

    def _check_peer(self, rank: int) -> None:
        """Check that the stream's peer has joined the group: gloo's own port does not authenticate."""
        buffer = self._slots[0, :NONCE_BYTES]
        if rank == SENDER:
            nonce = lanes.receive_blob(self._stream)[:NONCE_BYTES]
            buffer[: len(nonce)] = torch.tensor(list(nonce), dtype=torch.uint8)
            return self._group.finish(self._group.send(buffer))
        nonce = secrets.token_bytes(NONCE_BYTES)
        lanes.send_blob(self._stream, nonce)
        self._group.finish(self._group.receive(buffer))
        if bytes(buffer.tolist()) != nonce:
            raise PeerLost("a different process joined the group")
        return None

    def _watch(self) -> None:
        """Abort the group when the stream ends, or the lane is closed."""
        events = select.poll()
        events.register(self._stream, lanes.GONE)
        events.register(self._closing, select.POLLIN)
        events.poll()
        self._group.abort()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch.distributed raises only this
            raise PeerLost(f"the group broke: {error}") from error


def _gather(memory: Any, batch: CopyPlan, staging: Any) -> None:
    """Copy the sources of a batch, one after the other, to the start of `staging`."""
    if isinstance(memory, np.ndarray):
        return copying.gather(memory, batch, staging)
    sources = [memory[begin : begin + size] for begin, _, size in batch.copies()]
    torch.cat(sources, out=staging[: batch.total_bytes])
    return None


def _scatter(staging: Any, batch: CopyPlan, memory: Any) -> None:
    """Copy the start of `staging` to the destinations of a batch: the inverse of `_gather`."""
    if isinstance(memory, np.ndarray):
        return copying.scatter(staging, batch, memory)
    pieces = staging[: batch.total_bytes].split(batch.size_bytes.tolist())
    for (_, to, size), piece in zip(batch.copies(), pieces, strict=True):
        memory[to : to + size] = piece
    return None


class GlooGroup:
    """A gloo group, over the local address of the stream."""

    def __init__(self, store: Store, rank: int, stream: socket.socket) -> None:
        host = str(stream.getsockname()[0]).removeprefix("::ffff:")
        group: Any = ProcessGroupGloo  # mostly missing in torch's stubs
        options = group._Options()
        options._devices = [group.create_device(hostname=host)]
        options._timeout = TIMEOUT
        options._threads = 1
        self._peer = 1 - rank
        self._group = group(store, rank, 2, options)

    def send(self, tensor: torch.Tensor) -> Any:
        """Start a send."""
        return self._group.send([tensor], self._peer, DATA_TAG)

    def receive(self, tensor: torch.Tensor) -> Any:
        """Start a receive."""
        return self._group.recv([tensor], self._peer, DATA_TAG)

    def finish(self, work: Any) -> None:
        """Wait until a send or receive is complete; raises RuntimeError if it fails."""
        work.wait(TIMEOUT)

    def working(self) -> AbstractContextManager[object]:
        """Return a block for copies, sends and receives."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Do nothing: the CPU has no asynchronous copies to wait for."""

    def abort(self) -> None:
        """End all waits in other threads."""
        # Gloo has no function for this, but closes all its pairs when one wait times out.
        with contextlib.suppress(RuntimeError):
            work = self._group.recv([torch.empty(1)], self._peer, ABORT_TAG)
            work.wait(timedelta(milliseconds=1))


class NcclGroup(GlooGroup):
    """An NCCL group, over any network that NCCL finds. Needs a GPU at each end.

    Args:
        device: The pool's GPU; the threads that send and receive have not set a current one.
    """

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        group: Any = torch.distributed.ProcessGroupNCCL
        options = group.Options()
        options._timeout = TIMEOUT
        self._peer = 1 - rank
        # The engine's forwards run on the default stream, which would wait for our copies.
        make_stream: Any = torch.cuda.Stream  # has no types
        self._stream = make_stream(device)
        with _no_watchdog():
            self._group = group(store, rank, 2, options)

    @override
    def finish(self, work: Any) -> None:
        work.wait()  # does not block: it only orders later work on the device
        self.settle()

    @override
    def working(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    @override
    def settle(self) -> None:
        self._stream.synchronize()

    @override
    def abort(self) -> None:
        self._group.abort()


@contextlib.contextmanager
def _no_watchdog() -> Iterator[None]:
    """Disable NCCL's watchdog for groups made in this block: by default it ends the process when a peer dies."""
    with _making:
        before = os.environ.get(ASYNC_ERRORS)
        os.environ[ASYNC_ERRORS] = "0"
        try:
            yield
        finally:
            del os.environ[ASYNC_ERRORS]
            if before is not None:
                os.environ[ASYNC_ERRORS] = before


class StreamStore(Store):
    """The store through which a group's members find each other: each key is sent over the stream."""

    def __init__(self, stream: socket.socket) -> None:
        super().__init__()
        self._stream = stream
        self._values: dict[str, bytes] = {}

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        lanes.send_blob(self._stream, key.encode())
        lanes.send_blob(self._stream, self._values[key])

    @override
    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    @override
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            name = lanes.receive_blob(self._stream).decode("utf-8", "replace")
            self._values[name] = lanes.receive_blob(self._stream)

    @override
    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)
