"""What the shared directory must survive beyond the checks of every transport."""

import contextlib
import os
import struct
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tandem_file import batches as file_batches
from tandem_file.batches import (
    BEAT_S,
    SILENT_AFTER_S,
    Pulse,
    beats,
    read_batch,
    sweep,
    write_batch,
)
from tandem_file.transport import FileTransport

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Permits, Pool, TransportConfig
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tests.patience import PATIENCE_S, Clock

PAGE_BYTES, NUM_PAGES = 4096, 8
ROOM = Room(1)
NONCE = bytes(16)


def one_copy(source=0, destination=0, size=PAGE_BYTES):
    return CopyPlan(*(np.array([number], np.int64) for number in (source, destination, size)))


def signed(directory, data):
    """Write any bytes as a batch of one who knows the secret; return its path."""
    path = directory / f"{1:016x}.batch"
    path.write_bytes(data + xxhash.xxh3_128(NONCE + path.stem.encode() + data).digest())
    return path


class Rig:
    """A listener in a directory, and an offer of it that nobody has taken yet."""

    def __init__(self, directory):
        self.directory = directory
        self.transport = FileTransport(TransportConfig(directory=str(directory)))
        self.source = MemoryRegion.private(PAGE_BYTES * NUM_PAGES)
        self.source.array()[:] = 5
        self.destination = MemoryRegion.private(PAGE_BYTES * NUM_PAGES)
        self.listener = self.transport.listen(Pool.packed(self.destination, PAGE_BYTES, NUM_PAGES))
        self.admission = self.listener.admit("")
        self.peer = self.admission.peer
        self.nonce = bytes.fromhex(self.admission.offer.descriptor["nonce"])
        self.listener.permit(self.peer, ROOM, range(NUM_PAGES))

    @property
    def path(self):
        return self.directory / f"tandem-{self.admission.offer.descriptor['owner']}" / self.peer

    def connect(self, **changes):
        facts = {**self.admission.offer.descriptor, **changes}
        return self.transport.connect(TransportOffer(name="file", descriptor=facts), self.source)

    def put(self, number, data=b"\x05" * PAGE_BYTES, plan=None, nonce=None):
        """Write a batch by hand, and return it when it can be read."""
        path = self.path / f"{number:016x}.part"
        write_batch(path, nonce or self.nonce, ROOM, plan or one_copy(), [memoryview(data)])
        return path

    def outcome(self, part):
        """Offer a batch, and return what its listener called it."""
        part.rename(part.with_suffix(".batch"))
        names = {f"{part.stem}.landed", f"{part.stem}.refused"}
        while not (found := names & set(os.listdir(self.path))):
            pass
        return found.pop().removeprefix(f"{part.stem}.")


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    made.listener.close()
    assert not list(tmp_path.iterdir())


def test_a_whole_batch_lands(rig):
    assert rig.outcome(rig.put(1)) == "landed"
    assert (rig.destination.array()[:PAGE_BYTES] == 5).all()


def flip_a_bit(part):
    with part.open("r+b") as file:
        file.seek(100)
        file.write(b"\x04")


def link_elsewhere(part):
    secret = part.with_suffix(".secret")
    part.rename(secret)
    part.symlink_to(secret)


SPOILED = {
    **{
        f"cut to {size}": lambda part, size=size: os.truncate(part, size)
        for size in (0, 20, 60, PAGE_BYTES, PAGE_BYTES + 47, file_batches.MAX_FILE_BYTES + 1)
    },
    "flipped bit": flip_a_bit,
    "link": link_elsewhere,
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_file_that_is_no_whole_batch_is_refused(rig, how):
    part = rig.put(1)
    SPOILED[how](part)
    assert rig.outcome(part) == "refused"
    assert not rig.destination.array().any()
    assert rig.listener.num_violations == 1


def test_a_batch_of_another_peer_number_or_size_is_refused(rig):
    assert rig.outcome(rig.put(1, nonce=bytes(16))) == "refused"
    renamed = rig.put(2).rename(rig.path / f"{3:016x}.part")
    assert rig.outcome(renamed) == "refused"
    assert rig.outcome(rig.put(4, data=b"\x05" * 100)) == "refused"
    assert rig.outcome(rig.put(5, data=b"\x05" * (PAGE_BYTES + 1))) == "refused"
    assert not rig.destination.array().any()


def test_a_batch_lands_once(rig):
    assert rig.outcome(rig.put(7)) == "landed"
    (rig.path / f"{7:016x}.landed").unlink()
    assert rig.outcome(rig.put(7)) == "refused"
    assert rig.outcome(rig.put(6)) == "refused"


@pytest.mark.parametrize("num_copies", [-1, 0, 100, file_batches.MAX_COPIES + 1, 2**62])
def test_a_table_of_a_senseless_length_is_refused(tmp_path, num_copies):
    path = signed(tmp_path, file_batches.HEADER.pack(ROOM, num_copies) + bytes(64))
    with pytest.raises(TransferRefused, match="table"):
        read_batch(path, NONCE)


@settings(suppress_health_check=list(HealthCheck))
@given(
    st.binary(max_size=200)
    | st.tuples(*(st.sampled_from([0, 1, 2, -1, 4096, 8192, 2**40, 2**63 - 1]),) * 4).map(
        lambda words: struct.pack("<4q", *words) + bytes(PAGE_BYTES)
    )
)
def test_a_batch_of_any_bytes_that_carry_the_secret_is_refused_or_lies_in_its_grant(tmp_path, data):
    permits = Permits(
        Pool.packed(MemoryRegion.private(PAGE_BYTES * NUM_PAGES), PAGE_BYTES, NUM_PAGES)
    )
    permits.permit(ROOM, [2, 3])
    path = signed(tmp_path, data)
    with contextlib.suppress(TransferRefused):
        batch = read_batch(path, NONCE)
        permits.check(Room(batch.room), batch.plan)
        assert batch.plan.destination_offset.min() >= 2 * PAGE_BYTES
        assert (batch.plan.destination_offset + batch.plan.size_bytes).max() <= 4 * PAGE_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"owner": "../../../../../etc"},
        {"peer": ".."},
        {"peer": "0123456789abcdef/../../x"},
        {"nonce": "zz" * 16},
        {"owner": 5},
    ],
)
def test_an_offer_that_would_leave_the_directory_is_refused(rig, changes):
    with pytest.raises(TransferRefused):
        rig.connect(**changes)


