"""The layout of the shared directory, and the file format of a batch.

```
 DIR/tandem-<owner>/               one listener process; mode 0700: both ends run as one user
     beat                          a counter, rewritten every `BEAT_S` while the listener is alive
     <peer>/nonce                  16 bytes: prove that both ends mounted the same directory
     <peer>/<number>.part          a batch being written
     <peer>/<number>.batch         complete; the listener renames it to
     <peer>/<number>.landed        or, if nothing was copied, to
     <peer>/<number>.refused       and the writer removes it

 a batch:  room int64, number of copies int64, then for each copy int64 offset and int64 size,
           then the bytes of each copy,
           then 16 bytes: xxh3-128 of the nonce, the number and all of the above
```

Owner and peer names are random. Clock skew between hosts does not matter: an owner is alive as long as
its beat changes. Both ends poll by listing directories and opening files, because NFS then queries the
server; a bare stat may be answered from a cache for seconds.
"""

import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.transports.tcp_stream import COPY_BYTES, HEADER, plan_of, table_of
from tandem.wire.errors import PeerLost, TransferRefused

# `.gone` is the suffix from `remove`, which may have been interrupted.
OWNER_NAME = re.compile(r"tandem-[0-9a-f]{16}(\.gone)*")
BATCH_NAME = re.compile(r"[0-9a-f]{16}\.batch")

# As in the tcp transport: large enough to hide the round trip; MAX_COPIES limits a hostile table.
BATCH_BYTES = 16 << 20
MAX_COPIES = 8192
DIGEST_BYTES = 16
# `CopyPlan.batches` may exceed the requested size, at most twofold.
MAX_FILE_BYTES = HEADER.size + MAX_COPIES * COPY_BYTES + 2 * BATCH_BYTES + DIGEST_BYTES

BEAT_S = 0.25
# Eight beats; the same timeout as a link's for a silent peer.
SILENT_AFTER_S = 2.0
# Limit of the silence counted per check: a late check may mean that this process was slow.
MOST_OF_A_LOOK_S = 2 * BEAT_S
# An idle link polls the file server 50 times a second; a busy link at most 2,000 times.
MIN_POLL_S, MAX_POLL_S = 0.0005, 0.02


class Pace:
    """The poll interval: it grows while nothing happens."""

    def __init__(self) -> None:
        self._wait_s = MIN_POLL_S

    def reset(self) -> None:
        """Return to the shortest interval after an event."""
        self._wait_s = MIN_POLL_S

    def next_s(self) -> float:
        """Return the next interval in seconds, and lengthen the one after it."""
        wait_s, self._wait_s = self._wait_s, min(MAX_POLL_S, self._wait_s * 1.5)
        return wait_s


class Pulse:
    """Detects a dead owner by a beat that stops changing."""

    def __init__(self, beat: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._beat, self._clock = beat, clock
        self._seen = b""
        self._silent_s, self._looked_s = 0.0, clock()

    def check(self) -> None:
        """Read the beat, at most once per `BEAT_S`.

        Raises:
            PeerLost: The beat has not changed for more than `SILENT_AFTER_S`.
        """
        now_s = self._clock()
        if now_s - self._looked_s < BEAT_S:
            return
        self._silent_s += min(MOST_OF_A_LOOK_S, now_s - self._looked_s)
        self._looked_s, seen = now_s, self._seen
        with suppress(OSError):
            seen = self._beat.read_bytes()
        if seen != self._seen:
            self._seen, self._silent_s = seen, 0.0
        elif self._silent_s > SILENT_AFTER_S:
            raise PeerLost(f"the pool's owner has not touched {self._beat} for {SILENT_AFTER_S} s")


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch whose checksum matches. Its room and plan are not yet validated.

    Attributes:
        plan: Destinations and sizes; the source offsets are unused.
    """

    room: int
    plan: CopyPlan
    data: NDArray[np.uint8]


def write_batch(
    path: Path, nonce: bytes, room: int, plan: CopyPlan, views: Iterable[memoryview]
) -> None:
    """Write a complete batch and sync it to the file server.

    Raises:
        OSError: Writing or syncing failed.
    """
    digest = _hasher(path, nonce)
    with path.open("xb") as file:
        for part in itertools.chain([memoryview(table_of(room, plan))], views):
            digest.update(part)
            file.write(part)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())


def read_batch(path: Path, nonce: bytes) -> Batch:
    """Read a batch into newly allocated memory.

    Raises:
        TransferRefused: The batch is torn, too large, or was written under another name.
        OSError: The file cannot be read.
    """
    content = _content(path)
    body = content[:-DIGEST_BYTES]
    digest = _hasher(path, nonce)
    digest.update(body.data)
    if digest.digest() != content[-DIGEST_BYTES:].tobytes():
        raise TransferRefused(f"{path.name} is torn, or not what its name says")
    room, num_copies = HEADER.unpack(body[: HEADER.size].tobytes())
    table_end = HEADER.size + num_copies * COPY_BYTES
    if not 0 < num_copies <= MAX_COPIES or table_end > len(body):
        raise TransferRefused(f"a table of {num_copies} copies")
    plan = plan_of(body[HEADER.size : table_end].tobytes())
    return Batch(room, plan, body[table_end:])


def batches_in(directory: Path) -> Sequence[Path]:
    """Return the complete batches, oldest first; none if the directory cannot be read."""
    try:
        names = os.listdir(directory)
    except OSError:
        return ()
    return [directory / name for name in sorted(names) if BATCH_NAME.fullmatch(name)]


def beats(directory: Path) -> dict[Path, bytes]:
    """Return every owner's directory with its current beat; empty if the beat cannot be read."""
    found = {}
    for owner in directory.glob("tandem-*"):
        if OWNER_NAME.fullmatch(owner.name):
            found[owner] = b""
            with suppress(OSError):
                found[owner] = (owner / "beat").read_bytes()
    return found


def sweep(directory: Path, seen: dict[Path, bytes]) -> None:
    """Remove the directories of owners whose beat has not changed since `seen`."""
    for owner, beat in beats(directory).items():
        if seen.get(owner) == beat:
            remove(owner)


def remove(directory: Path) -> None:
    """Rename a directory away at once, then delete it."""
    # Renamed first: deletion takes time, and NFS keeps a directory that contains an open file.
    gone = directory.with_name(f"{directory.name}.gone")
    with suppress(OSError):
        directory.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _hasher(path: Path, nonce: bytes) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(nonce + path.stem.encode())


def _content(path: Path) -> NDArray[np.uint8]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        size_bytes = os.fstat(fd).st_size
        if not HEADER.size + DIGEST_BYTES <= size_bytes <= MAX_FILE_BYTES:
            raise TransferRefused(f"a batch of {size_bytes} bytes")
        content = np.empty(size_bytes, np.uint8)
        if file.readinto(content.data) != size_bytes:
            raise TransferRefused(f"{path.name} is torn")
    return content
