"""Tests specific to TCP: streams, and `--transfer-interface` with the loopback interface."""

import socket
import threading
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import PagedTokens, plan_copies
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.lanes import open_stream
from tandem.kvtransfer.transports.tcp import TcpTransport, address_of
from tandem.kvtransfer.transports.tcp_stream import TcpLane, TcpListener, TcpOffer
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tests.kept_port import kept_port
from tests.kvtransfer.transports.lane_cases import (  # noqa: F401 - of every stream
    PAGE_BYTES,
    ROOM,
    LaneRig,
    copies,
    test_closing_from_another_thread_ends_a_write_that_hangs,
    test_invalid_table_is_refused_unread_and_counted,
    test_small_and_odd_copies_land_only_at_their_destinations,
)
from tests.patience import PATIENCE_S


@pytest.fixture
def rig():
    made = LaneRig(TcpTransport(), TcpLane)
    yield made
    made.close()


def test_a_stream_without_the_secret_is_cut(rig):
    facts = rig.admission.offer.descriptor
    with socket.create_connection((facts["host"], facts["port"])) as stream:
        challenge = frames.receive_exactly(stream, frames.CHALLENGE_BYTES)
        stream.sendall(facts["peer"].encode() + frames.proof(bytes(32), challenge))
        with pytest.raises(PeerLost):
            frames.receive_exactly(stream, 1)
    assert rig.listener.num_violations == 1


class DrippingStream:
    """Has a byte ready each time that it is asked, after a second of a clock of its own."""

    def __init__(self, timeout_s):
        self.timeout_s, self.now_s = timeout_s, 0.0

    def monotonic(self):
        return self.now_s

    def gettimeout(self):
        return self.timeout_s

    def settimeout(self, timeout_s):
        self.timeout_s = timeout_s

    def recv_into(self, buffer, _size, _flags):
        self.now_s += min(1.0, self.timeout_s)
        if self.timeout_s < 1.0:
            raise TimeoutError
        buffer[:1] = b"x"
        return 1


def test_slow_unauthenticated_stream_is_closed_at_its_deadline(monkeypatch):
    stream = DrippingStream(5.0)
    monkeypatch.setattr(frames, "time", stream)
    for _ in range(2):  # each message has all of the time
        frames.receive_exactly(stream, 5)
    with pytest.raises(PeerLost):
        frames.receive_exactly(stream, 6)
    assert stream.now_s == 15.0


@pytest.mark.parametrize("by", ["revoke", "fence"])
def test_peer_that_still_sends_is_cut_and_the_fence_waits_for_its_pages(rig, monkeypatch, by):
    peer, reading, let_go = rig.admission.peer, threading.Event(), threading.Event()
    receive_into = frames.receive_into

    def receive_slowly(stream, address, size_bytes):
        reading.set()
        assert let_go.wait(PATIENCE_S)
        receive_into(stream, address, size_bytes)

    monkeypatch.setattr(frames, "receive_into", receive_slowly)
    cut = {"revoke": (rig.listener.revoke, (peer, ROOM)), "fence": (rig.listener.fence, (peer,))}
    with rig.stream()[0] as stream:
        stream.settimeout(PATIENCE_S)
        stream.sendall(frames.table_of(ROOM, copies((0, 0, PAGE_BYTES))) + b"\xff" * 10)
        assert reading.wait(PATIENCE_S)
        target, args = cut[by]
        cutting = threading.Thread(target=target, args=args, daemon=True)
        cutting.start()
        cutting.join(0.05)
        assert cutting.is_alive(), "a stream has pages open"
        let_go.set()
        cutting.join(PATIENCE_S)
        assert not cutting.is_alive()
        with pytest.raises(PeerLost, match=r"ended|broke"):
            frames.receive_exactly(stream, 1)
    assert rig.listener.num_violations == 0


@pytest.mark.parametrize("is_fenced", [False, True])
def test_closing_waits_for_a_stream_that_is_about_to_use_the_pool(is_fenced):
    opening, let_go, found = threading.Event(), threading.Event(), list[int]()

    def open_slowly(stream, region):
        opening.set()
        assert let_go.wait(PATIENCE_S)
        found.append(len(region.array()))
        return TcpLane(stream, region)

    with MemoryRegion.private(PAGE_BYTES) as memory:
        listener = TcpListener(Pool.packed(memory, PAGE_BYTES, 1), "127.0.0.1", "tcp", open_slowly)
        admission = listener.admit("127.0.0.1")
        with open_stream(TcpOffer(**admission.offer.descriptor)):
            assert opening.wait(PATIENCE_S)
            if is_fenced:
                listener.fence(admission.peer)
            closing = threading.Thread(target=listener.close, daemon=True)
            closing.start()
            closing.join(0.05)
            assert closing.is_alive(), "a stream may still look at the pool"
            let_go.set()
            closing.join(PATIENCE_S)
            assert not closing.is_alive()
    assert found == [PAGE_BYTES]


def test_fenced_peer_writes_nothing_even_if_its_bytes_have_arrived():
    arrived, let_go = threading.Event(), threading.Event()

    class SlowLane(TcpLane):
        def receive(self, batch, open_pages):
            arrived.set()
            assert let_go.wait(PATIENCE_S)
            super().receive(batch, open_pages)

    with MemoryRegion.private(4096) as memory:
        listener = TcpListener(Pool.packed(memory, 4096, 1), "127.0.0.1", "tcp", SlowLane)
        admission = listener.admit("127.0.0.1")
        listener.permit(admission.peer, ROOM, [0])
        with open_stream(TcpOffer(**admission.offer.descriptor)) as stream:
            stream.sendall(frames.table_of(ROOM, copies((0, 0, 4096))) + b"\xff" * 4096)
            assert arrived.wait(PATIENCE_S)
            listener.fence(admission.peer)
            let_go.set()
            listener.close()
        assert not memory.array().any()


