"""Cost of a link with forty links at once, before and after the prefill nodes restart."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem.kvtransfer.events import RoomLanded
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.wire.generation import Room
from tests.kvtransfer.rig import Cluster, layout, pages, push_all, request

NUM_LINKS = 40
SHAPE = layout(num_pages=NUM_LINKS)


@pytest.fixture
def cluster():
    with ExitStack() as stack:
        yield Cluster(stack)


def cost() -> dict[str, int]:
    return {what: len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("task", "fd")}


def hand_off_over_each(prefills, decode, first_room: int) -> None:
    """Hand off a page over every link, all at the same time."""
    rooms = [Room(first_room + i) for i in range(NUM_LINKS)]
    for i, (prefill, room) in enumerate(zip(prefills, rooms, strict=True)):
        prefill.agent.expect(room)
        request(decode, prefill, [i], room=room)
        push_all(prefill, [NUM_LINKS - 1 - i], room=room)
    assert sorted(decode.next(RoomLanded).room for _ in rooms) == rooms
    for i, prefill in enumerate(prefills):
        sent, came = pages(prefill, [NUM_LINKS - 1 - i], SHAPE), pages(decode, [i], SHAPE)
        assert (sent == came).all()


# Both ends are in this process: a worker each, the four TCP streams, and descriptors of files and sockets.
MAX_DESCRIPTORS = 14


@pytest.mark.parametrize(("make", "max_threads"), [(ShmTransport, 2), (TcpTransport, 6)])
def test_forty_links_serve_at_once_within_their_threads_and_descriptors(cluster, make, max_threads):
    cluster.use(make())
    decode = cluster.decode(shape=SHAPE)
    prefills = [cluster.prefill(shape=SHAPE, epoch=100 + i) for i in range(NUM_LINKS)]
    before = cost()

    def serve_over_all(first_room: int) -> None:
        hand_off_over_each(prefills, decode, first_room)
        assert decode.agent.statistics().num_links == NUM_LINKS
        now = cost()
        assert now["task"] - before["task"] <= max_threads * NUM_LINKS
        assert now["fd"] - before["fd"] <= MAX_DESCRIPTORS * NUM_LINKS

    serve_over_all(1)
    for i, prefill in enumerate(prefills):
        address = f"tcp://127.0.0.1:{prefill.agent.port}"
        prefill.close()
        prefills[i] = cluster.prefill(address, shape=SHAPE, epoch=200 + i)
    decode.wait_until(lambda now: now.num_links == 0)
    serve_over_all(1000)
