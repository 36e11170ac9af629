"""The engine of a node, in this process, and what its links carry. Imports torch."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.doctor.measuring import QUICK, ReceivingProbe, measure_transport
from tandem.doctor.probe import Where
from tandem.engine.core import Engine
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.model_engine import build_model
from tandem.node.pool import PoolPlan
from tandem.node.ranks import Ranks
from tandem.wire.channel import Waker
from tandem.wire.errors import TandemError

# Any byte that makes an ordinary number of every type: zeros would be one page of memory, read again
# and again out of the cache, and a denormal number takes longer than others.
_FILL = 0x3C


@contextmanager
def engine_of(config: NodeConfig) -> Iterator[Engine]:
    """Load a model and make its pool, as a node does; the other ranks end with the block.

    Raises:
        ConfigInvalid: The model cannot be loaded, or no page fits.
    """
    waker = Waker()
    ranks = Ranks(config, waker.wake, _rank_ended) if config.engine.tp_size > 1 else None
    try:
        yield build_model(config, lambda plan: _filled(config, plan), waker, ranks)
    finally:
        if ranks is not None:
            ranks.close()


def link_bytes_per_s() -> float:
    """Return what one node pushes to another of this host through shared memory; 0: it cannot."""
    where = Where(host="127.0.0.1")
    far = ReceivingProbe(QUICK.shape, where, "127.0.0.1")
    measured = measure_transport(far, "shm", QUICK, where).measured
    return 0.0 if measured is None else measured.bytes_per_s


def _filled(config: NodeConfig, plan: PoolPlan) -> MemoryRegion | None:
    if config.engine.device != "cpu":
        return None  # a device's memory is there once it is asked for
    region = MemoryRegion.private(plan.memory_bytes)
    region.array()[:] = _FILL
    return region


def _rank_ended(error: TandemError) -> None:
    # From a thread, while the main one waits for that rank and would for ever.
    sys.stderr.write(f"tandem profile: error: {error}\n")
    sys.stderr.flush()
    os._exit(1)
