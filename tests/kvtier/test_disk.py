import errno
import os
import struct
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.kvtier import disk, disk_files
from tandem.kvtier.disk import DiskTier
from tandem.kvtier.disk import open_tier as open_of_spec
from tandem.kvtier.disk_files import PageDirectory
from tandem.kvtier.entry import HEADER_BYTES, Checksum, page_header
from tandem.kvtier.spec import parse_tier
from tandem.kvtier.tier import TierFailed
from tandem.wire.errors import ConfigInvalid
from tests.kvtier.fakes import PAGE_BYTES, SPACE, FakePool, content, keys, views
from tests.patience import PATIENCE_S, Clock

FILE_BYTES = HEADER_BYTES + PAGE_BYTES
SECOND_NS = 10**9


@pytest.fixture
def open_tier(tmp_path):
    """Return a function that opens a tier in a directory and waits for its first scan."""
    opened = []

    def make(num_pages=100, path=tmp_path / "kv", pool=None, **options):
        tier = DiskTier(path, num_pages * FILE_BYTES, pool or FakePool(), SPACE, **options)
        opened.append(tier)
        tier._stopping.set()  # tests scan explicitly
        tier._scanner.join()
        tier._stopping.clear()
        return tier

    yield make
    for tier in opened:
        tier.close()
        assert not tier._memory.num_lent


def path_of(tmp_path: Path, key) -> Path:
    name = key.digest.hex()
    return tmp_path / "kv" / "tandem-kv-1" / name[:2] / name[2] / name


def files(tmp_path: Path) -> list[Path]:
    found = [p for p in (tmp_path / "kv").rglob("*") if p.is_file()]
    return [p for p in found if p.name != "store-id" and not p.name.startswith("limit-")]


def forget_limits(tmp_path: Path) -> None:
    """Remove the limits of earlier tiers, as if their nodes had left a day ago."""
    for path in (tmp_path / "kv" / "tandem-kv-1").glob("limit-*"):
        path.unlink()


def got(tier, of) -> list[bytes]:
    loan = tier.get(of)
    pages = [bytes(page) for page in loan.pages]
    loan.release()
    return pages


def contents(of) -> list[bytes]:
    return [content(key) for key in of]


def put(tier, of) -> int:
    return tier.put(of, views(of))


def age(path: Path, seconds: float, now_s: float | None = None) -> None:
    then = (time.time() if now_s is None else now_s) - seconds
    os.utime(path, (then, then))


def put_aged(tier, tmp_path, of) -> None:
    """Put pages one by one with old mtimes, each a second after the previous."""
    for number, key in enumerate(of):
        put(tier, [key])
        age(path_of(tmp_path, key), 1000 - number)


def test_page_stored_by_one_node_is_read_by_another(open_tier):
    one, other, of = open_tier(), open_tier(), keys(5)
    assert put(one, of[:3]) == 3
    assert got(other, of) == contents(of[:3])
    assert put(other, of) == 2
    assert got(one, of) == contents(of)
    assert one.load().store == other.load().store != ""


def test_files_are_accessible_to_their_owner_only(open_tier, tmp_path):
    put(open_tier(), keys(2))
    top = tmp_path / "kv" / "tandem-kv-1"
    assert {p.stat().st_mode & 0o777 for p in top.rglob("*") if p.is_file()} == {0o600}
    assert {p.stat().st_mode & 0o777 for p in [top, *top.rglob("*")] if p.is_dir()} == {0o700}


def test_store_id_depends_on_directory_and_page_space(tmp_path):
    def store(path, space):
        tier = DiskTier(path, FILE_BYTES, FakePool(), space)
        tier.close()
        return tier.load().store

    other = type(SPACE)("another model", "bfloat16", SPACE.page_size)
    stores = [
        store(tmp_path / "a", SPACE),
        store(tmp_path / "b", SPACE),
        store(tmp_path / "a", other),
    ]
    assert len(set(stores)) == 3
    assert store(tmp_path / "a", SPACE) == stores[0]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 100] ^= 4
    path.write_bytes(data)


def another_page(path):
    other = keys(1, first_token=77)[0]
    [page] = views([other])
    checksum = Checksum(page).digest()
    path.write_bytes(page_header(other.digest, PAGE_BYTES, checksum) + page)


def another_version(path):
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 2)
    path.write_bytes(data)


