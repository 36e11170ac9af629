"""Transfer libraries used directly, as their own examples do: what our transports on them are held against.

Each driver is one class. In the far process `receive` opens a region to be written and returns a line of
text; given that line, `connect` in the near process makes a driver ready for `write`. No permits, no
fences, no limits: that is what ours add. The links are the same as ours.
"""

import contextlib
import ctypes
import json
import logging
import threading
import time
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from tandem.kvtransfer.plan import CopyPlan, Int64s
from tandem.kvtransfer.region import MemoryRegion
from tandem.wire.generation import Room

POLL_S = 50e-6


class BareDriver(Protocol):
    """One library, at either end."""

    def receive(self, region: MemoryRegion) -> str:
        """Let others write into `region`; return where it is."""
        ...

    def connect(self, where: str, region: MemoryRegion) -> None:
        """Be ready to write from `region` to what `receive` returned."""
        ...

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Write; return when all of it is there."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class BareNixl:
    """NIXL without its progress thread: each end looks every 50 µs."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # before the wheel's own copy: else it crashes at exit
            ctypes.CDLL("libibverbs.so.1")
        import nixl_cu12._api as nixl

        logging.getLogger("nixl").setLevel(logging.WARNING)  # it would speak on standard output
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent: Any = nixl.nixl_agent(f"bare-{time.time_ns()}", config)
        self._agent.create_backend("UCX", {"engine_config": "TLS=^sm"})

    def receive(self, region: MemoryRegion) -> str:
        """Let others write into `region`."""
        self._register(region)
        threading.Thread(target=self._progress, daemon=True).start()
        metadata = self._agent.get_agent_metadata().hex()
        return json.dumps({"metadata": metadata, "address": region.address})

    def connect(self, where: str, region: MemoryRegion) -> None:
        """Be ready to write."""
        self._register(region)
        facts = json.loads(where)
        self._here, self._there = region.address, facts["address"]
        self._peer = self._agent.add_remote_agent(bytes.fromhex(facts["metadata"]))

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Write it all."""
        del room
        here = self._rows(plan.source_offset + self._here, plan.size_bytes)
        there = self._rows(plan.destination_offset + self._there, plan.size_bytes)
        handle = self._agent.initialize_xfer("WRITE", here, there, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state
        handle.release()

    def close(self) -> None:
        """Let go."""
        self._agent = None

    def _register(self, region: MemoryRegion) -> None:
        self._agent.register_memory([(region.address, region.size_bytes, 0, "")], "DRAM")

    def _progress(self) -> None:
        while agent := self._agent:
            agent.get_new_notifs()
            time.sleep(POLL_S)

    def _rows(self, address: Int64s, size_bytes: Int64s) -> object:
        rows = np.stack([address, size_bytes, np.zeros_like(address)], axis=1).astype(np.uint64)
        return self._agent.get_xfer_descs(rows, "DRAM")


class BareMooncake:
    """Mooncake's engine over TCP, in the batches that it takes."""

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0

    def receive(self, region: MemoryRegion) -> str:
        """Let others write into `region`."""
        self._engine.register_memory(region.address, region.size_bytes)
        target = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return json.dumps({"target": target, "address": region.address})

    def connect(self, where: str, region: MemoryRegion) -> None:
        """Be ready to write."""
        self._engine.register_memory(region.address, region.size_bytes)
        facts = json.loads(where)
        self._here, self._there, self._target = region.address, facts["address"], facts["target"]

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Write it all."""
        del room
        for batch in plan.batches(1 << 30, 1024):
            status = self._engine.batch_transfer_sync_write(
                self._target,
                (batch.source_offset + self._here).tolist(),
                (batch.destination_offset + self._there).tolist(),
                batch.size_bytes.tolist(),
            )
            assert status == 0, status

    def close(self) -> None:
        """Let go."""
        self._engine = None


# Library, and the driver of it, by the name of our transport on it.
DRIVERS: dict[str, tuple[str, type[BareDriver]]] = {
    "nixl": ("nixl_cu12", BareNixl),
    "mooncake": ("mooncake", BareMooncake),
}
INSTALLED = {name: driver for name, (library, driver) in DRIVERS.items() if find_spec(library)}
