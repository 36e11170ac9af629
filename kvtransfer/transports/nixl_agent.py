"""NIXL's library: how it is loaded, what it raises, and agents on links that can be fenced and survived."""

import contextlib
import ctypes
import logging
import os
import secrets

import numpy as np

from tandem.kvtransfer.plan import Int64s
from tandem.kvtransfer.transports.one_sided import Memory

# The host's own libibverbs, where there is one, has to come before the copy in the wheel: else both are
# entangled at load and the process crashes as it exits.
with contextlib.suppress(OSError):
    ctypes.CDLL("libibverbs.so.1")

# Read as UCX is loaded, which by itself speaks on standard output, where a rank answers rank 0.
os.environ.setdefault("UCX_LOG_FILE", "stderr")

import nixl_cu12._api as nixl
import nixl_cu12._bindings as bindings

# It announces every agent, and on standard output, too.
_chatter = logging.getLogger("nixl")
_chatter.setLevel(logging.WARNING)
_chatter.handlers.clear()
_chatter.propagate = True

Transfer = nixl.nixl_xfer_handle

NO_GPU = -1

# Which links UCX may take: all but those of one host. UCX calls those of CPU memory `sm` together.
LINKS = "^sm,cuda_ipc"

# All that the bindings raise; they have no class in common.
ERRORS: tuple[type[Exception], ...] = (
    *(
        each
        for each in vars(bindings).values()
        if isinstance(each, type) and issubclass(each, Exception)
    ),
    ValueError,  # of the wrapper
)


def make_agent(interface: str) -> nixl.nixl_agent:
    """Return a new agent; an empty interface leaves the choice to UCX."""
    # A name is never used twice: a peer that has known the first would take the second for it.
    config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
    agent = nixl.nixl_agent(f"tandem-{secrets.token_hex(8)}", config)
    devices = f",NET_DEVICES={interface}" if interface else ""
    agent.create_backend("UCX", {"engine_config": f"TLS={LINKS}{devices}"})
    return agent


def gpu_of(device: str) -> int:
    """Return the number of the GPU that torch calls by this name; `NO_GPU` for the CPU."""
    return NO_GPU if device == "cpu" else int(device.rpartition(":")[2])


def register(agent: nixl.nixl_agent, memory: Memory) -> object:
    """Let peers of the agent read and write a piece of memory; return what takes it back."""
    kind, number = _kind_and_number(gpu_of(memory.device))
    return agent.register_memory([(memory.address, memory.size_bytes, number, "")], kind)


def descriptors(
    agent: nixl.nixl_agent, address: Int64s, size_bytes: Int64s, gpu: int = NO_GPU
) -> object:
    """Return ranges of a GPU's or the CPU's memory as the agent takes them."""
    kind, number = _kind_and_number(gpu)
    rows = np.stack([address, size_bytes, np.full_like(address, number)], axis=1)
    return agent.get_xfer_descs(rows.astype(np.uint64), kind)


def _kind_and_number(gpu: int) -> tuple[str, int]:
    return ("DRAM", 0) if gpu == NO_GPU else ("VRAM", gpu)
