"""GPUs of one host: prefill maps decode's pool, and a push is a copy from device to device.

The pool is exported as a CUDA IPC handle, which the offer contains. Rooms, lock and fence are those of `shm`,
with a file that represents the pool. A writer holds the lock until its batch is complete, so whoever takes the lock
knows that no copy is in flight. If a writer died while it held the lock, the fence waits until its process is gone,
because the driver stops a process's copies when it cleans up. Both ends must therefore see each other's process
ids, that is share a pid namespace.

The writes of a prompt's forward must be complete before `write` is called: the copies run on a separate stream.

Memory is exported, mapped and copied through the driver's C API. Its library is present wherever a GPU works and
its ABI is stable, so neither torch's private storage functions nor a CUDA toolkit are needed. torch uses the same
primary context. The copies of a batch are one call; drivers before 12.8 need one call per copy. Tests run
everything except the driver's functions on a CPU.
"""

import ctypes
import os
import struct
from contextlib import ExitStack, suppress
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from typing_extensions import override

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig, read_offer
from tandem.kvtransfer.transports.shm import ControlConnection, ControlListener, ControlOffer
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the stream that torch calls default
BATCH = "cuMemcpyBatchAsync"  # in drivers from 12.8 on: one call for all copies of a batch
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_FORWARDS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
EXPORTED = struct.Struct(
    f"<{HANDLE_BYTES}sQ"
)  # handle of the allocation, and the pool's offset in it


class _CudaIpcOffer(ControlOffer, frozen=True, kw_only=True):
    """The descriptor.

    Attributes:
        handle: The exported handle, in hexadecimal.
        pid_namespace: Inode of the owner's pid namespace.
    """

    handle: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2}){1,256}$")]
    pid_namespace: int


class CudaIpcTransport:
    """Device memory of one host and user."""

    name = "cuda_ipc"

    def __init__(
        self, config: TransportConfig | None = None, memory: "CudaMemory | None" = None
    ) -> None:
        del config
        self._memory = memory or CudaMemory()

    def listen(self, pool: Pool) -> ControlListener:
        """Start receiving."""
        handle = self._memory.export(pool.region)
        lock_file = MemoryRegion.shared(1, "device")
        assert lock_file.path is not None
        facts: dict[str, str | int] = {"handle": handle.hex(), "pid_namespace": _pid_namespace()}
        return ControlListener(pool, lock_file.path, self.name, facts, closing=lock_file.close)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "CudaIpcConnection":
        """Map the pool that `offer` names."""
        return CudaIpcConnection(read_offer(offer, _CudaIpcOffer), region, self._memory)


class CudaIpcConnection(ControlConnection):
    """Copies into the mapped memory of a device."""

    def __init__(self, facts: _CudaIpcOffer, region: MemoryRegion, memory: "CudaMemory") -> None:
        if facts.pid_namespace != _pid_namespace():
            raise TransferRefused("the pool's owner is in a different pid namespace")
        self._memory, self._has_failed = memory, False
        super().__init__(facts, region)

    @override
    def _open_pool(self, facts: Any, region: MemoryRegion, opened: ExitStack) -> None:
        self._pool = self._memory.open(bytes.fromhex(facts.handle), self._pool_bytes, region)
        opened.callback(self._pool.close)

    @override
    def _copy(self, batch: CopyPlan) -> None:
        if self._has_failed:
            raise PeerLost("the device failed in an earlier write")
        # Stays set if the copy raises, like the mark of `device_busy`: the device may still copy.
        self._has_failed = True
        with self._control.device_busy():
            self._pool.copy(batch)
        self._has_failed = False


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


# ── the driver ───────────────────────────────────────────────────────────────────────────────────


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]  # type: ignore[mutable-override]


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]  # type: ignore[mutable-override]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of CUDA 12.8. The locations are optional hints, and left empty."""

    _fields_ = [  # type: ignore[mutable-override]
        ("access_order", ctypes.c_uint),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    ]


