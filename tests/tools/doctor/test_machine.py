"""Findings on fake machines."""

import resource
import shutil
from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.tools.doctor import machine
from tandem.tools.doctor.machine import GIB
from tandem.tools.doctor.report import Finding


@pytest.fixture
def root(tmp_path):
    """Return a function that writes files of a fake machine and returns its root."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def named(findings, name: str) -> Finding:
    [finding] = [each for each in findings if each.name == name]
    return finding


@given(free=st.integers(0, 64 * GIB), pool=st.integers(1, 64 * GIB))
def test_dev_shm_fails_exactly_if_the_pool_does_not_fit(free, pool):
    with pytest.MonkeyPatch.context() as patch:
        usage = namedtuple("usage", "free")(free)
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        shm = machine.check_shm(pool)
    assert shm.status == ("ok" if pool <= free else "failed")
    assert bool(shm.advice) == (pool > free)


@pytest.mark.parametrize(
    ("files", "locked", "has_rdma", "names"),
    [
        (1 << 20, resource.RLIM_INFINITY, True, []),
        (1024, 8 << 20, False, ["open files"]),
        (resource.RLIM_INFINITY, 8 << 20, True, ["locked memory"]),
    ],
)
def test_limits_that_are_too_low_are_warnings(monkeypatch, files, locked, has_rdma, names):
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: locked}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], 0))
    findings = list(machine.check_limits(GIB, has_rdma=has_rdma))
    assert [each.name for each in findings if each.status == "warning"] == names
    assert all("ulimit" in each.advice for each in findings if each.status == "warning")


def test_rdma_ports_are_reported_with_rate_and_permissions(root):
    assert [each.status for each in machine.check_rdma(root({}))] == ["missing"]
    port = "sys/class/infiniband/mlx5_0/ports/1"
    files = {f"{port}/rate": "400 Gb/sec (4X NDR)\n", f"{port}/link_layer": "InfiniBand\n"}
    active = root(files | {f"{port}/state": "4: ACTIVE\n"})
    findings = list(machine.check_rdma(active))
    assert findings[0].found == "ACTIVE, InfiniBand, 400 Gb/sec (4X NDR)"
    assert "ib_uverbs" in named(findings, "permissions").advice
    down = root({f"{port}/state": "1: DOWN\n", "dev/infiniband/uverbs0": ""})
    assert [each.status for each in machine.check_rdma(down)] == ["warning"]


def test_unusable_gpus_are_reported_without_importing_torch(root):
    assert named(machine.check_gpus(root({})), "devices").status == "missing"
    driver = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  570.1  x\n"}
    devices = named(machine.check_gpus(root(driver)), "devices")
    assert (devices.status, devices.found) == ("warning", "a driver, but no /dev/nvidia*")
    assert "--gpus all" in devices.advice
