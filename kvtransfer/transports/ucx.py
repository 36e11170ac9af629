"""UCX through `ucxx`: RDMA, or whatever network UCX finds, without NIXL.

The messages on the stream and the checks of writes are in `lanes.py` and `tcp_stream.py`. Each copy is one
tagged message from the sender's pool into the receiver's.

The fence. UCX's Python side knows two-sided messages only: bytes land because the receiver takes them,
that is while its thread makes UCX's worker progress, or because its own NIC reads them
(`RNDV_SCHEME=get_zcopy`; the other scheme would have the sender's NIC write). Each peer has a worker of
its own. When a stream breaks or is cut, its thread closes the endpoint, which ends reads under
way, and never makes that worker progress again; only then are the pages let go.
"""

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Iterator, Sequence

from tandem.kvtransfer.copying import aligned, gather, scatter
from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import lanes
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.tcp_stream import OpenPages, TcpListener
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

# Read as the library is loaded. Its own choice is standard output, on which a rank answers rank 0; and
# it warns of the variables that ucxx sets. Of these the threshold would reach NIXL, which cannot do with
# it; here OPTIONS have the last word.
os.environ.setdefault("UCX_LOG_FILE", "stderr")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
os.environ.setdefault("UCX_RNDV_THRESH", "inf")
import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

# Segments of 256 KiB instead of 8 KiB carry a third more over TCP. The threshold is UCX's own choice
# instead of ucxx's 8 KiB: rendezvous costs a round trip a message where it cannot read remotely.
OPTIONS = {
    "RNDV_SCHEME": "get_zcopy",
    "RNDV_THRESH": "auto",
    "TCP_RX_SEG_SIZE": "256k",
    "TCP_TX_SEG_SIZE": "256k",
}
# A message costs about 12 µs, copying this much twice about 6: below it, all go as one message.
STAGE_BELOW_BYTES = 32 << 10
# The library's wait sees no end of the stream, which is looked for this often.
LOOK_AGAIN_MS = 5
TAG_BYTES = 8


class UcxTransport:
    """Tagged messages of UCX."""

    name = "ucx"

    def __init__(self, config: TransportConfig | None = None) -> None:
        self._config = config or TransportConfig()

    def listen(self, pool: Pool) -> TcpListener:
        """Begin to receive."""
        return TcpListener(pool, self._config.host, self.name, self._open_lane)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> lanes.StreamConnection:
        """Connect an endpoint to the listener's."""
        return lanes.StreamConnection(offer, region, self._open_lane)

    def _open_lane(self, stream: socket.socket, region: MemoryRegion) -> "UcxLane":
        return UcxLane(stream, region, self._config.interface)


class UcxLane:
    """A worker and its only endpoint, beside a stream whose peer has proved itself. Either end's.

    Args:
        interface: The network device to use, as UCX calls it; empty for UCX's choice.
    """

    def __init__(self, stream: socket.socket, region: MemoryRegion, interface: str = "") -> None:
        self._stream, self._view, self._memory = stream, region.buffer, region.array()
        options = {**OPTIONS, "NET_DEVICES": interface} if interface else OPTIONS
        context = ucx.UCXContext(options, (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(
            context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._gone = select.poll()
        self._gone.register(stream, lanes.GONE)
        # A tag nobody else knows: a stranger that finds the worker's address still reaches no page.
        tag = secrets.token_bytes(TAG_BYTES)
        with lanes.handshake(stream):
            lanes.send_blob(stream, tag + self._worker.address.tobytes())
            blob = lanes.receive_blob(stream)
        self._tag, self._peers_tag = (_tag(each) for each in (tag, blob))
        try:
            address = ucx.UCXAddress.create_from_buffer(blob[TAG_BYTES:])
            # With error handling, at both ends: without it a peer's death ends this process too.
            self._endpoint = ucx.UCXEndpoint.create_from_worker_address(self._worker, address, True)
        except ucx.UCXError as error:
            raise PeerLost(f"no UCX endpoint: {error}") from error

    def send(self, room: Room, batch: CopyPlan) -> None:
        """Send each copy as a message, or all as one where they are small."""
        with lanes.announced(self._stream, room, batch):
            self._send(batch)

    def _send(self, batch: CopyPlan) -> None:
        views = [self._view[begin : begin + size] for begin, _, size in batch.copies()]
        if _is_staged(batch):
            staging = aligned(batch.total_bytes)
            gather(self._memory, batch, staging)
            views = [staging.data]
        with self._breaking():
            self._run([self._endpoint.tag_send(Array(view), self._peers_tag) for view in views])

    def receive(self, batch: CopyPlan, open_pages: OpenPages) -> None:
        """Post the receives, report READY, and complete them."""
        with open_pages(batch):
            if _is_staged(batch):
                staging = aligned(batch.total_bytes)
                self._receive([staging.data])
                return scatter(staging, batch, self._memory)
            return self._receive([self._view[to : to + size] for _, to, size in batch.copies()])

    def _receive(self, views: Sequence[memoryview]) -> None:
        with self._breaking():
            requests = [self._endpoint.tag_recv(Array(view), self._tag) for view in views]
            frames.send_bytes(self._stream, lanes.READY)
            self._run(requests)

    def close(self) -> None:
        """Close the endpoint; what is posted ends here."""
        self._endpoint.close_blocking()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Close the endpoint before the pages are let go, if a message may still be posted for them."""
        try:
            yield
        except (ucx.UCXError, PeerLost) as error:
            self.close()
            raise PeerLost(f"the UCX endpoint broke: {error}") from error

    def _run(self, requests: Sequence[ucx.UCXRequest]) -> None:
        for request in requests:
            while not request.completed:
                self._worker.progress_worker_event(LOOK_AGAIN_MS)
                if not request.completed and self._gone.poll(0):
                    raise PeerLost("the stream ended")
            request.check_error()


def _tag(raw: bytes) -> ucx.UCXXTag:
    return ucx.UCXXTag(int.from_bytes(raw[:TAG_BYTES], "little"))


def _is_staged(batch: CopyPlan) -> bool:
    return len(batch) > 1 and batch.total_bytes < STAGE_BELOW_BYTES * len(batch)
