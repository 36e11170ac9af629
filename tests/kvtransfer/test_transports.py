"""The suite for transports over every one of ours, and what takes a second process."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import tandem.kvtransfer.transports
from tandem.conformance.pair import OWN_NAME, Pair
from tandem.conformance.test_transport import (  # noqa: F401 - run here, with our `pair`
    ROOM,
    test_a_closed_connection_does_not_write,
    test_a_copy_that_leaves_the_pool_is_refused,
    test_a_fenced_peer_cannot_write_and_the_others_can,
    test_a_fenced_peers_offer_is_worth_nothing,
    test_a_page_without_a_grant_is_not_of_the_room_that_stands_for_none,
    test_a_secret_of_one_peer_is_worth_nothing_for_another,
    test_a_write_after_the_grant_was_revoked_is_refused,
    test_a_write_outside_the_grant_is_refused,
    test_an_empty_plan_lands_at_once,
    test_an_offer_that_is_not_understood_is_refused,
    test_nothing_is_written_after_a_busy_writer_was_fenced,
    test_pages_of_another_size_land_in_slices,
    test_scattered_pages_land_where_the_plan_says_and_nowhere_else,
)
from tandem.kvtransfer.region import SHM_DIR, MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.registry import choose, listen, transports
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tests.fork_server import Forked
from tests.kvtransfer import far_end
from tests.kvtransfer.makers import DIRECTORY, NAMES, OTHER_PROCESS, make
from tests.loopback import Fault, LoopbackTransport
from tests.patience import PATIENCE_S, patiently

# By the module of the library that each stands on, which need not be installed.
OPTIONAL = {"nixl": "nixl_cu12", "ucx": "ucxx"}
# Those whose writer copies by itself: a write ends although the owner is stopped.
WITHOUT_THE_OWNER = {"shm", "cuda_ipc"}
# Their owner sees no write: nothing but the fence keeps a peer out that breaks the protocol.
ONE_SIDED = {"nixl", "mooncake"}


@pytest.fixture(autouse=True)
def shared_directory(tmp_path, monkeypatch):
    """Where transport `file` works, here and in processes that a test starts."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.fixture(params=NAMES)
def pair(request):
    made = Pair(make(request.param), is_one_sided=request.param in ONE_SIDED)
    yield made
    made.close()
    assert not list(SHM_DIR.glob(f"tandem-{OWN_NAME}-*"))


# ── peers that die ───────────────────────────────────────────────────────────────────────────────


