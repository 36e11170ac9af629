import os
import signal
import subprocess
import sys

import pytest

from tandem.kvtransfer.region import DeviceRegion, MemoryRegion, sweep_stale
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.wire.errors import ConfigInvalid, TransferRefused


@pytest.fixture
def own_directory(tmp_path, monkeypatch):
    """A directory for shared memory that nobody else makes files in, nor sweeps."""
    monkeypatch.setattr("tandem.kvtransfer.region.SHM_DIR", tmp_path)
    return tmp_path


@pytest.mark.parametrize("make", [MemoryRegion.shared, MemoryRegion.private])
def test_region_is_zeroed_and_writable_at_its_address(make):
    with make(10_000) as region:
        assert bytes(region.buffer) == bytes(10_000)
        region.array()[7] = 42
        assert region.buffer[7] == 42
        assert region.address % 4096 == 0


def test_a_closed_shared_region_leaves_no_file():
    region = MemoryRegion.shared(4096)
    path = region.path
    assert path.exists()
    region.close()
    region.close()
    assert not path.exists()


def test_closing_under_a_tensor_keeps_the_tensors_memory():
    region = MemoryRegion.shared(4096)
    array = region.array()
    region.close()
    array[0] = 1  # would crash if the memory were unmapped


def test_control_files_of_a_removed_pool_are_swept(own_directory):
    with MemoryRegion.shared(4096) as ours:
        kept, orphan = ours.path.with_suffix(".abc.ctl"), own_directory / "tandem-kv-gone.abc.ctl"
        kept.touch()
        orphan.touch()
        sweep_stale()
        assert kept.exists()
        assert not orphan.exists()
        kept.unlink()


def test_a_dead_owners_files_are_swept_and_a_living_owners_are_not(own_directory):
    code = (
        "import sys; from pathlib import Path; from tandem.kvtransfer import region; "
        "region.SHM_DIR = Path(sys.argv[1]); "
        "r = region.MemoryRegion.shared(4096, 'doomed'); print(r.path, flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, str(own_directory)]
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    with child, MemoryRegion.shared(4096) as ours:
        path = own_directory / os.path.basename(child.stdout.readline().strip())
        belonging = path.with_suffix(".abc.ctl")
        belonging.touch()
        assert path not in sweep_stale()
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert path in sweep_stale()
        assert not path.exists()
        assert not belonging.exists()
        assert ours.path.exists()


def test_pool_that_does_not_fit_is_refused_with_a_remedy(own_directory):
    with pytest.raises(ConfigInvalid, match="--shm-size"):
        MemoryRegion.shared(1 << 60, "toolarge")
    assert not list(own_directory.iterdir())


class FakeTensor:
    device, nbytes = "cuda:1", 4096
    has_gaps = False

    def data_ptr(self):
        return 0x7000

    def is_contiguous(self):
        return not self.has_gaps


def test_a_devices_memory_has_an_address_and_a_size_and_no_bytes_for_the_cpu():
    region = DeviceRegion(FakeTensor())
    assert (region.device, region.address, region.size_bytes) == ("cuda:1", 0x7000, 4096)
    assert region.path is None
    for look in (lambda: region.buffer, region.array):
        with pytest.raises(TransferRefused, match="cuda:1"):
            look()
    region.close()
    region.close()


def test_device_memory_is_read_through_the_owners_function():
    content = bytes(range(256))
    region = DeviceRegion(FakeTensor(), lambda extents: [content[extent] for extent in extents])
    assert list(region.read([slice(3, 6), slice(0, 1)])) == [content[3:6], content[:1]]
    with pytest.raises(TransferRefused, match="cuda:1"):
        DeviceRegion(FakeTensor()).read([slice(3, 6)])


def test_tensor_with_gaps_is_refused():
    tensor = FakeTensor()
    tensor.has_gaps = True
    with pytest.raises(ValueError, match="contiguous"):
        DeviceRegion(tensor)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_transports_of_the_cpu_refuse_a_devices_memory(name):
    [transport] = transports(name, TransportConfig())
    with pytest.raises(ConfigInvalid, match="memory"):
        transport.listen(Pool.packed(DeviceRegion(FakeTensor()), 4096, 1))
