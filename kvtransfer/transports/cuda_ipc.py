"""One host, GPUs: prefill maps decode's pool, and the push is a copy from device to device.

The pool is exported as a handle of CUDA's IPC, which travels in the offer. Rooms, lock and fence are
those of `shm`, beside a file that stands for the pool. A batch is copied and waited for inside a turn, so
the holder of the lock knows that no copy is under way. A fence of a writer that died in a turn waits until
its process is gone, since the driver stops the copies of a process when it clears up behind it. For
that both ends must see each other's process ids: one pid namespace.

What a prompt's forward wrote must be complete before `write` is called: the copies run on a stream of
their own.

Memory is exported, mapped and copied through the driver's C interface. Its library is wherever a GPU works
and its interface does not change, so neither torch's private storage calls nor a CUDA toolkit are needed.
torch uses the same primary context. Many short runs, as between ranks of unequal `--tp`, are copied by one kernel
where triton is installed (`cuda_runs.py`). Tests run all but the driver's calls on a CPU.
"""

import ctypes
import os
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig, read_offer
from tandem.kvtransfer.transports.shm import ControlConnection, ControlListener, ControlOffer
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.hand_off import TransportOffer

log = get_logger(__name__)

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the stream that torch calls default
BATCH = "cuMemcpyBatchAsync"  # of drivers from 12.8 on: one call for all copies of a write
IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
BESIDE_FORWARDS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
# Runs are for the kernel if there are this many, and shorter on average. Not measured: assume that a launch costs as
# much as 32 copies by the driver, and each of these as much as moving 64 KiB.
LEAST_RUNS = 32
SHORT_BYTES = 64 << 10
WORD_BYTES = 16  # what a thread of the kernel moves at a time
EXPORTED = struct.Struct(f"<{HANDLE_BYTES}sQ")  # of the allocation, and where in it the pool begins


Runs = NDArray[np.int64]
"""Addresses of sources, addresses of destinations, and sizes in bytes. Shape (3, num_runs)."""

StartRuns = Callable[[Runs, int, str], None]
"""Queues runs on a stream of a device; see `cuda_runs.start`."""


class _Offer(ControlOffer, frozen=True, kw_only=True):
    """The descriptor.

    Attributes:
        handle: What the device's owner exported, in hexadecimal.
        pid_namespace: Where the owner's process ids are counted.
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
        """Begin to receive."""
        handle = self._memory.export(pool.region)
        stands_for_pool = MemoryRegion.shared(1, "device")
        assert stands_for_pool.path is not None
        facts: dict[str, str | int] = {"handle": handle.hex(), "pid_namespace": _pid_namespace()}
        return ControlListener(
            pool, stands_for_pool.path, self.name, facts, closing=stands_for_pool.close
        )

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "CudaIpcConnection":
        """Map the pool that `offer` names."""
        return CudaIpcConnection(read_offer(offer, _Offer), region, self._memory)


class CudaIpcConnection(ControlConnection):
    """Copies into the mapped memory of a device."""

    def __init__(self, facts: _Offer, region: MemoryRegion, memory: "CudaMemory") -> None:
        if facts.pid_namespace != _pid_namespace():
            raise TransferRefused("the pool's owner is in another pid namespace")
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
        # Stays so if the copy raises, and with it the mark: the device may still be at it.
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
    """CUmemcpyAttributes of CUDA 12.8. The places are hints, and left out."""

    _fields_ = [  # type: ignore[mutable-override]
        ("access_order", ctypes.c_uint),
        ("source", _Location),
        ("destination", _Location),
        ("flags", ctypes.c_uint),
    ]


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
            device = _device(source.device)
            return CudaPool(device, source, reserved, offset, size_bytes, start_runs=_kernel())
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
        *,
        start_runs: StartRuns | None = None,
    ) -> None:
        self._device, self._source, self._start_runs = device, source, start_runs
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
        source, destination = self._source.address, self._begin
        runs = np.stack(plan.shifted(source, destination).columns())
        try:
            if not self._has_launched(runs):
                if len(plan) > 1 and self._device.has(BATCH):
                    self._start_together(runs)
                else:
                    self._start_each(runs)
            self._device.call("cuStreamSynchronize", self._stream)
        except _CudaError as error:
            raise PeerLost(f"a copy between GPUs failed: {error}") from error

    def _has_launched(self, runs: Runs) -> bool:
        """Start the kernel if the runs are for it; where it cannot be compiled or launched, do not try again."""
        if self._start_runs is None or not are_short(runs):
            return False
        try:
            self._start_runs(runs, self._stream.value or 0, self._source.device)
        except Exception as error:  # noqa: BLE001 - triton raises what its compiler and its driver do
            log.warning(
                "cuda_ipc.no_kernel", reason=str(error), effect="the driver copies each run"
            )
            self._start_runs = None
            return False
        return True

    def _start_together(self, runs: Runs) -> None:
        begin, to, sizes = runs
        attributes, first = _CopyAttributes(IN_STREAM_ORDER), ctypes.c_size_t(0)
        attributes.flags = BESIDE_FORWARDS
        self._device.call(
            BATCH,
            *(column.ctypes.data_as(ctypes.c_void_p) for column in (to, begin, sizes)),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),  # copy that has these attributes, as have all after it
            ctypes.c_size_t(1),
            ctypes.byref(ctypes.c_size_t()),  # which failed
            self._stream,
        )

    def _start_each(self, runs: Runs) -> None:
        for begin, to, size in runs.T.tolist():
            self._device.call(
                "cuMemcpyAsync",
                ctypes.c_uint64(to),
                ctypes.c_uint64(begin),
                ctypes.c_size_t(size),
                self._stream,
            )

    def close(self) -> None:
        """Give up stream and mapping."""
        with suppress(_CudaError):  # a device that failed gives everything up by itself
            if self._stream.value:
                self._device.call("cuStreamDestroy_v2", self._stream)
            self._device.call("cuIpcCloseMemHandle", ctypes.c_uint64(self._mapped))


def are_short(runs: Runs) -> bool:
    """Return whether one kernel is to copy the runs: they are many, short and aligned."""
    is_aligned = not (runs % WORD_BYTES).any()
    return runs.shape[1] >= LEAST_RUNS and runs[2].mean() < SHORT_BYTES and is_aligned


def _kernel() -> StartRuns | None:
    """Return what starts the kernel, or None without triton."""
    if find_spec("triton") is None:
        return None
    from tandem.kvtransfer.transports.cuda_runs import start

    return start


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
        if self._context is not None:  # each thread has a current context of its own
            self._check("cuCtxSetCurrent", self._driver.cuCtxSetCurrent(self._context))
        self._check(name, getattr(self._driver, name)(*arguments))

    def has(self, name: str) -> bool:
        """Tell whether the driver is new enough for a function."""
        return hasattr(self._driver, name)

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
def _device(name: str) -> CudaDevice:
    """Return the device that torch calls `cuda:N`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigInvalid(f"there is no NVIDIA driver here: {error}") from error
    return CudaDevice(int(name.partition(":")[2] or 0), driver)
