"""UCX through `ucxx`: RDMA, or any other network that UCX finds, without NIXL.

`lanes.py` and `tcp_stream.py` implement the messages on the stream and the checks of writes. Each copy is one tagged
message from the sender's pool into the receiver's.

The fence. UCX's Python API has only two-sided messages: bytes land only while the receiver's thread progresses
its UCX worker, or because the receiver's own NIC reads them (`RNDV_SCHEME=get_zcopy`; with the other scheme the
sender's NIC writes). Each peer has its own worker. When a stream breaks or is shut down, its thread closes the
endpoint, which ends reads in flight, and never progresses that worker again. Only then are the pages released.
"""

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Iterator, Sequence

import numpy as np

from tandem.kvtransfer.copying import gather, scatter
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import lanes
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.tcp_stream import OpenPages, TcpListener
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

# Read when the library is loaded. By default UCX logs to standard output, which ranks use to answer rank 0, and
# warns of the variables that ucxx sets. The threshold that ucxx sets would also reach NIXL, which does not work
# with it; here OPTIONS override it.
os.environ.setdefault("UCX_LOG_FILE", "stderr")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
os.environ.setdefault("UCX_RNDV_THRESH", "inf")
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

# Segments of 256 KiB instead of 8 KiB raise the TCP rate by a third. The threshold is UCX's default instead of
# ucxx's 8 KiB: rendezvous costs a round trip per message on networks without remote reads.
OPTIONS = {
    "RNDV_SCHEME": "get_zcopy",
    "RNDV_THRESH": "auto",
    "TCP_RX_SEG_SIZE": "256k",
    "TCP_TX_SEG_SIZE": "256k",
}
# A message costs about 12 µs, copying this many bytes twice about 6 µs: smaller copies are joined to one message.
STAGE_BELOW_BYTES = 32 << 10
# Interval for checking the stream, because the library's wait does not notice its end.
STREAM_CHECK_MS = 5
TAG_BYTES = 8


class UcxTransport:
    """Tagged messages of UCX."""

    name = "ucx"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config or TransportConfig()

    def listen(self, pool: Pool) -> TcpListener:
        """Start receiving."""
        return TcpListener(pool, self._config.host, self.name, self._open_lane)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> lanes.StreamConnection:
        """Connect an endpoint to the listener's."""
        return lanes.StreamConnection(offer, region, self._open_lane)

    def _open_lane(self, stream: socket.socket, region: MemoryRegion) -> "UcxLane":
        return UcxLane(stream, region, self._config.ucx_devices)


class UcxLane:
    """A worker and its only endpoint, next to an authenticated stream. Used at both ends.

    Args:
        devices: Network devices to use, in UCX's notation; empty for UCX's choice.
    """

    def __init__(self, stream: socket.socket, region: MemoryRegion, devices: str = "") -> None:
        self._stream, self._view, self._memory = stream, region.buffer, region.array()
        options = {**OPTIONS, "NET_DEVICES": devices} if devices else OPTIONS
        context = ucx.UCXContext(options, (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(
            context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._gone = select.poll()
        self._gone.register(stream, lanes.GONE)
        # A secret tag: a process that only knows the worker's address cannot reach a page.
        tag = secrets.token_bytes(TAG_BYTES)
        with lanes.handshake(stream):
            lanes.send_blob(stream, tag + self._worker.address.tobytes())
            blob = lanes.receive_blob(stream)
        self._tag, self._peers_tag = (_tag(each) for each in (tag, blob))
        try:
            address = ucx.UCXAddress.create_from_buffer(blob[TAG_BYTES:])
            # With error handling at both ends: without it, a peer's death ends this process too.
            self._endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
        except ucx.UCXError as error:
            raise PeerLost(f"no UCX endpoint: {error}") from error

    def send(self, room: Room, batch: CopyPlan) -> None:
        """Send each copy as a message, or all small copies as one message."""
        with lanes.announced(self._stream, room, batch):
            self._send(batch)

    def _send(self, batch: CopyPlan) -> None:
        views = [self._view[begin : begin + size] for begin, _, size in batch.copies()]
        if _is_staged(batch):
            staging = np.empty(batch.total_bytes, np.uint8)
            gather(self._memory, batch, staging)
            views = [staging.data]
        with self._breaking():
            self._run([self._endpoint.tag_send(Array(view), self._peers_tag) for view in views])

    def receive(self, batch: CopyPlan, open_pages: OpenPages) -> None:
        """Post the receives, report READY, and complete them."""
        with open_pages(batch):
            if _is_staged(batch):
                staging = np.empty(batch.total_bytes, np.uint8)
                self._receive([staging.data])
                return scatter(staging, batch, self._memory)
            return self._receive([self._view[to : to + size] for _, to, size in batch.copies()])

    def _receive(self, views: Sequence[memoryview]) -> None:
        with self._breaking():
            requests = [self._endpoint.tag_recv(Array(view), self._tag) for view in views]
            frames.send_bytes(self._stream, lanes.READY)
            self._run(requests)

    def close(self) -> None:
        """Close the endpoint; posted messages end."""
        self._endpoint.close_blocking()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """On an error, close the endpoint before the pages are released: a message may still be posted for them."""
        try:
            yield
        except (ucx.UCXError, PeerLost) as error:
            self.close()
            raise PeerLost(f"the UCX endpoint broke: {error}") from error

    def _run(self, requests: Sequence[ucx.UCXRequest]) -> None:
        for request in requests:
            while not request.completed:
                self._worker.progress_worker_event(STREAM_CHECK_MS)
                if not request.completed and self._gone.poll(0):
                    raise PeerLost("the stream ended")
            request.check_error()


def _tag(raw: bytes) -> ucx.UCXXTag:
    return ucx.UCXXTag(int.from_bytes(raw[:TAG_BYTES], "little"))


def _is_staged(batch: CopyPlan) -> bool:
    return len(batch) > 1 and batch.total_bytes < STAGE_BELOW_BYTES * len(batch)
