"""Memory files that simulate GPU memory: a different process opens them by a handle and maps them."""

import mmap
import os

import numpy as np

from tandem.kvtransfer.region import SHM_DIR
from tandem.wire.errors import ConfigInvalid, TransferRefused


class HostDevice:
    """`DeviceMemory` over shared regions."""

    def export(self, region):
        if region.path is None:
            raise ConfigInvalid("transport cuda_ipc needs a pool in GPU memory")
        return region.path.name.encode()

    def open(self, handle, size_bytes, source):
        try:
            fd = os.open(SHM_DIR / os.path.basename(handle.decode()), os.O_RDWR)
        except (OSError, ValueError) as error:
            raise TransferRefused(f"no such device memory: {error}") from error
        with open(fd, "r+b") as file:
            if os.fstat(fd).st_size < size_bytes:
                raise TransferRefused("the device memory is smaller than the offer says")
            return HostPool(mmap.mmap(file.fileno(), size_bytes), source)


class HostPool:
    """`RemoteMemory` over a mapped file."""

    def __init__(self, memory, source):
        self._pool, self._source = np.frombuffer(memory, np.uint8), source.array()
        self.is_closed = False

    def copy(self, plan):
        for begin, to, size in plan.copies():
            self._pool[to : to + size] = self._source[begin : begin + size]

    def close(self):
        self.is_closed = True
