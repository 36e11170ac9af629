"""A shared directory (NFS, Ceph, a local disk): prefill writes files, decode reads them into its pool.

KV passes only through the directory, so the pools need no network between them. This file has the transport
and the sending end; `listener` receives; `batches` defines the layout. The listener alone decides what lands:
it reads a batch into separate memory, verifies its checksum, and copies it only while its room has a live grant.
A write returns when the listener has renamed its files, and fails when the listener's beat stops.

A writer has no heartbeat here: its link has one, and a lost link is fenced.
"""

import itertools
import os
import tempfile
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from tandem.kvtransfer.plan import CopyPlan
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.transports.base import Pool, TransportConfig, check_bounds, need_cpu_memory
from tandem.wire.errors import ConfigInvalid, PeerLost, TransferRefused
from tandem.wire.generation import Room
from tandem.wire.hand_off import TransportOffer
from tandem_file.batches import BATCH_BYTES, MAX_COPIES, Pace, Pulse, write_batch
from tandem_file.listener import FileListener, FileOffer

# One batch is written, one read, one copied: a link uses the disk space of three batches.
MAX_SENT = 3


class FileTransport:
    """Files in `TransportConfig.directory`, which may have another path on each host.

    Raises:
        ConfigInvalid: The directory is missing or not writable.
    """

    name = "file"

    def __init__(self, config: TransportConfig | None = None) -> None:
        directory = config.directory if config else ""
        if not directory:
            raise ConfigInvalid(
                "transport file needs --transfer-directory: a directory that both ends share"
            )
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise ConfigInvalid(
                f"--transfer-directory {directory}: cannot write into it: {error.strerror}"
            ) from error
        self._directory = Path(directory)

    def listen(self, pool: Pool) -> FileListener:
        """Start receiving.

        Raises:
            ConfigInvalid: The pool is not in CPU memory.
        """
        need_cpu_memory(self.name, pool)
        return FileListener(pool, self._directory)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "FileConnection":
        """Connect to the directory that `offer` names.

        Raises:
            TransferRefused: The directory does not exist in this host's shared directory, or its nonce differs.
        """
        return FileConnection(offer, region, self._directory)


class FileConnection:
    """Writes batches into the directory that a listener created for this peer."""

    def __init__(self, offer: TransportOffer, region: MemoryRegion, directory: Path) -> None:
        self._view = region.buffer
        try:
            facts = msgspec.convert(offer.descriptor, FileOffer)
            owner = directory / f"tandem-{facts.owner}"
            self._path, self._beat = owner / facts.peer, owner / "beat"
            self._nonce = (self._path / "nonce").read_bytes()
        except (msgspec.ValidationError, OSError) as error:
            raise TransferRefused(f"no such offer in {directory}: {error}") from error
        if self._nonce.hex() != facts.nonce:
            raise TransferRefused(f"{directory} is not the directory of the other end")
        self._numbers = itertools.count(1)
        self._sent: deque[Path] = deque()  # unacknowledged batches, without suffix
        self._writing = threading.Lock()
        self._closing = threading.Event()

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Write up to `MAX_SENT` batches ahead, and wait until the listener has acknowledged all."""
        check_bounds(len(self._view), plan.source_offset, plan.size_bytes)
        with self._writing:
            if self._closing.is_set():
                raise PeerLost("the connection is closed")
            pulse = Pulse(self._beat)
            try:
                for batch in plan.batches(BATCH_BYTES, MAX_COPIES):
                    self._put(room, batch)
                    self._await(pulse, MAX_SENT - 1)
                self._await(pulse, 0)
            except OSError as error:
                # Usually this peer was fenced. A full disk also ends this write, but not the connection.
                raise PeerLost(f"the shared directory failed: {error}") from error
            finally:
                self._take_back()

    def _put(self, room: Room, batch: CopyPlan) -> None:
        path = self._path / f"{next(self._numbers):016x}"
        self._sent.append(path)
        part = path.with_suffix(".part")
        views = (self._view[begin : begin + size] for begin, _, size in batch.copies())
        write_batch(part, self._nonce, room, batch, views)
        part.rename(path.with_suffix(".batch"))

    def _await(self, pulse: Pulse, num_left: int) -> None:
        """Wait until at most `num_left` batches are unacknowledged."""
        pace = Pace()
        while len(self._sent) > num_left:
            names = os.listdir(self._path)
            name = self._sent[0].name
            if f"{name}.refused" in names:
                raise TransferRefused("a batch was torn, or its pages are not granted to this room")
            if f"{name}.landed" in names:
                self._sent.popleft().with_suffix(".landed").unlink()
                pace.reset()
                continue
            pulse.check()
            if self._closing.wait(pace.next_s()):
                raise PeerLost("the connection was closed in the middle of a write")

    def _take_back(self) -> None:
        """Remove the files of a failed write. A batch that lands meanwhile is still covered by its grant."""
        while self._sent:
            path = self._sent.popleft()
            for suffix in (".part", ".batch", ".landed", ".refused"):
                with suppress(OSError):
                    path.with_suffix(suffix).unlink()

    def close(self) -> None:
        """Abort a write in progress. The listener removes the directory."""
        self._closing.set()