class CudaMemory:
    """Pools in the memory of NVIDIA GPUs."""

    def export(self, region: MemoryRegion) -> bytes:
        """Return the handle of the allocation that holds `region`, and the region's offset in it."""
        if not region.device.startswith("cuda"):
            raise ConfigInvalid("transport cuda_ipc needs a pool in GPU memory")
        device = _device(region.device)
        try:
            base, _ = device.allocation(region.address)
            handle = _IpcHandle()
            device.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        except _CudaError as error:
            # CUDA IPC does not support torch's expandable segments, for example.
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
            device = _device(source.device)
            return CudaPool(device, source, reserved, offset, size_bytes)
        except (struct.error, ConfigInvalid, _CudaError) as error:
            raise TransferRefused(f"cannot map the peer's GPU memory: {error}") from error


class CudaPool:
    """A peer's pool, mapped, and a stream to copy into it."""

    def __init__(
        self,
        device: "CudaDevice",
        source: MemoryRegion,
        handle: bytes,
        offset: int,
        size_bytes: int,
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
            raise TransferRefused("the peer's GPU memory is smaller than in its offer")

    def copy(self, plan: CopyPlan) -> None:
        """Start all copies, then wait for them."""
        plan = plan.shifted(self._source.address, self._begin)  # addresses instead of offsets
        try:
            if len(plan) > 1 and self._device.has(BATCH):
                self._start_together(plan)
            else:
                self._start_each(plan)
            self._device.call("cuStreamSynchronize", self._stream)
        except _CudaError as error:
            raise PeerLost(f"a copy between GPUs failed: {error}") from error

    def _start_together(self, plan: CopyPlan) -> None:
        columns = plan.destination_offset, plan.source_offset, plan.size_bytes
        attributes, first = _CopyAttributes(IN_STREAM_ORDER), ctypes.c_size_t(0)
        attributes.flags = BESIDE_FORWARDS
        self._device.call(
            BATCH,
            *(np.ascontiguousarray(each).ctypes.data_as(ctypes.c_void_p) for each in columns),
            ctypes.c_size_t(len(plan)),
            ctypes.byref(attributes),
            ctypes.byref(
                first
            ),  # the first copy with these attributes; they apply to all after it too
            ctypes.c_size_t(1),
            ctypes.byref(ctypes.c_size_t()),  # receives the index of a copy that failed
            self._stream,
        )

    def _start_each(self, plan: CopyPlan) -> None:
        for begin, to, size in plan.copies():
            self._device.call(
                "cuMemcpyAsync",
                ctypes.c_uint64(to),
                ctypes.c_uint64(begin),
                ctypes.c_size_t(size),
                self._stream,
            )

    def close(self) -> None:
        """Destroy the stream and unmap the pool."""
        with suppress(_CudaError):  # a device that failed has released both
            if self._stream.value:
                self._device.call("cuStreamDestroy_v2", self._stream)
            self._device.call("cuIpcCloseMemHandle", ctypes.c_uint64(self._mapped))


class _CudaError(Exception):
    """The driver refused a call."""


class CudaDevice:
    """The driver, with the primary context of one GPU."""

    def __init__(self, ordinal: int, driver: Any) -> None:
        self._driver = driver
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
        if self._context is not None:  # the current context is per thread
            self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))
        self._check(name, getattr(self._driver, name)(*arguments))

    def has(self, name: str) -> bool:
        """Return whether the driver has a function."""
        return hasattr(self._driver, name)

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the start address and size in bytes of the allocation around an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(address),
        )
        return base.value, size.value

    def open_handle(self, handle: bytes) -> int:
        """Map memory that a different process exported, and return its address here."""
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
def _device(name: str) -> CudaDevice:
    """Return the device with torch's name `cuda:N`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigInvalid(f"the NVIDIA driver cannot be loaded: {error}") from error
    return CudaDevice(int(name.partition(":")[2] or 0), driver)