def test_a_listener_without_a_thread_for_a_stream_accepts_the_next(rig, monkeypatch):
    start_one, refused = threading.Thread.start, []

    def start(thread):
        if thread.name == "kv-receive" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start_one(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TransferRefused):
        rig.connect()
    rig.connect().close()


def test_a_large_write_goes_over_several_streams():
    layout = KVLayout(64, 16, 8, 8, 64, "bfloat16", 2)
    with (
        MemoryRegion.private(layout.pool_bytes) as source,
        MemoryRegion.private(layout.pool_bytes) as destination,
    ):
        source.array()[:] = np.random.default_rng(0).integers(0, 256, layout.pool_bytes, np.uint8)
        transport = TcpTransport(TransportConfig(host="::1"))
        listener = transport.listen(Pool.packed(destination, layout.page_bytes, 64))
        admission = listener.admit("::1")
        connection = transport.connect(admission.offer, source)
        listener.permit(admission.peer, ROOM, range(64))
        pages = PagedTokens(layout, range(64))
        connection.write(ROOM, plan_copies(pages, pages, range(64 * 16)))
        assert (source.array() == destination.array()).all()
        connection.close()
        listener.close()


def test_ranges_arrive_complete_after_a_partial_system_call():
    """As after a signal; here because the reader takes what is there, which ends in the middle of a piece."""
    size_bytes = np.arange(1, 3 * frames.MAX_IOVECS, dtype=np.int64)
    address = np.cumsum(size_bytes) - size_bytes
    sent = np.random.default_rng(0).integers(0, 256, int(size_bytes.sum()), np.uint8)
    received = np.zeros_like(sent)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(
            target=frames.send_from, args=(ours, address + sent.ctypes.data, size_bytes)
        )
        sender.start()
        sizes = size_bytes[::-1]
        places = np.cumsum(sizes) - sizes + received.ctypes.data
        frames._move(frames._libc.recvmsg, theirs, 0, places, sizes)
        sender.join(PATIENCE_S)
    assert (received == sent).all()


def test_listener_on_all_addresses_offers_the_one_on_the_route_to_the_peer():
    transport = TcpTransport(TransportConfig(host="0.0.0.0"))
    with MemoryRegion.private(4096) as region:
        listener = transport.listen(Pool.packed(region, 4096, 1))
        assert listener.admit("127.0.0.1").offer.descriptor["host"] == "127.0.0.1"
        listener.close()


# ── interfaces ───────────────────────────────────────────────────────────────────────────────────


def test_addresses_of_an_interface_come_from_the_kernel():
    assert address_of("lo", socket.AF_INET) == "127.0.0.1"
    assert address_of("lo", socket.AF_INET6) == "::1"


def test_unknown_interface_is_refused_with_the_known_names():
    with pytest.raises(ConfigInvalid, match=r"--transfer-interface ib7: .* use one of .*lo"):
        TcpTransport(TransportConfig(interface="ib7"))


LINK_LOCAL = SimpleNamespace(family=socket.AF_INET6, address="fe80::1%lo")


def test_bytes_arrive_on_the_configured_port():
    with kept_port() as port, MemoryRegion.private(4096) as region:
        transport = TcpTransport(TransportConfig(port=port))
        listener = transport.listen(Pool.packed(region, 4096, 1))
        admission = listener.admit("127.0.0.1")
        assert admission.offer.descriptor["port"] == port
        with pytest.raises(ConfigInvalid, match=f"port {port}: Address already in use"):
            transport.listen(Pool.packed(region, 4096, 1))
        connection = transport.connect(admission.offer, region)
        assert {stream.getpeername()[1] for stream in connection._streams} == {port}
        connection.close()
        listener.close()


ONLY_IPV4 = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1")


@pytest.mark.parametrize("addresses", [[ONLY_IPV4, LINK_LOCAL], []])
def test_interface_without_an_address_of_the_family_is_refused(monkeypatch, addresses):
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": addresses})
    with pytest.raises(ConfigInvalid, match="no IPv6 address"):
        TcpTransport(TransportConfig(host="::", interface="lo"))


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_streams_come_from_the_interface_and_go_to_its_address(host, address):
    transport = TcpTransport(TransportConfig(host=host, interface="lo"))
    with MemoryRegion.private(4096) as region:
        listener = transport.listen(Pool.packed(region, 4096, 1))
        admission = listener.admit("192.0.2.1")
        assert admission.offer.descriptor["host"] == address
        connection = transport.connect(admission.offer, region)
        assert {stream.getsockname()[0] for stream in connection._streams} == {address}
        connection.close()
        listener.close()


def test_offer_of_a_family_that_the_interface_lacks_is_refused(monkeypatch):
    with MemoryRegion.private(4096) as region:
        listener = TcpTransport(TransportConfig(host="::1")).listen(Pool.packed(region, 4096, 1))
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [ONLY_IPV4]})
        here = TcpTransport(TransportConfig(interface="lo"))
        with pytest.raises(TransferRefused, match="no IPv6 address"):
            here.connect(listener.admit("::1").offer, region)
        listener.close()
