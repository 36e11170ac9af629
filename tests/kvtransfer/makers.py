"""Factories of every transport that works on this machine: built-in ones, and those of `contrib/`."""

import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, Transport, TransportConfig
from tandem.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tandem.kvtransfer.transports.registry import BUILT_IN, GROUP, transports
from tandem.wire.errors import ConfigInvalid
from tests.kvtransfer.host_device import HostDevice
from tests.loopback import LoopbackTransport


@cache
def contributed() -> tuple[EntryPoint, ...]:
    """Return the entry points of the packages in `contrib/`, which need not be installed."""
    found = []
    for project in sorted(Path(__file__).parents[2].glob("contrib/*/pyproject.toml")):
        sys.path.append(str(project.parent))
        named = tomllib.loads(project.read_text())["project"]["entry-points"][GROUP]
        found += [EntryPoint(name, place, GROUP) for name, place in named.items()]
    return tuple(found)


def all_transports(name: str, config: TransportConfig) -> list[Transport]:
    """Return what the registry makes of a name where the packages of `contrib/` are installed."""
    return transports(name, config, installed=contributed())


@cache
def cross_process() -> tuple[str, ...]:
    """Return the names of those that can write a pool of CPU memory here."""
    names = (*BUILT_IN, *(entry.name for entry in contributed()))
    return tuple(name for name in names if _can_listen(name))


def _can_listen(name: str) -> bool:
    with MemoryRegion.shared(4096, "probe") as region:
        try:
            all_transports(name, TransportConfig())[0].listen(Pool.packed(region, 4096, 1)).close()
        except ConfigInvalid:
            return False
    return True


# UCX would otherwise use interfaces that other tests make and remove.
ON_LOOPBACK = TransportConfig(devices=("lo",))
# Of those for GPUs the transport itself runs, over memory of the host.
OTHER_PROCESS = tuple(dict.fromkeys((*cross_process(), "cuda_ipc")))
NAMES = ("loopback", *OTHER_PROCESS)


def make(name: str) -> Transport:
    """Return a new transport of this name."""
    if name == "loopback":
        return LoopbackTransport()
    if name == "cuda_ipc":
        return CudaIpcTransport(memory=HostDevice())
    return all_transports(name, ON_LOOPBACK)[0]
