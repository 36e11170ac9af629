"""Measuring against links of a made-up speed, and the limit of a socket."""

import socket

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.bare_stream import BareStreamTransport
from tandem.kvtransfer.measure import (
    MIN_ROUNDS,
    copy_within,
    digest_of_destination,
    digest_of_source,
    fill_with_noise,
    measure_latency_s,
    measure_rate,
    scattered_pages,
)
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.ids import Room

ROOM = Room(1)
PAGE = 4096


class MadeUpLink:
    """Takes its time by a clock of its own."""

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0) -> None:
        self.now_s, self.num_bytes = 0.0, 0
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s

    def clock(self) -> float:
        return self.now_s

    def write(self, plan) -> None:
        self.num_bytes += plan.total_bytes
        self.now_s += self._latency_s + plan.total_bytes / self._bytes_per_s


@given(bytes_per_s=st.floats(1e5, 1e12), num_pages=st.integers(1, 5000))
def test_the_rate_of_a_link_is_found_whatever_it_is(bytes_per_s, num_pages):
    link = MadeUpLink(bytes_per_s)
    plan = scattered_pages(num_pages, PAGE)
    rate = measure_rate(link.write, plan, 0.5, link.clock)
    assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert 1 <= rate.num_copies <= num_pages


def test_a_slow_link_is_given_little_to_write():
    link = MadeUpLink(10e6)
    measure_rate(link.write, scattered_pages(100_000, PAGE), 0.5, link.clock)
    assert link.num_bytes <= 2 * (1 << 20) + MIN_ROUNDS * (1 << 20)


def test_latency_is_that_of_one_page():
    link = MadeUpLink(1e9, latency_s=50e-6)
    latency_s = measure_latency_s(link.write, scattered_pages(10, PAGE), 0.01, link.clock)
    assert latency_s == pytest.approx(50e-6 + PAGE / 1e9)


@given(st.integers(1, 300))
def test_every_page_goes_to_a_place_of_its_own(num_pages):
    plan = scattered_pages(num_pages, PAGE)
    for offsets in (plan.source_offset, plan.destination_offset):
        assert sorted(offsets.tolist()) == list(range(0, num_pages * PAGE, PAGE))


def test_what_arrived_has_the_hash_of_what_was_sent_and_nothing_else_has():
    plan = scattered_pages(16, PAGE)
    with MemoryRegion.private(16 * PAGE) as source, MemoryRegion.private(16 * PAGE) as to:
        fill_with_noise(source)
        assert digest_of_destination(to, plan) != digest_of_source(source, plan)
        copy_within(plan, source, to)
        assert digest_of_destination(to, plan) == digest_of_source(source, plan)
        to.array()[5 * PAGE + 7] ^= 1
        assert digest_of_destination(to, plan) != digest_of_source(source, plan)


@pytest.fixture(params=["127.0.0.1", "::1"])
def stream(request):
    transport = BareStreamTransport(TransportConfig(host=request.param))
    with MemoryRegion.private(8 * PAGE) as source, MemoryRegion.private(8 * PAGE) as to:
        fill_with_noise(source)
        listener = transport.listen(Pool(to, PAGE, 8))
        offer = listener.admit(request.param).offer
        yield transport, offer, source, to
        listener.close()


def test_a_bare_stream_fills_the_far_end_from_its_start(stream):
    transport, offer, source, to = stream
    connection = transport.connect(offer, source)
    connection.write(ROOM, scattered_pages(3, PAGE))
    assert np.array_equal(to.array()[: 3 * PAGE], source.array()[: 3 * PAGE])
    assert not to.array()[3 * PAGE :].any()
    connection.write(ROOM, scattered_pages(3, PAGE)[:0])  # a ping
    connection.close()


def test_a_bare_stream_without_the_secret_moves_nothing(stream):
    transport, offer, source, to = stream
    stolen = msgspec.structs.replace(offer, descriptor=offer.descriptor | {"secret": "0" * 64})
    connection = transport.connect(stolen, source)
    with pytest.raises(PeerLost):
        connection.write(ROOM, scattered_pages(1, PAGE))
    connection.close()
    assert not to.array().any()


def test_more_than_the_pool_has_ends_a_bare_stream(stream):
    transport, offer, *_ = stream
    with MemoryRegion.private(64 * PAGE) as large:
        connection = transport.connect(offer, large)
        with pytest.raises(PeerLost):
            connection.write(ROOM, scattered_pages(64, PAGE))
        connection.close()


def test_an_offer_that_nobody_answers_is_refused(stream):
    transport, offer, source, _ = stream
    host = offer.descriptor["host"]
    # Held, so that nobody else takes it, and without anybody who listens.
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.bind((host, 0))
        port = held.getsockname()[1]
        gone = msgspec.structs.replace(offer, descriptor=offer.descriptor | {"port": port})
        with pytest.raises(TransferRefused):
            transport.connect(gone, source)
    with pytest.raises(TransferRefused):
        transport.connect(msgspec.structs.replace(offer, descriptor={}), source)


def test_an_address_of_another_machine_cannot_be_listened_on():
    with (
        MemoryRegion.private(PAGE) as region,
        pytest.raises(ConfigInvalid, match=r"192\.0\.2\.1"),
    ):
        BareStreamTransport(TransportConfig(host="192.0.2.1")).listen(Pool(region, PAGE, 1))
