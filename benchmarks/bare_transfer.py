"""NIXL and UCX used directly: what our transports on them are held against.

Each is a transport as far as `benchmarks.transfer` needs one, with nothing around the library: no permits, no fences, no limits.
Links and memory are those of ours. What can be prepared is prepared at the first write of a plan, which is not measured.

NIXL's ends look every 50 µs: on two cores that is faster than looking all the time, and than NIXL's progress thread. UCX's ends
wait for events.
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
from tandem.kvtransfer.transports.base import Admission, PeerKey, Pool, new_peer_key
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer

POLL_S = 50e-6
TAG = 7


class BareListener:
    """A pool that one peer may write; it is served until the process ends.

    Args:
        facts: What the peer needs to know.
    """

    def __init__(self, name: str, facts: Mapping[str, str | int]) -> None:
        self._offer = TransportOffer(name=name, descriptor={**facts})

    def admit(self, toward_host: str) -> Admission:
        """Return the offer."""
        return Admission(new_peer_key(), self._offer)

    def permit(self, peer: PeerKey, room: Room, page_ids: Sequence[int]) -> None:
        """Everything is permitted."""

    def close(self) -> None:
        """The process ends."""


class BareConnection:
    """The sending end.

    Args:
        write: Writes a plan and returns when it is there.
    """

    def __init__(self, write: Callable[[CopyPlan], None]) -> None:
        self._write = write

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Write a plan."""
        self._write(plan)

    def close(self) -> None:
        """The process ends."""


class BareNixl:
    """Descriptors prepared once, transfers made of their indices."""

    name = "bare nixl"

    def __init__(self) -> None:
        from tandem.kvtransfer.transports import nixl_agent

        self._agent: Any = nixl_agent.make_agent("")
        self._lists: dict[int, tuple[Any, Any]] = {}

    def listen(self, pool: Pool) -> BareListener:
        """Let a peer write."""
        self._register(pool.region)
        threading.Thread(target=self._progress, daemon=True).start()
        metadata = self._agent.get_agent_metadata().hex()
        return BareListener(self.name, {"metadata": metadata, "address": pool.region.address})

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> BareConnection:
        """Be ready to write."""
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

    def _prepared(self, whose: str, address: Int64s, plan: CopyPlan) -> Any:
        rows = np.stack([address, plan.size_bytes, np.zeros_like(address)], axis=1)
        return self._agent.prep_xfer_dlist(whose, rows.astype(np.uint64), "DRAM")

    def _register(self, region: MemoryRegion) -> None:
        self._agent.register_memory([(region.address, region.size_bytes, 0, "")], "DRAM")

    def _progress(self) -> None:
        while True:
            self._agent.get_new_notifs()
            time.sleep(POLL_S)


class BareUcx:
    """A tagged message for each copy. A socket carries each plan once, then its number, and the answers."""

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
        """Let a peer write."""
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, args=(server, pool.region), daemon=True).start()
        return BareListener(self.name, {"port": server.getsockname()[1]})

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> BareConnection:
        """Be ready to write."""
        peer = socket.create_connection(("127.0.0.1", int(offer.descriptor["port"])))
        self._meet(peer)
        self._view = region.buffer
        return BareConnection(self._write)

    def _meet(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = peer.makefile("rwb")
        self._say(self._worker.address.tobytes())
        address = self._library.UCXAddress.create_from_buffer(self._hear())
        self._endpoint = self._library.UCXEndpoint.create_from_worker_address(
            self._worker, address, True
        )

    def _write(self, plan: CopyPlan) -> None:
        is_new = id(plan) not in self._plans
        self._plans[id(plan)] = plan
        self._say(id(plan).to_bytes(8, "little"))
        if is_new:
            self._say(np.stack(plan.columns()).tobytes())
        assert self._hear() == b"posted"
        send = self._endpoint.tag_send
        self._run(send, [self._view[at : at + size] for at, _, size in plan.copies()])
        assert self._hear() == b"landed"

    def _serve(self, server: socket.socket, region: MemoryRegion) -> None:
        peer, _ = server.accept()
        self._meet(peer)
        with contextlib.suppress(EOFError):
            while True:
                number = int.from_bytes(self._hear(), "little")
                if number not in self._plans:
                    columns = np.frombuffer(self._hear(), np.int64).reshape(3, -1)
                    self._plans[number] = CopyPlan(*columns)
                copies = self._plans[number].copies()
                views = [region.buffer[to : to + size] for _, to, size in copies]
                self._run(self._endpoint.tag_recv, views, lambda: self._say(b"posted"))
                self._say(b"landed")

    def _run(
        self,
        begin: Callable[[Any, Any], Any],
        views: Sequence[memoryview],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        requests = [begin(self._array(view), self._tag) for view in views]
        begun()
        for request in requests:
            while not request.completed:
                self._worker.progress_worker_event(1)
            request.check_error()

    def _say(self, data: bytes) -> None:
        self._stream.write(len(data).to_bytes(8, "little") + data)
        self._stream.flush()

    def _hear(self) -> bytes:
        if not (size := self._stream.read(8)):
            raise EOFError
        return self._stream.read(int.from_bytes(size, "little"))


# By the name of our transport on the library.
BARE: dict[str, type[BareNixl] | type[BareUcx]] = {"nixl": BareNixl, "ucx": BareUcx}
