"""NIXL and UCX used directly, as baselines for our transports that use them.

Each class implements only the part of the transport interface that `benchmarks.transfer` needs: no permits, fences or
limits. Links and memory are the same as in our transports. Descriptors are prepared during the first write of a plan, which
is not measured.

The NIXL ends poll every 50 µs: on two cores this is faster than continuous polling and than NIXL's progress thread. The
UCX ends wait for events.
"""

import contextlib
import importlib
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import PeerAdmission, PeerKey, Pool, new_peer_key
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

POLL_S = 50e-6
TAG = 7


class BareListener:
    """The receiving end of a pool that one peer may write. It runs until the process ends.

    Args:
        facts: Content of the offer's descriptor.
    """

    def __init__(self, name: str, facts: Mapping[str, str | int]) -> None:
        self._offer = TransportOffer(name=name, descriptor={**facts})

    def admit(self, toward_host: str) -> PeerAdmission:
        """Return an admission with the offer."""
        return PeerAdmission(new_peer_key(), self._offer)

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Do nothing: all writes are permitted."""

    def close(self) -> None:
        """Do nothing: the end of the process releases everything."""


class BareConnection:
    """The sending end.

    Args:
        write: Writes a plan and returns once all of it has arrived.
    """

    def __init__(self, write: Callable[[CopyPlan], None]) -> None:
        self._write = write

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Write a plan."""
        self._write(plan)

    def close(self) -> None:
        """Do nothing: the end of the process releases everything."""


class BareNixl:
    """NIXL with descriptor lists that are prepared once per plan."""

    name = "bare nixl"

    def __init__(self) -> None:
        from tandem.kvtransfer.transports import nixl, nixl_agent

        self._agent: Any = nixl_agent.make_agent(nixl.ucx_settings(""))
        self._lists: dict[int, tuple[Any, Any]] = {}

    def listen(self, pool: Pool) -> BareListener:
        """Return the receiving end."""
        self._register(pool.region)
        threading.Thread(target=self._progress, daemon=True).start()
        metadata = self._agent.get_agent_metadata().hex()
        return BareListener(self.name, {"metadata": metadata, "address": pool.region.address})

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> BareConnection:
        """Return the sending end."""
        self._register(region)
        facts = offer.descriptor
        self._here, self._there = region.address, int(facts["address"])
        self._peer = self._agent.add_remote_agent(bytes.fromhex(str(facts["metadata"])))
        return BareConnection(self._write)

    def _write(self, plan: CopyPlan) -> None:
        if id(plan) not in self._lists:
            self._lists[id(plan)] = (
                self._prepared("NIXL_INIT_AGENT", plan.source_offset + self._here, plan),
                self._prepared(self._peer, plan.destination_offset + self._there, plan),
            )
        here, there = self._lists[id(plan)]
        every = np.arange(len(plan), dtype=np.int32)
        handle = self._agent.make_prepped_xfer("WRITE", here, every, there, every)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()

    def _prepared(self, agent_name: str, address: Int64s, plan: CopyPlan) -> Any:
        rows = np.stack([address, plan.size_bytes, np.zeros_like(address)], axis=1)
        return self._agent.prep_xfer_dlist(agent_name, rows.astype(np.uint64), "DRAM")

    def _register(self, region: MemoryRegion) -> None:
        self._agent.register_memory([(region.address, region.size_bytes, 0, "")], "DRAM")

    def _progress(self) -> None:
        while True:
            self._agent.get_new_notifs()
            time.sleep(POLL_S)


class BareUcx:
    """UCX with one tagged message per copy.

    A socket carries each plan once, then only its id. Acknowledgements return on the same socket.
    """

    name = "bare ucx"

    def __init__(self) -> None:
        from tandem.kvtransfer.transports import ucx  # sets the environment of the library

        library: Any = importlib.import_module("ucxx._lib.libucxx")
        self._library, self._array = library, importlib.import_module("ucxx._lib.arr").Array
        features = (self._library.Feature.TAG, self._library.Feature.WAKEUP)
        context = self._library.UCXContext(ucx.OPTIONS, features)
        self._worker = self._library.UCXWorker(
            context, enable_delayed_submission=False, enable_python_future=False
        )
        self._worker.init_blocking_progress_mode()
        self._tag = self._library.UCXXTag(TAG)
        self._plans: dict[int, CopyPlan] = {}

    def listen(self, pool: Pool) -> BareListener:
        """Return the receiving end."""
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(server, pool.region), daemon=True).start()
        return BareListener(self.name, {"port": server.getsockname()[1]})

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> BareConnection:
        """Return the sending end."""
        peer = socket.create_connection(("127.0.0.1", int(offer.descriptor["port"])))
        self._exchange_addresses(peer)
        self._view = region.buffer
        return BareConnection(self._write)

    def _exchange_addresses(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = peer.makefile("rwb")
        self._send(self._worker.address.tobytes())
        address = self._library.UCXAddress.create_from_buffer(self._receive())
        self._endpoint = self._library.UCXEndpoint.create_from_worker_address(
            self._worker, address, True
        )

    def _write(self, plan: CopyPlan) -> None:
        is_new = id(plan) not in self._plans
        self._plans[id(plan)] = plan
        self._send(id(plan).to_bytes(8, "little"))
        if is_new:
            self._send(np.stack(plan.columns()).tobytes())
        assert self._receive() == b"posted"
        send = self._endpoint.tag_send
        self._run(send, [self._view[at : at + size] for at, _, size in plan.copies()])
        assert self._receive() == b"landed"

    def _serve(self, server: socket.socket, region: MemoryRegion) -> None:
        peer, _ = server.accept()
        self._exchange_addresses(peer)
        with contextlib.suppress(EOFError):
            while True:
                plan_id = int.from_bytes(self._receive(), "little")
                if plan_id not in self._plans:
                    columns = np.frombuffer(self._receive(), np.int64).reshape(3, -1)
                    self._plans[plan_id] = CopyPlan(*columns)
                copies = self._plans[plan_id].copies()
                views = [region.buffer[to : to + size] for _, to, size in copies]
                self._run(self._endpoint.tag_recv, views, lambda: self._send(b"posted"))
                self._send(b"landed")

    def _run(
        self,
        begin: Callable[[Any, Any], Any],
        views: Sequence[memoryview],
        on_posted: Callable[[], None] = lambda: None,
    ) -> None:
        requests = [begin(self._array(view), self._tag) for view in views]
        on_posted()
        for request in requests:
            while not request.completed:
                self._worker.progress_worker_event(1)
            request.check_error()

    def _send(self, data: bytes) -> None:
        self._stream.write(len(data).to_bytes(8, "little") + data)
        self._stream.flush()

    def _receive(self) -> bytes:
        if not (size := self._stream.read(8)):
            raise EOFError
        return self._stream.read(int.from_bytes(size, "little"))


# By the name of our transport that uses the library.
BARE: dict[str, type[BareNixl] | type[BareUcx]] = {"nixl": BareNixl, "ucx": BareUcx}
