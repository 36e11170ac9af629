"""Transports with a second process, and the choice of a transport. `tests/conformance` has the rest."""

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
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.registry import choose, listen, transports
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer
from tests.conformance.pair import ROOM, Pair
from tests.fork_server import Forked
from tests.kvtransfer import far_end
from tests.kvtransfer.makers import OTHER_PROCESS, make
from tests.loopback import Fault, LoopbackTransport
from tests.patience import PATIENCE_S, until

# By the module of the library that each stands on, which need not be installed.
OPTIONAL = {"nixl": "nixl_cu12", "ucx": "ucxx"}
# Those whose writer copies by itself: a write ends although the owner is stopped.
WITHOUT_THE_OWNER = {"shm", "cuda_ipc"}


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
def test_writer_notices_that_the_owner_of_the_pool_was_killed(name):
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
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
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


def test_auto_uses_shm_where_it_works_and_tcp_elsewhere():
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


def test_shm_offer_from_a_different_host_falls_back_to_tcp():
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


def test_no_transport_in_common_is_refused_with_each_reason():
    offers = [TransportOffer(name="carrier_pigeon", descriptor={})]
    with MemoryRegion.private(4096) as region, pytest.raises(TransferRefused, match="not enabled"):
        choose(offers, transports("tcp", TransportConfig()), region)


@pytest.mark.parametrize(("name", "library"), OPTIONAL.items())
def test_missing_library_of_a_transport_is_named_with_the_install_command(
    monkeypatch, name, library
):
    ours = f"tandem.kvtransfer.transports.{name}"
    for each in [each for each in sys.modules if each.startswith((ours, f"{library}."))]:
        monkeypatch.delitem(sys.modules, each)
        monkeypatch.delattr(tandem.kvtransfer.transports, each.rpartition(".")[2], raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigInvalid, match=rf"pip install 'tandem-serve\[{name}\]'"):
        transports(name, TransportConfig())


def test_a_transport_in_a_separate_package_names_the_package():
    with pytest.raises(ConfigInvalid, match="pip install tandem-mooncake"):
        transports("mooncake", TransportConfig(), installed=())


def test_removed_transport_is_refused_with_its_replacement():
    with pytest.raises(ConfigInvalid, match="--transfer-backend file was removed: use tcp"):
        transports("tcp,file", TransportConfig())


def test_unknown_transport_is_refused_with_the_known_names():
    with pytest.raises(ConfigInvalid, match="shm, tcp"):
        transports("carrier_pigeon", TransportConfig())