def another_length(path):
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack("<Q", PAGE_BYTES - 1)
    path.write_bytes(data)


def a_link(path):
    outside = path.parents[4] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


WRONG = [
    cut,
    empty,
    lengthen,
    flip_a_bit,
    another_page,
    another_version,
    another_length,
    a_link,
    a_pipe,
]


@pytest.mark.parametrize("spoil", WRONG)
def test_corrupted_page_is_counted_removed_and_not_lent(open_tier, tmp_path, spoil):
    tier, of = open_tier(), keys(3)
    put(tier, of)
    spoil(path_of(tmp_path, of[1]))
    assert got(tier, of) == contents(of[:1])
    assert not os.path.lexists(path_of(tmp_path, of[1]))
    assert tier.load().num_corrupted == 1
    assert put(tier, of) == 1
    assert got(tier, of) == contents(of)


def test_folder_with_the_name_of_a_page_is_a_miss(open_tier, tmp_path):
    tier, of = open_tier(), keys(2)
    put(tier, of)
    path_of(tmp_path, of[1]).unlink()
    path_of(tmp_path, of[1]).mkdir()
    assert got(tier, of) == contents(of[:1])
    assert tier.load().num_corrupted == 1


def test_partially_written_page_is_a_miss(open_tier, tmp_path, monkeypatch):
    tier, of = open_tier(), keys(1)
    begun, go = threading.Event(), threading.Event()
    real = Path.rename

    def slowly(path, target):
        begun.set()
        assert go.wait(PATIENCE_S)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", slowly)
    putter = threading.Thread(target=put, args=(tier, of))
    putter.start()
    assert begun.wait(PATIENCE_S)
    [half] = files(tmp_path)
    assert half.name.startswith(".")
    assert got(tier, of) == []
    go.set()
    putter.join()
    assert got(tier, of) == contents(of)
    assert files(tmp_path) == [path_of(tmp_path, of[0])]


def test_temporary_files_of_dead_writers_are_removed_after_an_hour(open_tier, tmp_path):
    tier, of = open_tier(), keys(1)
    put(tier, of)
    folder = path_of(tmp_path, of[0]).parent
    young, old, foreign = folder / ".young", folder / ".old", folder / "README"
    for path in (young, old, foreign):
        path.write_bytes(b"half")
    age(old, 3700)
    age(foreign, 3700)
    age(young, 3500)
    tier.scan()
    assert young.exists()
    assert foreign.exists()
    assert not old.exists()
    assert tier.load().num_pages == 1


def test_least_recently_used_pages_are_evicted_down_to_the_limit(open_tier, tmp_path):
    tier, of = open_tier(num_pages=3), [keys(1, first_token=i)[0] for i in range(5)]
    put_aged(tier, tmp_path, of[:3])
    tier.scan()
    got(tier, [of[0]])
    put(tier, of[3:4])
    put(tier, of[4:])
    assert {p.name for p in files(tmp_path)} == {of[i].digest.hex() for i in (0, 3, 4)}
    load = tier.load()
    assert (load.num_evicted, load.num_bytes) == (2, 3 * FILE_BYTES)


def test_pages_over_the_limit_at_start_are_evicted(open_tier, tmp_path):
    of = keys(6)
    put(open_tier(), of)
    forget_limits(tmp_path)
    for number, key in enumerate(of):  # the kernel's clock is too coarse for distinct mtimes
        age(path_of(tmp_path, key), number)
    small = open_tier(num_pages=2)
    small.scan()
    assert len(files(tmp_path)) == 2
    # Parents outlive their children.
    assert got(small, of) == contents(of[:2])


def test_ranks_share_the_limit_of_their_node(tmp_path):
    spec = parse_tier(f"disk:{tmp_path}/kv:{8 * FILE_BYTES}")
    spaces = [replace(SPACE, shard=shard) for shard in ("0/2", "1/2", "0/2")]
    ranks = [open_of_spec(spec, FakePool(), space) for space in spaces]
    for number in range(12):
        for rank, tier in enumerate(ranks[:2]):
            put(tier, keys(1, first_token=number, salt=str(rank)))
    for tier in ranks:
        tier.scan()
        tier.close()
    loads = [tier.load() for tier in ranks]
    assert loads[0].store == loads[2].store != loads[1].store
    assert loads[2].num_bytes == loads[2].limit_bytes == 8 * FILE_BYTES
    assert len(files(tmp_path)) == 8


