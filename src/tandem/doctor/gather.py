"""Reads the facts of this machine. Opens files and sockets, judges nothing, and changes nothing.

What is not there is not a failure: a fact keeps its default. `root` is where a test puts a made-up /proc,
/sys and /dev.
"""

import os
import re
import resource
import shutil
import socket
import sys
import threading
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import tandem
from tandem.doctor.facts import (
    Cpu,
    Gpus,
    Limits,
    Memory,
    Network,
    Package,
    Port,
    Rdma,
    RdmaPort,
)
from tandem.kvtransfer.region import SHM_DIR
from tandem.wire.hosts import reason_of

ROOT = Path("/")
DISTRIBUTION = "tandem-serve"
RESOLVE_TIMEOUT_S = 2.0
# "no limit" of version 1 of control groups is the largest number of pages.
NO_LIMIT = 1 << 60


def packages() -> tuple[str, tuple[Package, ...]]:
    """Return which Python is wanted, and every package of a plain install."""
    try:
        facts = metadata.metadata(DISTRIBUTION)
        wanted_python = str(facts["Requires-Python"])
        wanted = facts.get_all("Requires-Dist") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        text = (Path(tandem.__file__).parents[1] / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        wanted_python, wanted = project["requires-python"], project["dependencies"]
    needs = [Requirement(line) for line in wanted]
    is_plain = [need.marker is None or need.marker.evaluate({"extra": ""}) for need in needs]
    return wanted_python, tuple(
        Package(need.name, str(need.specifier), _installed(need.name))
        for need, is_needed in zip(needs, is_plain, strict=True)
        if is_needed
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cpu(root: Path = ROOT) -> Cpu:
    """Return what computes."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return Cpu(
        num_cores=os.cpu_count() or 1,
        num_usable=len(os.sched_getaffinity(0)),
        quota_cores=_quota_cores(root),
        flags=frozenset(found.group(1).split()) if found else frozenset(),
        num_numa_nodes=max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*")))),
    )


def memory(root: Path = ROOT) -> Memory:
    """Return what can be used."""
    kib = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE))
    shm = root / SHM_DIR.relative_to("/")
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    return Memory(
        total=int(kib.get("MemTotal", 0)) << 10,
        available=int(kib.get("MemAvailable", 0)) << 10,
        limit=_memory_limit(root),
        shm_total=usage and usage.total,
        shm_free=usage and usage.free,
    )


def limits() -> Limits:
    """Return the soft limits of this process."""

    def soft(kind: int) -> int | None:
        value = resource.getrlimit(kind)[0]
        return None if value == resource.RLIM_INFINITY else value

    return Limits(
        locked_bytes=soft(resource.RLIMIT_MEMLOCK), open_files=soft(resource.RLIMIT_NOFILE)
    )


def _groups(root: Path) -> Iterator[Path]:
    """Yield this process's control group and those around it (version 2)."""
    top = root / "sys/fs/cgroup"
    found = re.search(r"^0::/(.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    # A path that climbs out of what is mounted is a container's view of its host: only the top is ours.
    inner = top / (found.group(1) if found and ".." not in found.group(1) else "")
    while inner != top:
        yield inner
        inner = inner.parent
    yield top


def _quota_cores(root: Path) -> float | None:
    quotas = []
    for group in _groups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            quotas.append(int(quota) / int(period))
    quota = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    period = _read(root / "sys/fs/cgroup/cpu/cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():
        quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _memory_limit(root: Path) -> int | None:
    texts = [_read(group / "memory.max") for group in _groups(root)]
    texts.append(_read(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    found = [int(text) for text in texts if text.isdigit()]
    return min((each for each in found if each < NO_LIMIT), default=None)


def rdma(root: Path = ROOT) -> Rdma:
    """Return the ports of RDMA devices, and who may use them."""
    ports = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
        ports.append(
            RdmaPort(
                device=port.parent.parent.name,
                number=int(port.name),
                state=_read(port / "state").rpartition(": ")[2],
                link=_read(port / "link_layer"),
                bytes_per_s=float(rate.group(1)) * 1e9 / 8 if rate else 0.0,
            )
        )
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    return Rdma(
        ports=tuple(ports),
        verbs={file.name: os.access(file, os.R_OK | os.W_OK) for file in files},
    )


def gpus(root: Path = ROOT) -> Gpus:
    """Return the GPUs. torch, which takes seconds to import, is asked only where there are any."""
    found = re.search(r"Module\s+([\d.]+)", _read(root / "proc/driver/nvidia/version"))
    device_files = len(list((root / "dev").glob("nvidia[0-9]*")))
    if not device_files:
        return Gpus(driver=found.group(1) if found else "")
    names, torch_cuda, apart, error = _ask_torch()
    return Gpus(
        driver=found.group(1) if found else "",
        device_files=device_files,
        names=names,
        torch_cuda=torch_cuda,
        without_peer_access=apart,
        has_peermem=bool(
            re.search(r"^nvidia_peermem ", _read(root / "proc/modules"), re.MULTILINE)
        ),
        error=error,
    )


def _ask_torch() -> tuple[tuple[str, ...], str, tuple[tuple[int, int], ...], str]:
    import torch

    torch_cuda = str(torch.version.cuda or "")
    try:
        count = torch.cuda.device_count()
        names = tuple(torch.cuda.get_device_name(i) for i in range(count))
        apart = tuple(
            (i, j)
            for i in range(count)
            for j in range(i + 1, count)
            if not torch.cuda.can_device_access_peer(i, j)
        )
    except RuntimeError as error:
        return (), torch_cuda, (), str(error).splitlines()[0]
    return names, torch_cuda, apart, ""


def network() -> Network:
    """Return how this host is called and reached."""
    hostname = socket.gethostname()
    return Network(hostname, _resolve(hostname), not _bind_problem("::1", 0))


def _resolve(hostname: str) -> tuple[str, ...]:
    """Return its addresses; none where the resolver does not know, or does not answer."""
    found: list[str] = []

    def ask() -> None:
        try:
            answers = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        except OSError:
            return
        found.extend(dict.fromkeys(str(answer[4][0]) for answer in answers))

    # A thread, because a resolver that nobody answers keeps its caller for half a minute.
    asking = threading.Thread(target=ask, name="resolve", daemon=True)
    asking.start()
    asking.join(RESOLVE_TIMEOUT_S)
    return tuple(found)


def ports(host: str, wanted: Sequence[tuple[int, str, bool]]) -> tuple[Port, ...]:
    """Try each (number, purpose, is_asked) as a node would, and let go of it at once."""
    return tuple(
        Port(host, number, purpose, _bind_problem(host, number), is_asked)
        for number, purpose, is_asked in wanted
    )


def _bind_problem(host: str, number: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, number), family=family).close()
    except OSError as error:
        return reason_of(error)
    return ""


def python() -> str:
    """Return the version of the Python that runs."""
    return ".".join(str(part) for part in sys.version_info[:3])


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