def start(what, name):
    return Forked([far_end.__name__, what, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def connected_to_far_owner(name, plan):
    """Yield the process of a pool's owner, and a connection to it that has written once."""
    with start("listen", name) as child, MemoryRegion.private(far_end.LAYOUT.pool_bytes) as region:
        offer = msgspec.json.decode(child.stdout.readline(), type=TransportOffer)
        connection = make(name).connect(offer, region)
        connection.write(ROOM, plan)
        yield child, connection


@pytest.mark.parametrize("name", OTHER_PROCESS)
def test_a_writer_notices_that_the_pools_owner_was_killed(name):
    plan = far_end.whole_pool()
    with connected_to_far_owner(name, plan) as (child, connection):
        with ThreadPoolExecutor(1) as thread:
            killing = thread.submit(child.send_signal, signal.SIGKILL)
            with pytest.raises(PeerLost):
                while True:
                    connection.write(ROOM, plan)
            killing.result()
        connection.close()


@pytest.mark.parametrize("name", OTHER_PROCESS)
@pytest.mark.parametrize("death", [signal.SIGKILL, None])
def test_nothing_is_written_after_a_busy_writer_is_fenced(name, death):
    layout = far_end.LAYOUT
    with MemoryRegion.shared(layout.pool_bytes, "fence") as region, start("write", name) as child:
        listener = make(name).listen(Pool.packed(region, layout.page_bytes, 8))
        admission = listener.admit("127.0.0.1")
        listener.permit(admission.peer, ROOM, range(8))
        child.stdin.write(msgspec.json.encode(admission.offer).decode() + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "written\n"
        if death:
            child.send_signal(death)
        listener.fence(admission.peer)
        region.array()[:] = 7
        child.stdout.read()  # to the end: the writer died of PeerLost, or was killed
        assert (region.array() == 7).all()
        listener.close()


@pytest.mark.parametrize("name", [each for each in OTHER_PROCESS if each not in WITHOUT_THE_OWNER])
def test_a_write_to_a_stopped_owner_ends_when_the_connection_is_closed(name):
    plan = far_end.whole_pool()
    with connected_to_far_owner(name, plan) as (child, connection):
        child.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{child.pid}/stat")
        for _ in patiently():
            if stat.read_text().rpartition(")")[2].split()[0] == "T":
                break
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(connection.write, ROOM, plan)
            connection.close()
            assert isinstance(writing.exception(PATIENCE_S), PeerLost)
        child.kill()


def test_a_fence_waits_for_a_writer_stopped_in_the_middle_of_a_copy():
    pair = Pair(ShmTransport())
    pair.listener.permit(pair.peer, ROOM, [0])
    with pair.connection.turn(ROOM, pair.plan([0], [0])):  # as if SIGSTOPped here
        fence = threading.Thread(target=pair.listener.fence, args=(pair.peer,))
        fence.start()
        fence.join(0.05)
        assert fence.is_alive()
    fence.join(PATIENCE_S)
    assert not fence.is_alive()
    pair.close()


# ── loopback's faults ────────────────────────────────────────────────────────────────────────────


def test_a_late_write_after_a_revocation_is_refused():
    pair = Pair(LoopbackTransport([Fault("late")]))
    pair.listener.permit(pair.peer, ROOM, [3])
    pair.connection.write(ROOM, pair.plan([3], [3]))
    pair.listener.revoke(pair.peer, ROOM)
    with pytest.raises(TransferRefused):
        pair.transport.release()
    assert not pair.destination.array().any()
    pair.close()


# ── choosing ─────────────────────────────────────────────────────────────────────────────────────


def test_auto_takes_shm_where_it_works_and_tcp_where_it_does_not():
    allowed = transports("auto", TransportConfig())
    for make_region, expected in ((MemoryRegion.shared, "shm"), (MemoryRegion.private, "tcp")):
        with make_region(4096) as region:
            listeners = listen(allowed, Pool.packed(region, 4096, 1))
            offers = [each.admit("127.0.0.1").offer for each in listeners.values()]
            name, connection = choose(offers, allowed, region)
            assert name == expected
            connection.close()
            for each in listeners.values():
                each.close()


def test_an_shm_offer_of_another_host_falls_back_to_tcp():
    allowed = transports("shm,tcp", TransportConfig())
    with MemoryRegion.shared(4096) as region:
        listeners = listen(allowed, Pool.packed(region, 4096, 1))
        shm, tcp = (each.admit("127.0.0.1").offer for each in listeners.values())
        foreign = TransportOffer(name="shm", descriptor={**shm.descriptor, "nonce": "00" * 16})
        name, connection = choose([foreign, tcp], allowed, region)
        assert name == "tcp"
        connection.close()
        for each in listeners.values():
            each.close()


def test_no_transport_in_common_says_why():
    offers = [TransportOffer(name="carrier_pigeon", descriptor={})]
    with MemoryRegion.private(4096) as region, pytest.raises(TransferRefused, match="not enabled"):
        choose(offers, transports("tcp", TransportConfig()), region)


@pytest.mark.parametrize(("name", "library"), OPTIONAL.items())
def test_a_transport_without_its_library_says_what_to_install(monkeypatch, name, library):
    ours = f"tandem.kvtransfer.transports.{name}"
    for each in [each for each in sys.modules if each.startswith((ours, f"{library}."))]:
        monkeypatch.delitem(sys.modules, each)
        monkeypatch.delattr(tandem.kvtransfer.transports, each.rpartition(".")[2], raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigInvalid, match=rf"pip install 'tandem-serve\[{name}\]'"):
        transports(name, TransportConfig())


@pytest.mark.parametrize("name", ["file", "mooncake"])
def test_a_transport_that_is_a_package_of_its_own_names_the_package(name):
    with pytest.raises(ConfigInvalid, match=f"pip install tandem-{name}"):
        transports(name, TransportConfig(), installed=())


def test_an_unknown_transport_is_refused_naming_those_there_are():
    with pytest.raises(ConfigInvalid, match="shm, tcp"):
        transports("carrier_pigeon", TransportConfig())
