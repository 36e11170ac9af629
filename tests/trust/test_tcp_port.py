"""Whatever is sent to the port that takes KV: only granted pages are written, and an honest peer is served."""

import contextlib
import socket
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports import tcp_stream as frames
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.lanes import open_stream
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.transports.tcp_stream import TcpOffer
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Room
from tests.patience import PATIENCE_S
from tests.trust.hostile import FUZZ, INTEGERS

PAGE, NUM_PAGES, ROOM = 64, 8, Room(7)
GRANTED = [2, 3]
INT64 = [number for number in INTEGERS if -(2**63) <= number < 2**63]
# A room, how many copies are announced, the copies themselves, and what follows.
BATCHES = st.tuples(
    st.sampled_from([ROOM, ROOM, *INT64]),
    st.none() | st.sampled_from(INT64),
    st.lists(
        st.tuples(
            st.sampled_from([PAGE * 2, PAGE * 3, PAGE * 4, 0, *INT64]),
            st.sampled_from([PAGE, 1, 2 * PAGE, *INT64]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 300),
)


class Port:
    """A listening pool, and one peer that it has admitted."""

    def __init__(self, region: MemoryRegion) -> None:
        self.region = region
        self.transport = TcpTransport()
        self.listener = self.transport.listen(Pool.packed(region, PAGE, NUM_PAGES))
        self.admission = self.listener.admit("127.0.0.1")
        self.facts = TcpOffer(**self.admission.offer.descriptor)
        self.listener.permit(self.admission.peer, ROOM, GRANTED)

    def check(self) -> None:
        """Nothing but the granted pages has ever been written."""
        outside = np.delete(self.region.array().reshape(NUM_PAGES, PAGE), GRANTED, axis=0)
        assert not outside.any()

    def serve_one(self) -> None:
        """Take a write of an honest peer."""
        with MemoryRegion.private(PAGE) as source:
            source.array()[:] = 9
            connection = self.transport.connect(self.admission.offer, source)
            plan = CopyPlan(*(np.array([each]) for each in (0, GRANTED[0] * PAGE, PAGE)))
            connection.write(ROOM, plan)
            connection.close()
        assert (self.region.array()[GRANTED[0] * PAGE :][:PAGE] == 9).all()


@pytest.fixture
def port(monkeypatch):
    # Whoever is well gets all the time it needs to prove itself.
    monkeypatch.setattr(frames, "HANDSHAKE_TIMEOUT_S", PATIENCE_S)
    with MemoryRegion.private(PAGE * NUM_PAGES) as region:
        made = Port(region)
        yield made
        made.check()
        made.serve_one()
        made.listener.close()


def test_no_table_of_an_admitted_peer_writes_outside_its_grant(port):
    @FUZZ
    @given(st.lists(BATCHES, min_size=1, max_size=3))
    def send(batches):
        with open_stream(port.facts) as stream, contextlib.suppress(PeerLost, OSError):
            for room, num_copies, copies, num_bytes in batches:
                table = b"".join(struct.pack("<qq", *copy) for copy in copies)
                told = len(copies) if num_copies is None else num_copies
                stream.sendall(frames.HEADER.pack(room, told) + table + b"\xff" * num_bytes)
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(4096):
                pass
        port.check()

    send()
    assert port.listener.num_violations > 0


def test_nobody_gets_in_by_guessing_or_by_an_answer_to_another_challenge(port):
    replayed = port.facts.peer.encode() + frames.proof(
        bytes.fromhex(port.facts.secret), bytes(frames.CHALLENGE_BYTES)
    )

    @FUZZ
    @given(st.binary(max_size=100) | st.just(replayed) | st.just(replayed[:40] + bytes(8)))
    def knock(answer):
        with socket.create_connection(("127.0.0.1", port.facts.port), timeout=PATIENCE_S) as stream:
            stream.sendall(answer)
            stream.shutdown(socket.SHUT_WR)
            got = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while data := stream.recv(100):
                    got += data
            assert len(got) <= frames.CHALLENGE_BYTES, "nobody was accepted"

    before = port.listener.num_violations
    knock()
    assert port.listener.num_violations > before
