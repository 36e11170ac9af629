"""Every transport that can be tried here, made as tests need it."""

import os

from tandem.kvtransfer.transports.base import Transport, TransportConfig
from tandem.kvtransfer.transports.cuda_ipc import CudaIpcTransport
from tandem.kvtransfer.transports.loopback import LoopbackTransport
from tandem.kvtransfer.transports.registry import transports
from tests.kvtransfer.host_device import HostDevice
from tests.kvtransfer.installed import cross_process

DIRECTORY = "TANDEM_TEST_DIRECTORY"
"""Names the environment variable that tells transport `file` where to work."""

# Of those for GPUs the transport itself runs, over memory of the host.
OTHER_PROCESS = tuple(dict.fromkeys((*cross_process(), "cuda_ipc")))
NAMES = ("loopback", *OTHER_PROCESS)


def make(name: str) -> Transport:
    """Return a new transport of this name."""
    if name == "loopback":
        return LoopbackTransport()
    if name == "cuda_ipc":
        return CudaIpcTransport(memory=HostDevice())
    [made] = transports(name, TransportConfig(directory=os.environ.get(DIRECTORY, "")))
    return made