def test_nodes_that_scan_at_once_evict_the_excess_once(open_tier, tmp_path, monkeypatch):
    put_aged(open_tier(num_pages=8), tmp_path, keys(8))
    forget_limits(tmp_path)
    first, second = open_tier(num_pages=5), open_tier(num_pages=5)
    listed = PageDirectory.scan

    def scan_of_first(directory):
        yield from listed(directory)
        monkeypatch.setattr(PageDirectory, "scan", listed)
        second.scan()

    monkeypatch.setattr(PageDirectory, "scan", scan_of_first)
    first.scan()
    assert len(files(tmp_path)) == 5
    assert (first.load().num_pages, second.load().num_pages) == (5, 5)


def test_ranks_that_know_the_same_old_pages_stay_within_the_limit(tmp_path):
    spec = parse_tier(f"disk:{tmp_path}/kv:{8 * FILE_BYTES}")
    ranks = [
        open_of_spec(spec, FakePool(), replace(SPACE, shard=shard)) for shard in ("0/2", "1/2")
    ]
    put_aged(ranks[0], tmp_path, keys(8))
    for tier in ranks:
        tier.scan()
    for number in range(4):
        for rank, tier in enumerate(ranks):
            put(tier, keys(1, first_token=100 + number, salt=str(rank)))
    for tier in ranks:
        tier.close()
    assert len(files(tmp_path)) == 8


@pytest.mark.parametrize("before", ["0/1", "0/2", "3/4"])
def test_pages_of_a_node_with_a_different_tp_are_evicted_first(tmp_path, before):
    spec, of = parse_tier(f"disk:{tmp_path}/kv:{4 * FILE_BYTES}"), keys(8)
    for shard, mine in ((before, of[:4]), ("1/3", of[4:])):
        tier = open_of_spec(spec, FakePool(), replace(SPACE, shard=shard))
        tier.scan()
        assert put(tier, mine) == 4
        tier.close()
        for path in files(tmp_path):
            age(path, 1000)
    assert {p.name for p in files(tmp_path)} == {key.digest.hex() for key in of[4:]}


def test_largest_limit_of_a_directory_holds(open_tier, tmp_path):
    large, small, of = open_tier(num_pages=6), open_tier(num_pages=2), keys(6)
    large.scan()
    put(large, of)
    small.scan()
    assert put(small, keys(1, first_token=99)) == 1
    assert len(files(tmp_path)) == 6
    assert small.load().limit_bytes == large.load().limit_bytes == 6 * FILE_BYTES


def test_limit_of_a_node_that_has_left_ends_after_a_day(open_tier, tmp_path):
    put(large := open_tier(num_pages=6), keys(6))
    large.scan()
    small = open_tier(num_pages=2)
    recorded = tmp_path / "kv" / "tandem-kv-1" / f"limit-{6 * FILE_BYTES}"
    age(recorded, disk_files.LIMIT_S - 60)
    small.scan()
    assert len(files(tmp_path)) == 6
    age(recorded, disk_files.LIMIT_S + 60)
    small.scan()
    assert len(files(tmp_path)) == 2
    assert not recorded.exists()


def stuck(monkeypatch, of) -> list[str]:
    """Make removal of these keys' files fail; return the list of their names, which a test may change."""
    names = [key.digest.hex() for key in of]
    real = Path.unlink

    def unlink(path, **options):
        if path.name in names:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink)
    return names


def test_file_that_cannot_be_removed_is_not_counted_as_free(open_tier, tmp_path, monkeypatch):
    tier, of = open_tier(num_pages=3), [keys(1, first_token=i)[0] for i in range(5)]
    put_aged(tier, tmp_path, of[:3])
    tier.scan()
    names = stuck(monkeypatch, of[:1])
    with pytest.raises(TierFailed, match="Permission denied"):
        put(tier, of[3:4])
    assert (tier.load().num_bytes, tier.load().num_evicted) == (3 * FILE_BYTES, 0)
    assert put(tier, of[3:4]) == 1  # the next file is evicted instead
    assert {p.name for p in files(tmp_path)} == {of[i].digest.hex() for i in (0, 2, 3)}
    assert tier.load().num_bytes == 3 * FILE_BYTES
    tier.scan()
    names.clear()
    assert put(tier, of[4:]) == 1
    assert not path_of(tmp_path, of[0]).exists()


