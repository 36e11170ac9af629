"""A fake of the CUDA driver functions that `CudaPool` uses, over host memory."""

import ctypes

import numpy as np

QUIET = {
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuStreamDestroy_v2",
    "cuIpcCloseMemHandle",
}


class OldDriver:
    """Functions of the driver before 12.8. Copies are done when the stream is waited for.

    Attributes:
        num_calls: By name.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory, self._started = memory, []
        self.num_calls: dict[str, int] = {}

    def __getattr__(self, name: str):
        if name not in QUIET:
            raise AttributeError(name)
        return lambda *_arguments: 0

    def _count(self, name: str) -> int:
        self.num_calls[name] = self.num_calls.get(name, 0) + 1
        return 0

    def cuIpcOpenMemHandle_v2(self, mapped, _handle, _flags):
        mapped._obj.value = self._memory.ctypes.data
        return 0

    def cuMemGetAddressRange_v2(self, base, size, _address):
        base._obj.value, size._obj.value = self._memory.ctypes.data, self._memory.nbytes
        return 0

    def cuStreamCreate(self, stream, _flags):
        stream._obj.value = 7
        return 0

    def cuMemcpyAsync(self, to, begin, size, stream):
        assert stream.value == 7
        self._started.append((to.value, begin.value, size.value))
        return self._count("cuMemcpyAsync")

    def cuStreamSynchronize(self, _stream):
        for to, begin, size in self._started:
            ctypes.memmove(to, begin, size)
        self._started.clear()
        return 0


class Driver(OldDriver):
    """One of 12.8 or later."""

    def cuMemcpyBatchAsync(self, to, begin, sizes, count, attributes, firsts, num, _failed, stream):
        assert (firsts._obj.value, num.value, stream.value) == (0, 1, 7)
        assert bytes(attributes._obj) == np.array([1, 0, 0, 0, 0, 1], np.uint32).tobytes()
        columns = (
            ctypes.cast(each, ctypes.POINTER(ctypes.c_uint64)) for each in (to, begin, sizes)
        )
        self._started += zip(*(each[: count.value] for each in columns), strict=True)
        return self._count("cuMemcpyBatchAsync")
