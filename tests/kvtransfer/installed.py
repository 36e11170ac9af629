"""Which transports tests run on: those of the registry that this machine can use between processes."""

import tempfile
from functools import cache

from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig
from tandem.kvtransfer.transports.registry import BUILT_IN, transports
from tandem.wire.errors import ConfigInvalid


@cache
def cross_process() -> tuple[str, ...]:
    """Return the names of those that are installed and can write a pool of CPU memory."""
    with tempfile.TemporaryDirectory() as directory:
        config = TransportConfig(directory=directory)
        return tuple(name for name in BUILT_IN if _can_listen(name, config))


def _can_listen(name: str, config: TransportConfig) -> bool:
    with MemoryRegion.shared(4096, "probe") as region:
        try:
            transports(name, config)[0].listen(Pool(region, 4096, 1)).close()
        except ConfigInvalid:
            return False
    return True
