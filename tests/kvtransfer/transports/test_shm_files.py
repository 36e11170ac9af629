"""The files of transport shm match docs/protocol.md, read without our code."""

import fcntl
import os
import stat
import struct

import pytest

from tandem.kvtransfer.region import SHM_DIR, MemoryRegion
from tandem.kvtransfer.transports.base import Pool
from tandem.kvtransfer.transports.shm import ShmTransport
from tandem.wire.errors import TransferRefused
from tandem.wire.generation import Room

NUM_PAGES, ROOM = 4, Room(2**62 + 5)


@pytest.fixture
def listener():
    with MemoryRegion.shared(4096 * NUM_PAGES, f"files-{os.getpid()}") as region:
        made = ShmTransport().listen(Pool.packed(region, 4096, NUM_PAGES))
        yield made
        made.close()


def rooms_in(control):
    return struct.unpack(f"={NUM_PAGES}q", os.pread(control, 8 * NUM_PAGES, 64))


def test_files_match_the_protocol(listener):
    admission = listener.admit("127.0.0.1")
    facts = admission.offer.descriptor
    pool, none = SHM_DIR / facts["pool"], -(2**63)
    control = os.open(pool.with_suffix(f".{facts['peer']}.ctl"), os.O_RDWR)
    with open(control, "rb", buffering=0), open(pool, "rb") as memory:
        assert stat.S_IMODE(os.fstat(control).st_mode) == 0o600
        assert os.fstat(control).st_size == 64 + 8 * NUM_PAGES
        assert os.pread(control, 16, 16).hex() == facts["nonce"]
        assert rooms_in(control) == (none,) * NUM_PAGES
        with pytest.raises(BlockingIOError):  # its owner lives
            fcntl.flock(memory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        listener.permit(admission.peer, ROOM, [3, 1])
        assert rooms_in(control) == (none, ROOM, none, ROOM)
        listener.revoke(admission.peer, ROOM)
        assert rooms_in(control) == (none,) * NUM_PAGES
        assert os.pread(control, 1, 0) == b"\0"
        listener.fence(admission.peer)
        assert os.pread(control, 1, 0) == b"\1"
        assert not pool.with_suffix(f".{facts['peer']}.ctl").exists()


def test_peer_admitted_while_the_listener_closes_leaves_no_file(listener):
    """As of a worker that had to wait for the address of its host."""
    first = SHM_DIR / listener.admit("127.0.0.1").offer.descriptor["pool"]
    listener.close()
    with pytest.raises(TransferRefused):
        listener.admit("127.0.0.1")
    assert not [*SHM_DIR.glob(f"{first.stem}.*.ctl")]
