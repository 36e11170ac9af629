"""Facts read from trees of files that look like another machine's."""

import os
import socket

import pytest

from tandem.doctor import gather
from tandem.doctor.facts import RdmaPort
from tandem.up import free_ports


@pytest.fixture
def root(tmp_path):
    """Return a function that writes files of a made-up machine, and its root."""

    def write(files: dict[str, str]):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_a_machine_without_anything_has_the_defaults(tmp_path):
    assert gather.rdma(tmp_path).ports == ()
    assert gather.gpus(tmp_path).device_files == 0
    memory = gather.memory(tmp_path)
    assert (memory.total, memory.limit, memory.shm_free) == (0, None, None)
    assert gather.cpu(tmp_path).num_numa_nodes == 1


def test_instruction_sets_and_memories_are_read_on_x86_and_arm(root):
    nodes = {f"sys/devices/system/node/node{i}/cpulist": "0" for i in range(2)}
    x86 = root({"proc/cpuinfo": "processor\t: 0\nflags\t\t: sse avx512_bf16\n"} | nodes)
    assert gather.cpu(x86).flags == {"sse", "avx512_bf16"}
    assert gather.cpu(x86).num_numa_nodes == 2
    arm = root({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp bf16\n"})
    assert "bf16" in gather.cpu(arm).flags


def test_the_tightest_control_group_counts(root):
    machine = root(
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "4096\n",
            "sys/fs/cgroup/pod/memory.max": "max\n",
        }
    )
    assert gather.cpu(machine).quota_cores == 1.5
    assert gather.memory(machine).limit == 4096


def test_version_1_of_control_groups_is_read_too(root):
    machine = root(
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "8192",
        }
    )
    assert gather.cpu(machine).quota_cores == 2
    assert gather.memory(machine).limit == 8192


def test_no_limit_is_none(root):
    machine = root(
        {
            "proc/self/cgroup": "0::/../../host\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        }
    )
    assert gather.cpu(machine).quota_cores is None
    assert gather.memory(machine).limit is None


def test_memory_is_told_in_bytes(root):
    machine = root({"proc/meminfo": "MemTotal:  100 kB\nMemAvailable:  40 kB\n", "dev/shm/x": ""})
    memory = gather.memory(machine)
    assert (memory.total, memory.available) == (102400, 40960)
    assert memory.shm_free is not None


def test_rdma_ports_say_their_rate_and_who_may_use_them(root):
    port = "sys/class/infiniband/mlx5_0/ports/1"
    machine = root(
        {
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/link_layer": "InfiniBand\n",
            "dev/infiniband/uverbs0": "",
        }
    )
    rdma = gather.rdma(machine)
    assert rdma.ports == (RdmaPort("mlx5_0", 1, "ACTIVE", "InfiniBand", 50e9),)
    assert rdma.verbs == {"uverbs0": os.access(machine / "dev/infiniband/uverbs0", os.W_OK)}


def test_a_driver_without_devices_is_seen_without_asking_torch(root):
    machine = root(
        {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Kernel Module  570.1  x\n"}
    )
    assert (gather.gpus(machine).driver, gather.gpus(machine).device_files) == ("570.1", 0)


def test_ports_are_tried_and_let_go():
    (number,) = free_ports(1)  # which no connection of another process is given meanwhile
    with socket.create_server(("127.0.0.1", number)):
        [taken] = gather.ports("127.0.0.1", [(number, "prefill", True)])
        assert taken.problem == "Address already in use"
    for _ in range(2):
        [free] = gather.ports("127.0.0.1", [(number, "prefill", True)])
        assert free.problem == ""
    [foreign] = gather.ports("192.0.2.1", [(number, "prefill", True)])
    assert foreign.problem == "Cannot assign requested address"


def test_packages_are_those_of_a_plain_install_with_their_versions():
    wanted_python, packages = gather.packages()
    by_name = {package.name: package for package in packages}
    assert wanted_python.startswith(">=3.")
    assert by_name["pyzmq"].found is not None
    assert by_name["pyzmq"].wanted.startswith(">=")
    assert "pytest" not in by_name  # of an extra


def test_a_checkout_that_is_not_installed_reads_its_own_pyproject(monkeypatch):
    monkeypatch.setattr(gather, "DISTRIBUTION", "tandem-not-installed")
    _, packages = gather.packages()
    assert {"torch", "msgspec"} <= {package.name for package in packages}