def test_directory_without_removable_files_does_not_grow(open_tier, tmp_path, monkeypatch):
    tier, of, new = open_tier(num_pages=3), keys(3), keys(3, first_token=9)
    put(tier, of)
    stuck(monkeypatch, of)
    for key in new:
        with pytest.raises(TierFailed, match="Permission denied"):
            put(tier, [key])
    assert len(files(tmp_path)) == 3
    assert got(tier, of) == contents(of)


def test_page_recently_used_by_another_node_is_not_evicted(open_tier, tmp_path):
    one, other, of = open_tier(num_pages=2), open_tier(num_pages=2), keys(1) + keys(2, 9)
    put_aged(one, tmp_path, of[:2])
    one.scan()
    got(other, of[:1])
    put(one, of[2:])
    assert path_of(tmp_path, of[0]).exists()
    assert not path_of(tmp_path, of[1]).exists()


def test_mtime_is_refreshed_at_most_once_a_minute(open_tier, tmp_path):
    now_s = time.time()
    tier, of = open_tier(clock=Clock(now_s)), keys(1)
    put(tier, of)
    path = path_of(tmp_path, of[0])
    age(path, 30, now_s)
    before = path.stat().st_mtime_ns
    got(tier, of)
    put(tier, of)
    assert path.stat().st_mtime_ns == before
    age(path, 61, now_s)
    got(tier, of)
    assert path.stat().st_mtime_ns > before


def test_journal_follows_puts_and_evictions(open_tier, tmp_path):
    tier, of = open_tier(num_pages=2), keys(2)
    names = {name for key in of for name in key.blocks}
    put(tier, of)
    assert set(tier.journal.since(0).added) == names
    other = open_tier()
    got(other, of)
    assert set(other.journal.since(0).added) == names
    path_of(tmp_path, of[0]).unlink()
    path_of(tmp_path, of[1]).unlink()
    other.scan()
    assert not other.journal.since(-1).added
    put(tier, keys(2, first_token=50))
    assert not names & set(tier.journal.since(-1).added)


class FullDisk:
    """A disk that holds a limited number of files."""

    def __init__(self, monkeypatch, tmp_path, room, error=errno.ENOSPC):
        self.room, self._tmp_path, self._error, self._real = room, tmp_path, error, os.fdopen
        monkeypatch.setattr(os, "fdopen", self.fdopen)

    def fdopen(self, file, mode, **options):
        if mode == "wb" and len(files(self._tmp_path)) > self.room:
            os.close(file)
            raise OSError(self._error, os.strerror(self._error))
        return self._real(file, mode, **options)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_below_the_limit_evicts_other_pages(open_tier, tmp_path, monkeypatch, error):
    tier, old, new = open_tier(), keys(6), keys(3, first_token=9)
    put(tier, old)
    FullDisk(monkeypatch, tmp_path, 6, error)
    assert put(tier, new) == 3
    assert got(tier, new) == contents(new)
    assert tier.load().state == "up"
    assert tier.load().num_evicted == 4


def test_disk_that_stays_full_pauses_writes_but_not_reads(open_tier, tmp_path, monkeypatch):
    # Later than the files' mtimes, but by less than TOUCH_S, so that no mtime is refreshed.
    clock = Clock(time.time() + 50, per_read_s=0.001)
    tier, of, new = open_tier(clock=clock), keys(6), keys(2, first_token=9)
    put(tier, of)
    full = FullDisk(monkeypatch, tmp_path, -1)
    assert put(tier, new) == 0
    assert tier.load().state == "full"
    assert got(tier, of) == contents(of[:2])  # the pages that were not evicted in vain
    assert not [p for p in files(tmp_path) if p.name.startswith(".")]
    full.room = 100
    assert put(tier, new) == 0
    clock.now_s += disk.FULL_S
    assert put(tier, new) == 2
    assert tier.load().state == "up"


def test_path_that_is_not_a_directory_is_rejected_with_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigInvalid, match="use a directory that the node's user may"):
            DiskTier(path, FILE_BYTES, FakePool(), SPACE)


def test_world_writable_directory_is_rejected(open_tier, tmp_path):
    open_tier()
    (tmp_path / "kv" / "tandem-kv-1").chmod(0o777)
    with pytest.raises(ConfigInvalid, match="chmod 700"):
        open_tier()