def test_a_directory_with_another_nonce_is_not_the_same_directory(rig):
    with pytest.raises(TransferRefused, match="not the directory of the other end"):
        rig.connect(nonce="00" * 16)


def test_a_write_that_was_refused_leaves_no_file(rig):
    connection = rig.connect()
    rig.listener.revoke(rig.peer, ROOM)
    with pytest.raises(TransferRefused):
        connection.write(ROOM, one_copy())
    assert os.listdir(rig.path) == ["nonce"]


def test_a_connection_goes_on_after_a_write_that_failed(rig):
    connection = rig.connect()
    with pytest.raises(TransferRefused):
        connection.write(Room(2), one_copy())
    connection.write(ROOM, one_copy())
    assert (rig.destination.array()[:PAGE_BYTES] == 5).all()


def test_a_fence_waits_for_the_copy_under_way(rig):
    known = rig.listener._peers[rig.peer]
    with known.turn:
        fence = threading.Thread(target=rig.listener.fence, args=(rig.peer,))
        fence.start()
        assert known.gone.wait(PATIENCE_S)
        assert rig.path.exists()
    fence.join(PATIENCE_S)
    assert not rig.path.exists()


def test_a_write_that_waits_for_a_silent_owner_ends_when_it_is_closed(rig):
    connection = rig.connect()
    rig.listener._peers[rig.peer].gone.set()  # nobody reads any more
    errors = []

    def write():
        try:
            connection.write(ROOM, one_copy())
        except PeerLost as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    connection.close()
    writer.join(PATIENCE_S)
    assert len(errors) == 1


def look_on(clock, pulse, num_beats):
    """Let time pass while somebody looks at an owner."""
    for _ in range(num_beats):
        clock.now_s += BEAT_S
        pulse.check()


SILENT_BEATS = round(SILENT_AFTER_S / BEAT_S)


def test_an_owner_is_lost_when_its_beat_stays_the_same_and_not_before(tmp_path):
    beat, clock = tmp_path / "beat", Clock()
    pulse = Pulse(beat, clock)
    for count in range(100):
        beat.write_bytes(bytes([count]))
        look_on(clock, pulse, SILENT_BEATS)
    look_on(clock, pulse, 1)
    with pytest.raises(PeerLost):
        look_on(clock, pulse, 1)


def test_an_owner_is_not_lost_to_one_who_did_not_look(tmp_path):
    beat, clock = tmp_path / "beat", Clock()
    pulse = Pulse(beat, clock)
    for count in range(2):
        beat.write_bytes(bytes([count]))
        look_on(clock, pulse, 1)
        clock.now_s += 60
        pulse.check()
    with pytest.raises(PeerLost):
        look_on(clock, pulse, SILENT_BEATS)


def test_what_the_clock_of_the_file_says_does_not_matter(tmp_path):
    beat, clock = tmp_path / "beat", Clock()
    pulse = Pulse(beat, clock)
    for count in range(5):
        beat.write_bytes(bytes([count]))
        os.utime(beat, (0, 0))
        look_on(clock, pulse, SILENT_BEATS)


def test_a_directory_that_is_gone_is_silent(tmp_path):
    clock = Clock()
    pulse = Pulse(tmp_path / "nowhere" / "beat", clock)
    with pytest.raises(PeerLost):
        look_on(clock, pulse, SILENT_BEATS + 1)


def test_leftovers_of_the_dead_are_swept_and_the_living_and_strangers_stay(tmp_path):
    dead, alive, half_removed = (
        tmp_path / f"tandem-{digit * 16}{end}"
        for digit, end in (("a", ""), ("b", ""), ("c", ".gone"))
    )
    stranger = tmp_path / "tandem-notes"
    for directory in (dead, alive, half_removed, stranger):
        directory.mkdir()
        (directory / "beat").write_bytes(b"1")
    seen = beats(tmp_path)
    (alive / "beat").write_bytes(b"2")
    sweep(tmp_path, seen)
    assert sorted(tmp_path.iterdir()) == [alive, stranger]


def test_an_owner_swept_by_mistake_beats_again_and_admits(rig):
    file_batches.remove(rig.path.parent)
    rig.listener._beat(1)
    rig.listener.admit("")


def test_a_missing_directory_is_refused_naming_the_flag(tmp_path):
    with pytest.raises(ConfigInvalid, match="--transfer-directory"):
        FileTransport()
    with pytest.raises(ConfigInvalid, match=r"--transfer-directory .*No such file"):
        FileTransport(TransportConfig(directory=str(tmp_path / "nowhere")))


def test_a_directory_that_cannot_be_written_is_refused():
    with pytest.raises(ConfigInvalid, match="--transfer-directory /proc: cannot write"):
        FileTransport(TransportConfig(directory="/proc"))
