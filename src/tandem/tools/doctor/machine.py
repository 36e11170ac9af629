"""Reports this machine's resources and limits, with advice for running a node.

The checks read files and limits and change nothing. `root` lets a test supply a fake /proc, /sys and /dev.
"""

import importlib.metadata
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from tandem.kvtransfer.region import SHM_DIR
from tandem.node.machine import GPU_FILES, cpu_flags, dtype_from_flags
from tandem.tools.doctor.report import Finding, Status

ROOT = Path("/")
GIB = 1 << 30
# A node has a socket for each client, edge worker and stream; many systems' default limit is 1,024.
ENOUGH_OPEN_FILES = 4096


def _judged(
    area: str, name: str, found: str, advice: str = "", *, bad: Status = "warning"
) -> Finding:
    """Return a finding with the status `ok` without advice, or `bad` with advice."""
    status = bad if advice else "ok"
    return Finding(area=area, name=name, status=status, found=found, advice=advice)


def check_cpu(root: Path = ROOT) -> Iterator[Finding]:
    """Report the usable cores, the memory, and the type of weights that suits the CPU."""
    choice = dtype_from_flags(cpu_flags(root))
    yield _judged("cpu", "--dtype auto", f"{choice.dtype}: {choice.reason}")
    usable = len(os.sched_getaffinity(0))
    yield _judged("cpu", "cores", f"{usable} of {psutil.cpu_count()} usable")
    memory = psutil.virtual_memory()
    yield _judged("memory", "ram", f"{_size(memory.available)} available of {_size(memory.total)}")


def check_shm(pool_bytes: int, shm: Path = SHM_DIR) -> Finding:
    """Report whether a decode node's pool fits into /dev/shm."""
    if not shm.is_dir():
        advice = "mount a tmpfs on /dev/shm, or start nodes with --transfer-backend tcp"
        return _judged("memory", str(shm), "does not exist", advice, bad="missing")
    free, advice = shutil.disk_usage(shm).free, ""
    if free < pool_bytes:
        advice = (
            "enlarge it (docker: --shm-size; else mount -o remount,size=… /dev/shm), lower "
            "--max-total-tokens, or start nodes with --transfer-backend tcp"
        )
    found = f"{_size(free)} free for a decode node's pool of {_size(pool_bytes)}"
    return _judged("memory", str(shm), found, advice, bad="failed")


def check_limits(pool_bytes: int, *, has_rdma: bool) -> Iterator[Finding]:
    """Report the limits of this process on open files and, for RDMA, on locked memory."""
    files, locked = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    )
    is_few = files != resource.RLIM_INFINITY and files < ENOUGH_OPEN_FILES
    found = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,} (ulimit -n)"
    advice = f"each client and stream takes one: ulimit -n {ENOUGH_OPEN_FILES} or more"
    yield _judged("limits", "open files", found, advice if is_few else "")
    if has_rdma and locked != resource.RLIM_INFINITY and locked < pool_bytes:
        advice = (
            f"RDMA locks the whole pool, {_size(pool_bytes)}: ulimit -l unlimited (docker: --ulimit "
            "memlock=-1; systemd: LimitMEMLOCK=infinity)"
        )
        yield _judged("limits", "locked memory", f"{locked >> 10:,} KiB (ulimit -l)", advice)


def check_rdma(root: Path = ROOT) -> Iterator[Finding]:
    """Report the ports of RDMA devices, and whether this user may open them."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        advice = (
            "KV moves over TCP between hosts; in a container, pass the devices in "
            "(--device /dev/infiniband, or the cluster's RDMA device plugin)"
        )
        yield _judged("rdma", "devices", "none in /sys/class/infiniband", advice, bad="missing")
        return
    for port in ports:
        state = _read(port / "state").rpartition(": ")[2]
        advice = "" if state == "ACTIVE" else "check the cable, the switch and the subnet manager"
        found = f"{state}, {_read(port / 'link_layer')}, {_read(port / 'rate')}"
        yield _judged("rdma", f"{port.parent.parent.name} port {port.name}", found, advice)
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not files or not all(os.access(file, os.R_OK | os.W_OK) for file in files):
        advice = (
            "load ib_uverbs, pass the device into the container, or let this user read and write it"
        )
        yield _judged("rdma", "permissions", "/dev/infiniband/uverbs* cannot be opened", advice)


def check_gpus(root: Path = ROOT) -> Iterator[Finding]:
    """Report torch and NVIDIA GPUs. Imports torch, which takes seconds, only if there are GPU device files."""
    yield _judged("gpu", "torch", importlib.metadata.version("torch"))
    num_files = len(list((root / "dev").glob(GPU_FILES)))
    if not num_files and (root / "proc/driver/nvidia/version").exists():
        advice = "pass the GPUs into the container (docker: --gpus all)"
        yield _judged("gpu", "devices", "a driver, but no /dev/nvidia*", advice)
    elif not num_files:
        yield Finding(area="gpu", name="devices", status="missing", found="none")
    else:
        import torch

        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = f"{num_gpus} x {torch.cuda.get_device_name(0)}" if num_gpus else "torch sees none"
        advice = "check nvidia-smi, and that torch is a build for CUDA"
        found += f", CUDA {torch.version.cuda}"
        yield _judged("gpu", "devices", found, "" if num_gpus else advice)


def _size(size_bytes: int) -> str:
    is_large = size_bytes >= GIB
    return f"{size_bytes / GIB:.1f} GiB" if is_large else f"{size_bytes >> 20} MiB"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
