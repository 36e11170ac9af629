"""What the edge workers of one router share: a directory, and in it a row of counters for each.

```
 pool/rows        one row a worker, written by its owner alone; the parent clears those of the dead
 pool/N.sock      where worker N answers its siblings
 pool/metrics/    prometheus_client's files: what a worker counted outlives it
```

Holds counters and paths. Who is given a connection is `doorman.py`'s to say.
"""

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

# Of each counter: eight bytes are written at once on every machine we run on, so none is read half.
CELL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Row:
    """One worker at one moment.

    Attributes:
        is_open: It takes connections.
        is_serving: It has met a prefill and a decode that can serve.
        num_received: Connections that it ever took.
        num_closed: How many of them are closed. With what the parent handed over, this one number
            says how many a worker has: whoever reads a row while it is written is not misled.
        num_streams: Generations running now.
        pid: Of its process; 0 while there is none.
    """

    is_open: bool = False
    is_serving: bool = False
    num_received: int = 0
    num_closed: int = 0
    num_streams: int = 0
    pid: int = 0

    @property
    def num_connections(self) -> int:
        """Connections open now, busy or idle."""
        return self.num_received - self.num_closed


NUM_CELLS = len(Row.__slots__)


class Pool:
    """The directory and the rows, as the parent and each worker open them.

    Args:
        directory: As `new_pool` yields it.
    """

    def __init__(self, directory: str, num_workers: int) -> None:
        self.directory, self.num_workers = Path(directory), num_workers
        with open(self.directory / "rows", "r+b") as file:
            # What is mapped stays when the file is gone.
            self._cells = memoryview(mmap.mmap(file.fileno(), _size_bytes(num_workers))).cast("q")

    def row(self, index: int) -> Row:
        """Return the row of one worker."""
        is_open, is_serving, *counters = self._cells[index * NUM_CELLS : (index + 1) * NUM_CELLS]
        return Row(bool(is_open), bool(is_serving), *counters)

    def rows(self) -> list[Row]:
        """Return the rows of all workers."""
        return [self.row(index) for index in range(self.num_workers)]

    def write(self, index: int, row: Row) -> None:
        """Write one's own row."""
        first = index * NUM_CELLS
        self._cells[first] = row.is_open
        self._cells[first + 1] = row.is_serving
        self._cells[first + 2] = row.num_received
        self._cells[first + 3] = row.num_closed
        self._cells[first + 4] = row.num_streams
        self._cells[first + 5] = row.pid

    def forget(self, index: int, pid: int) -> None:
        """Clear what a worker that is gone left behind; what it counted for /metrics stays."""
        self.write(index, Row())
        mark_process_dead(pid, self.metrics_path)  # type: ignore[no-untyped-call]

    def socket_path(self, index: int) -> str:
        """Return where a worker answers its siblings."""
        return str(self.directory / f"{index}.sock")

    @property
    def metrics_path(self) -> str:
        """Where prometheus_client keeps what all workers count."""
        return str(self.directory / "metrics")

    @property
    def environment(self) -> dict[str, str]:
        """What a worker's environment needs, since prometheus_client reads it when imported."""
        return {"PROMETHEUS_MULTIPROC_DIR": self.metrics_path}


@contextlib.contextmanager
def new_pool(num_workers: int) -> Iterator[Pool]:
    """Make the directory of a pool, readable by this user alone; remove it on leaving."""
    with tempfile.TemporaryDirectory(prefix="tandem-", ignore_cleanup_errors=True) as directory:
        os.mkdir(Path(directory, "metrics"))
        Path(directory, "rows").write_bytes(bytes(_size_bytes(num_workers)))
        yield Pool(directory, num_workers)


def _size_bytes(num_workers: int) -> int:
    return num_workers * NUM_CELLS * CELL_BYTES