def test_damaged_id_of_a_directory_is_rejected_by_its_name(open_tier, tmp_path):
    open_tier()
    (tmp_path / "kv" / "tandem-kv-1" / "store-id").write_text("x")
    with pytest.raises(ConfigInvalid, match="kv: store-id is damaged; remove that file"):
        open_tier()


def test_limit_below_one_page_is_rejected(tmp_path):
    with pytest.raises(ConfigInvalid, match=f"a KV page takes {FILE_BYTES} bytes"):
        DiskTier(tmp_path, FILE_BYTES - 1, FakePool(), SPACE)


def test_mount_that_hangs_at_start_is_rejected(tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(disk, "START_S", 0.01)
    monkeypatch.setattr(disk.PageDirectory, "__init__", lambda *_: go.wait(PATIENCE_S) and None)
    with pytest.raises(ConfigInvalid, match="check the mount"):
        DiskTier(tmp_path, FILE_BYTES, FakePool(), SPACE)
    go.set()


def test_unmounted_directory_is_not_used_until_it_is_back(open_tier, tmp_path, monkeypatch):
    tier, of = open_tier(), keys(2)
    put(tier, of)
    # Like a mount point without its mount: another device, and empty.
    (tmp_path / "kv").rename(tmp_path / "away")
    (tmp_path / "kv").mkdir()
    monkeypatch.setattr(tier._directory, "_device", -1)
    for call in (lambda: tier.get(of), lambda: put(tier, of), tier.scan):
        with pytest.raises(TierFailed, match="no longer mounted"):
            call()
    assert not list((tmp_path / "kv").iterdir())
    (tmp_path / "kv").rmdir()
    (tmp_path / "away").rename(tmp_path / "kv")
    assert got(tier, of) == contents(of)


def test_manually_emptied_directory_is_used_again(open_tier, tmp_path):
    tier, of = open_tier(), keys(2)
    put(tier, of)
    store = tier.load().store
    for path in sorted((tmp_path / "kv").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert got(tier, of[1:]) == []
    assert put(tier, of) == 2
    tier.scan()
    assert tier.load().store != store
    assert tier.load().num_pages == 2
    assert got(tier, of) == contents(of)


def test_page_removed_by_another_node_during_read_is_a_miss(open_tier, monkeypatch):
    tier, of = open_tier(), keys(2)
    put(tier, of)

    def removed(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(disk_files, "_read_page", removed)
    assert got(tier, of) == []
    assert tier.load().num_corrupted == 0


@pytest.mark.parametrize("error", [errno.ESTALE, errno.ENOTCONN, errno.EMFILE])
def test_file_system_error_loses_no_buffers(open_tier, tmp_path, monkeypatch, error):
    tier, of = open_tier(), keys(2)
    put(tier, of)
    real = os.open

    def fail(path, *args, **options):
        if str(path).endswith(of[1].digest.hex()):
            raise OSError(error, os.strerror(error), path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(TierFailed):
        tier.get(of)
    assert len(files(tmp_path)) == 2
    assert tier.load().num_corrupted == 0


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from tandem.kvtier.disk import DiskTier
    from tests.kvtier.fakes import FakePool, SPACE, content, keys, views
    path, limit = Path(sys.argv[1]), int(sys.argv[2])
    tier = DiskTier(path, limit, FakePool(), SPACE)
    print(tier.load().store, file=sys.stderr, flush=True)  # the log has the other
    sys.stdin.readline()
    for number in range(40):
        of = keys(4, first_token=number % 8)
        tier.put(of, views(of))
        loan = tier.get(of)
        assert all(bytes(p) == content(k) for p, k in zip(loan.pages, of))
        loan.release()
    assert tier.load().num_corrupted == 0
    tier.close()
    """
)


def test_processes_share_a_directory_a_limit_and_a_store_id(tmp_path, open_tier):
    path, limit = tmp_path / "kv", 12 * FILE_BYTES
    command = [sys.executable, "-c", WRITER, str(path), str(limit)]
    writers = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    stores = {writer.stderr.readline() for writer in writers}
    for writer in writers:
        writer.communicate("go\n")
    assert len(stores) == 1
    assert {writer.returncode for writer in writers} == {0}
    tier = open_tier(num_pages=12)
    tier.scan()
    assert tier.load().num_bytes <= limit
    assert not [p for p in files(tmp_path) if p.name.startswith(".")]
