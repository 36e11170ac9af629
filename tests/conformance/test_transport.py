"""The contract of a transport, with both ends in one process."""

import threading

import numpy as np
import pytest

from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.plan import CopyPlan, PagedTokens, plan_copies
from tandem.kvtransfer.transports.base import NO_ROOM
from tandem.wire.errors import PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tests.conformance.pair import LAYOUT, NUM_PAGES, ROOM


def needs_a_look(pair):
    """Skip a test of a transport whose owner sees no write."""
    if pair.is_one_sided:
        pytest.skip("the owner of the pool sees no write")


def test_scattered_pages_land_only_at_their_destinations(pair):
    rng = np.random.default_rng(1)
    source = rng.permutation(NUM_PAGES)[:40].tolist()
    destination = rng.permutation(NUM_PAGES)[:40].tolist()
    pair.listener.permit(pair.peer, ROOM, destination)
    pair.connection.write(ROOM, pair.plan(source, destination))
    for begin, to in zip(source, destination, strict=True):
        assert pair.page(pair.destination, to) == pair.page(pair.source, begin)
    untouched = set(range(NUM_PAGES)) - set(destination)
    view = pair.destination.array().reshape(NUM_PAGES, -1)
    assert not view[sorted(untouched)].any()


def test_pages_of_another_size_land_in_slices(pair):
    small = KVLayout(NUM_PAGES, 8, 4, 4, 32, "bfloat16", 2)
    plan = plan_copies(PagedTokens(small, [9, 3, 5]), PagedTokens(LAYOUT, [7, 1]), range(24))
    pair.listener.permit(pair.peer, ROOM, [7, 1])
    pair.connection.write(ROOM, plan)
    source, destination = pair.source.array(), pair.destination.array()
    for begin, to, size in plan.copies():
        assert (destination[to : to + size] == source[begin : begin + size]).all()


def test_an_empty_plan_lands_at_once(pair):
    pair.listener.permit(pair.peer, ROOM, [])
    pair.connection.write(ROOM, pair.plan([], []))


@pytest.mark.parametrize("destination", [[3, 4], [2, 3, 4, 5, 6]])
def test_a_write_outside_the_grant_is_refused(pair, destination):
    needs_a_look(pair)
    pair.listener.permit(pair.peer, ROOM, [2, 3, 5, 6])
    pair.listener.permit(pair.peer, Room(2), [4])
    with pytest.raises(TransferRefused):
        pair.connection.write(ROOM, pair.plan(destination, destination))
    assert not pair.destination.array()[4 * LAYOUT.page_bytes : 5 * LAYOUT.page_bytes].any()


def test_a_write_after_the_grant_was_revoked_is_refused(pair):
    needs_a_look(pair)
    pair.listener.permit(pair.peer, ROOM, [3])
    pair.connection.write(ROOM, pair.plan([3], [3]))
    pair.listener.revoke(pair.peer, ROOM)
    with pytest.raises(TransferRefused):
        pair.connection.write(ROOM, pair.plan([4], [3]))
    assert pair.page(pair.destination, 3) == pair.page(pair.source, 3)


def test_the_room_that_marks_ungranted_pages_cannot_write_them(pair):
    needs_a_look(pair)
    with pytest.raises(TransferRefused):
        pair.connection.write(Room(NO_ROOM), pair.plan([3], [3]))
    assert not pair.destination.array().any()


LIES = pytest.mark.parametrize(
    ("offset", "size"),
    [
        (-LAYOUT.page_bytes, LAYOUT.page_bytes),
        (LAYOUT.pool_bytes - 10, 11),
        (2**63 - 10, 100),
        (0, 2**62),
        (0, LAYOUT.pool_bytes + 1),
        (0, 0),
        (0, -5),
    ],
)


def lie(offset, size):
    """Return a plan of one copy that cannot be."""
    return CopyPlan(*(np.array([number], np.int64) for number in (0, offset, size)))


@LIES
def test_a_copy_that_leaves_the_pool_is_refused(pair, offset, size):
    pair.listener.permit(pair.peer, ROOM, range(NUM_PAGES))
    with pytest.raises(TransferRefused):
        pair.connection.write(ROOM, lie(offset, size))
    assert not pair.destination.array().any()


def test_a_fenced_peer_cannot_write_and_the_others_can(pair):
    other = pair.listener.admit("127.0.0.1")
    connection = pair.transport.connect(other.offer, pair.source)
    for peer in (pair.peer, other.peer):
        pair.listener.permit(peer, ROOM, [3])
    pair.listener.fence(pair.peer)
    pair.listener.fence(pair.peer)
    with pytest.raises(PeerLost):
        pair.connection.write(ROOM, pair.plan([5], [3]))
    connection.write(ROOM, pair.plan([6], [3]))
    assert pair.page(pair.destination, 3) == pair.page(pair.source, 6)
    connection.close()


def test_the_offer_of_a_fenced_peer_is_refused(pair):
    pair.listener.fence(pair.peer)
    with pytest.raises(TransferRefused):
        pair.transport.connect(pair.admission.offer, pair.source).close()


def test_a_closed_connection_does_not_write(pair):
    pair.listener.permit(pair.peer, ROOM, [3])
    pair.connection.close()
    with pytest.raises(PeerLost):
        pair.connection.write(ROOM, pair.plan([3], [3]))


def test_an_invalid_offer_is_refused(pair):
    nonsense = TransportOffer(name=pair.transport.name, descriptor={"pool": "../../etc/passwd"})
    with pytest.raises(TransferRefused):
        pair.transport.connect(nonsense, pair.source).close()


def test_the_secret_of_one_peer_is_refused_for_another(pair):
    own, other = (pair.listener.admit("127.0.0.1").offer for _ in range(2))
    for name in {"secret", "nonce", "token"} & own.descriptor.keys():
        assert own.descriptor[name] != other.descriptor[name]
        mixed = {**own.descriptor, name: other.descriptor[name]}
        with pytest.raises(TransferRefused):
            pair.transport.connect(
                TransportOffer(name=own.name, descriptor=mixed), pair.source
            ).close()


def test_nothing_is_written_after_a_busy_writer_was_fenced(pair):
    pair.listener.permit(pair.peer, ROOM, range(8))
    plan, has_begun = pair.plan(range(8), range(8)), threading.Event()

    def write_on():
        try:
            while True:
                pair.connection.write(ROOM, plan)
                has_begun.set()
        except PeerLost:
            return

    writer = threading.Thread(target=write_on, daemon=True)
    writer.start()
    assert has_begun.wait(30)
    pair.listener.fence(pair.peer)
    pair.destination.array()[:] = 7
    writer.join(30)
    assert not writer.is_alive(), "a fenced writer does not notice"
    assert (pair.destination.array() == 7).all()
