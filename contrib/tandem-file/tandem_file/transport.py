"""A shared directory (NFS, Ceph, a local disk): prefill writes files, decode reads them into its pool.

No bytes of KV go from one end to the other by themselves, so the pools need no network between them.
This file has the transport and the sending end; `listener` receives, `batches` has what lies where. The listener copies, so it alone decides what lands: a batch is read into memory of its own,
compared with its checksum, and copied only while its room has a live grant. A write returns when the
listener has renamed its files, and fails when the listener's beat stops.

A writer keeps no heartbeat here: its link has one, and a lost link is fenced.
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

# One batch is written, one is read, one is copied. What a link takes of the disk is three batches.
MAX_SENT = 3


class FileTransport:
    """Files in `TransportConfig.directory`, which may have another path on each host.

    Raises:
        ConfigInvalid: There is no such directory, or nothing can be written into it.
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
        """Begin to receive.

        Raises:
            ConfigInvalid: The pool is not the CPU's.
        """
        need_cpu_memory(self.name, pool)
        return FileListener(pool, self._directory)

    def connect(self, offer: TransportOffer, region: MemoryRegion) -> "FileConnection":
        """Find the directory that `offer` names.

        Raises:
            TransferRefused: It is not in the shared directory of this host.
        """
        return FileConnection(offer, region, self._directory)


class FileConnection:
    """Writes batches into the directory that one listener made for it."""

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
        self._sent: deque[Path] = deque()  # batches not yet answered, without suffix
        self._writing = threading.Lock()
        self._closing = threading.Event()

    def write(self, room: Room, plan: CopyPlan) -> None:
        """Write a few batches ahead, and wait for the listener's answer to each."""
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
                # Fenced, as a rule; a full disk ends this write too, but not the connection.
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
        """Wait until at most `num_left` batches are unanswered."""
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
        """Remove what is left of a write that failed. What lands of it meanwhile is still granted."""
        while self._sent:
            path = self._sent.popleft()
            for suffix in (".part", ".batch", ".landed", ".refused"):
                with suppress(OSError):
                    path.with_suffix(suffix).unlink()

    def close(self) -> None:
        """End a write under way. The directory is the listener's to remove."""
        self._closing.set()
