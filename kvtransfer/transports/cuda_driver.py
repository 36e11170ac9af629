"""Export, map and copy GPU memory through the driver's C interface.

The driver's library is wherever a GPU works and its interface does not change, so neither torch's
private storage calls nor a CUDA toolkit are needed. torch uses the same primary context, so that its
tensors can be exported from here. Nothing is loaded before it is needed. Has not run on a GPU.
"""

import ctypes
import struct
from contextlib import suppress
from functools import cache

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the stream that torch calls default
EXPORTED = struct.Struct(f"<{HANDLE_BYTES}sQ")  # of the allocation, and where in it the pool begins


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]  # type: ignore[mutable-override]


class CudaMemory:
    """Pools in the memory of NVIDIA GPUs."""

    def export(self, region: MemoryRegion) -> bytes:
        """Return the handle of the allocation that holds `region`, and the region's place in it."""
        if not region.device.startswith("cuda"):
            raise ConfigInvalid("transport cuda_ipc needs a pool in GPU memory")
        device = _device(region.device)
        try:
            base, _ = device.allocation(region.address)
            handle = _IpcHandle()
            device.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        except _CudaError as error:
            # torch's expandable segments, for one, are not memory that CUDA's IPC knows.
            raise ConfigInvalid(
                f"this GPU memory cannot be exported ({error}); run without "
                "expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
            ) from error
        return EXPORTED.pack(bytes(handle.reserved), region.address - base)

    def open(self, handle: bytes, size_bytes: int, source: MemoryRegion) -> "CudaPool":
        """Map a pool into the context of the device that holds `source`."""
        if not source.device.startswith("cuda"):
            raise TransferRefused("the own pool is not in GPU memory")
        try:
            reserved, offset = EXPORTED.unpack(handle)
            return CudaPool(_device(source.device), source, reserved, offset, size_bytes)
        except (struct.error, ConfigInvalid, _CudaError) as error:
            raise TransferRefused(f"cannot map the peer's GPU memory: {error}") from error


class CudaPool:
    """A peer's pool, mapped, and a stream to copy into it."""

    def __init__(
        self, device: "_Device", source: MemoryRegion, handle: bytes, offset: int, size_bytes: int
    ) -> None:
        self._device, self._source = device, source
        self._mapped = device.open_handle(handle)
        self._begin = self._mapped + offset
        self._stream = ctypes.c_void_p()
        try:
            _, mapped_bytes = device.allocation(self._mapped)
            device.call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)
        except _CudaError:
            self.close()
            raise
        if offset + size_bytes > mapped_bytes:
            self.close()
            raise TransferRefused("the peer's GPU memory is smaller than its offer says")

    def copy(self, plan: CopyPlan) -> None:
        """Start all copies, then wait for them."""
        try:
            for begin, to, size in plan.copies():
                self._device.call(
                    "cuMemcpyAsync",
                    ctypes.c_uint64(self._begin + to),
                    ctypes.c_uint64(self._source.address + begin),
                    ctypes.c_size_t(size),
                    self._stream,
                )
            self._device.call("cuStreamSynchronize", self._stream)
        except _CudaError as error:
            raise PeerLost(f"a copy between GPUs failed: {error}") from error

    def close(self) -> None:
        """Give up stream and mapping."""
        with suppress(_CudaError):  # a device that failed gives everything up by itself
            if self._stream.value:
                self._device.call("cuStreamDestroy_v2", self._stream)
            self._device.call("cuIpcCloseMemHandle", ctypes.c_uint64(self._mapped))


class _CudaError(Exception):
    """The driver refused a call."""


class _Device:
    """The driver, with the primary context of one GPU."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigInvalid(f"there is no NVIDIA driver here: {error}") from error
        self._context: ctypes.c_void_p | None = None
        device, context = ctypes.c_int(), ctypes.c_void_p()
        try:
            self.call("cuInit", 0)
            self.call("cuDeviceGet", ctypes.byref(device), ordinal)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        except _CudaError as error:
            raise ConfigInvalid(f"GPU {ordinal} cannot be used: {error}") from error
        self._context = context

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver in this device's context.

        Raises:
            _CudaError: It returned an error.
        """
        if self._context is not None:  # each thread has a current context of its own
            self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))
        self._check(name, getattr(self._driver, name)(*arguments))

    def allocation(self, address: int) -> tuple[int, int]:
        """Return where the allocation around an address begins, and its bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(address),
        )
        return base.value, size.value

    def open_handle(self, handle: bytes) -> int:
        """Map what another process exported, and return where it begins here."""
        mapped = ctypes.c_uint64()
        by_value = _IpcHandle.from_buffer_copy(handle)
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(mapped), by_value, LAZY_PEER_ACCESS)
        return mapped.value

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.byref(text))
            raise _CudaError(f"{name}: {(text.value or b'unknown error').decode()}")


@cache
def _device(name: str) -> _Device:
    """Return the device that torch calls `cuda:N`."""
    return _Device(int(name.partition(":")[2] or 0))
