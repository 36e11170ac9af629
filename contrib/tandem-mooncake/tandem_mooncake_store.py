"""A tier in a Mooncake Store: memory that nodes lend to each other, located by a master.

    --kv-tier mooncake://master-host[:50051]?segment=16GiB

The library decides where a page is stored, and evicts by itself. Its calls cannot be cancelled: a call to a hanging
lender has taken over 50 s. While one call exceeds its timeout, the tier fails at once instead of making another.
A page whose lender died is a miss, not a failure of the store.
"""

import contextlib
import ctypes
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import parse_qsl, urlsplit

from mooncake.store import MooncakeDistributedStore
from typing_extensions import override

from tandem.kvtier.entry import HEADER_BYTES, KnownPages, header_of, is_entry_of
from tandem.kvtier.memory import Loan, PageMemory
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.tier import NEVER_S, PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal

log = get_logger("kvtier.mooncake")

PORT = 50051

TIMEOUT_S = 2.0
# Bytes per call to the library, which transfers the pages of a call concurrently.
PIECE_BYTES = 16 << 20
# Buffer for the library's internal copies. The tier itself passes registered memory.
LIBRARY_BUFFER_BYTES = 16 << 20
FULL_PAUSE_S = 10.0
# Limit of the memory lost to timed-out transfers: it stays registered, because the library may still access it.
MAX_ASIDE_BYTES = 1 << 30
# Error codes that the library returns in place of a length or 0.
NO_SPACE, NOT_FOUND, TRANSFER_FAILED = -200, -704, -800
MASTER_AWAY = frozenset({-900, -901})
# After these codes no transfer is running: it did not start, or it ended before the library reported it to the master.
NO_TRANSFER_RUNS = MASTER_AWAY | {NO_SPACE, NOT_FOUND}
_OPTIONS = {
    "host": "own_host",
    "metadata": "metadata",
    "protocol": "protocol",
    "devices": "devices",
}


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """The address and options of a store.

    Attributes:
        segment_bytes: Memory that this node lends, the sum of its ranks.
        own_host: Address at which others reach this node; empty: the local address of its connection to the master.
        metadata: The library's metadata server; `P2PHANDSHAKE` means no server.
        devices: Names of RDMA adapters.
    """

    host: str
    port: int
    segment_bytes: int = 0
    own_host: str = ""
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""


def parse_url(url: str) -> MooncakeAddress:
    """Parse a `mooncake://` URL.

    Raises:
        ConfigInvalid: The URL names no master, or has an unknown option.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigInvalid(f"{url} has no valid host and port") from error
    if parts.scheme != "mooncake" or not host or parts.path.strip("/"):
        raise ConfigInvalid(f"{url}: name a master, as in mooncake://host:{PORT}?segment=16GiB")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    size = re.fullmatch(r"(\d+)(MiB|GiB)?", query.pop("segment", "0"))
    if size is None:
        raise ConfigInvalid(f"{url}: segment must be a size such as 512MiB or 16GiB")
    if unknown := set(query) - set(_OPTIONS):
        raise ConfigInvalid(
            f"{url}: unknown option {min(unknown)!r}; use segment, " + ", ".join(_OPTIONS)
        )
    if query.get("protocol", "tcp") not in {"tcp", "rdma"}:
        raise ConfigInvalid(f"{url}: protocol must be tcp or rdma")
    segment_bytes = int(size[1]) << {None: 0, "MiB": 20, "GiB": 30}[size[2]]
    options = {_OPTIONS[option]: value for option, value in query.items()}
    return MooncakeAddress(host, port or PORT, segment_bytes, **options)


class MooncakeTier:
    """Pages in memory that nodes lend to each other. Any thread may call it, several at once.

    Args:
        pages: The pool's page size and the memory to read pages into.
        space: The key space. Nodes with different spaces do not share pages.
        timeout_s: While a call takes longer than this, the tier fails all others.
    """

    lends_own_memory = False

    def __init__(
        self,
        name: str,
        address: MooncakeAddress,
        pages: PoolPages,
        space: PageSpace,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._address, self._clock = name, address, clock
        self._timeout_s, self._space_name = timeout_s, space.name
        self._shown = f"mooncake://{address.host}:{address.port}"
        self._entry_bytes = HEADER_BYTES + pages.page_bytes
        self._num_at_once = max(1, PIECE_BYTES // self._entry_bytes)
        self._host_memory = pages.host_memory
        self._memory = PageMemory(self._registered, self._entry_bytes)
        self._slabs: list[memoryview] = []
        self._known = KnownPages()
        self._client: MooncakeDistributedStore | None = None
        self._setting_up = threading.Lock()
        self._lock = threading.Lock()
        # Start times of the calls in flight, by thread.
        self._began: dict[int, float] = {}
        self._num_corrupted = 0
        self._store = ""
        self._full_until = 0.0
        self._aside_bytes = 0

    @override
    def __repr__(self) -> str:
        return f"<MooncakeTier {self.name} {self._shown} {self.load().state}>"

    @property
    def journal(self) -> PrefixJournal:
        """The journal of blocks that this node stored or found here."""
        return self._known.journal

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Return the leading pages that are stored, as far as they were read before the deadline or a failure.

        Raises:
            TierFailed: The store failed before any page was read.
        """
        pieces: list[memoryview] = []
        try:
            with self._call() as client:
                for first in range(0, len(keys), self._num_at_once):
                    batch = keys[first : first + self._num_at_once]
                    is_late = time.monotonic() >= deadline_s
                    if is_late or self._read(client, batch, pieces) < len(batch):
                        break
        except TierFailed:
            if not pieces:
                raise
        except BaseException:
            self._memory.release(pieces)
            raise
        self._known.record(keys[: len(pieces)])
        return self._memory.lend(pieces, [piece[HEADER_BYTES:] for piece in pieces])

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write the pages that are missing; return the number written, which is lower if the store is full.

        Raises:
            TierFailed: The store failed.
        """
        if self._clock() < self._full_until:
            return 0
        num_new = 0
        with self._call() as client:
            stored = self._are_stored(client, keys)
            self._known.record(
                key for key, is_stored in zip(keys, stored, strict=True) if is_stored
            )
            missing = [index for index, is_stored in enumerate(stored) if not is_stored]
            for first in range(0, len(missing), self._num_at_once):
                batch = missing[first : first + self._num_at_once]
                num_new += self._write(client, [(keys[index], pages[index]) for index in batch])
                if self._clock() < self._full_until:
                    break
        return num_new

    def load(self) -> TierLoad:
        """Return the tier's state; the store does not report its usage."""
        return TierLoad(
            name=self.name,
            store=self._store,
            state="full" if self._clock() < self._full_until else "up",
            num_corrupted=self._num_corrupted,
        )

    def close(self) -> None:
        """Leave the store and withdraw the lent memory, unless a call is in flight: it would crash."""
        with self._lock:
            client = None if self._began else self._client
            self._client = None
        if client is not None:
            for slab in self._slabs:
                client.unregister_buffer(_address_of(slab))
            client.close()

    @contextlib.contextmanager
    def _call(self) -> Iterator[MooncakeDistributedStore]:
        me, now = threading.get_ident(), self._clock()
        try:
            with self._lock:
                since = min(self._began.values(), default=now)
                if now - since > self._timeout_s:
                    raise self._failed(f"a call has been waiting for {now - since:.0f} s")
                if self._aside_bytes >= MAX_ASIDE_BYTES:
                    raise self._failed(
                        f"transfers that timed out hold {self._aside_bytes >> 20} MiB; restart this node"
                    )
                self._began[me] = now
            try:
                yield self._joined()
            finally:
                with self._lock:
                    del self._began[me]
        except TierFailed:
            # The master may have restarted; it then knows no pages.
            self._known.forget_all()
            raise

    def _joined(self) -> MooncakeDistributedStore:
        """Return the client; join the store first if necessary."""
        with self._setting_up:
            if self._client is not None:
                return self._client
            # Test the connection first, because the library needs 90 s to detect that nothing listens.
            address = (self._address.host, self._address.port)
            try:
                with socket.create_connection(address, self._timeout_s) as link:
                    own_host, master = link.getsockname()[0], link.getpeername()
            except OSError as error:
                raise self._failed(str(error)) from error
            client = MooncakeDistributedStore()
            store = self._address
            status = client.setup(
                store.own_host or own_host,
                store.metadata,
                store.segment_bytes,
                LIBRARY_BUFFER_BYTES,
                store.protocol,
                store.devices,
                f"{store.host}:{store.port}",
            )
            if status:
                raise self._failed(f"the library could not join the store ({status})")
            self._store = f"mooncake:{master[0]}:{master[1]}-{self._space_name}"
            self._client = client
            return client

    def _registered(self, num_bytes: int) -> memoryview:
        """Allocate and register memory; the library rejects two regions that share a host memory page."""
        slab = self._host_memory(num_bytes)
        assert self._client is not None
        if status := self._client.register_buffer(_address_of(slab), slab.nbytes):
            raise self._failed(f"memory could not be registered ({status})")
        self._slabs.append(slab)
        return slab

    def _are_stored(self, client: MooncakeDistributedStore, keys: Sequence[PageKey]) -> list[bool]:
        found = client.batch_is_exist([_name(key) for key in keys])
        self._refuse_errors(found)
        return [code == 1 for code in found]

    def _read(
        self,
        client: MooncakeDistributedStore,
        keys: Sequence[PageKey],
        pieces: list[memoryview],
    ) -> int:
        """Append the leading entries that exist and are valid; return their number."""
        names = [_name(key) for key in keys]
        with self._lent(len(keys)) as lent:
            memory = list(lent)
            lengths = self._moved(lent, partial(client.batch_get_into, names))
            num_valid = 0
            for key, length, piece in zip(keys, lengths, memory, strict=True):
                if length != self._entry_bytes or not is_entry_of(key, piece):
                    self._known.forget(key.digest)
                    if length not in {NOT_FOUND, TRANSFER_FAILED} and length not in MASTER_AWAY:
                        with self._lock:
                            self._num_corrupted += 1
                        client.remove(_name(key), True)
                    break
                num_valid += 1
            pieces += lent[:num_valid]
            del lent[:num_valid]
        if not num_valid:
            self._refuse_errors(lengths[:1])
        return num_valid

    def _write(
        self, client: MooncakeDistributedStore, entries: Sequence[tuple[PageKey, memoryview]]
    ) -> int:
        """Write entries; return the number that the store accepted."""
        names = [_name(key) for key, _ in entries]
        with self._lent(len(entries)) as lent:
            for piece, (key, page) in zip(lent, entries, strict=True):
                piece[:HEADER_BYTES], piece[HEADER_BYTES:] = (
                    header_of(key, page),
                    page,
                )
            codes = self._moved(lent, partial(client.batch_put_from, names))
        self._refuse_errors(codes)
        if NO_SPACE in codes:
            self._full_until = self._clock() + FULL_PAUSE_S
            log.warning("kv_tier.full", tier=self.name, server=self._shown)
        stored = [key for (key, _), code in zip(entries, codes, strict=True) if not code]
        self._known.record(stored)
        return len(stored)

    @contextlib.contextmanager
    def _lent(self, num_pieces: int) -> Iterator[list[memoryview]]:
        """Lend pieces of registered memory. Pieces that are still in the list at the end are returned."""
        lent: list[memoryview] = []
        try:
            while len(lent) < num_pieces:
                lent.append(self._memory.take())
            yield lent
        finally:
            self._memory.release(lent)

    def _moved(
        self, lent: list[memoryview], transfer: Callable[[list[int], list[int]], list[int]]
    ) -> list[int]:
        """Read or write pieces through the library; return its code or length for each.

        After a timeout the library reports failure, but the transfer may continue in that memory. Such pieces,
        and all pieces of a call that raises, are removed from `lent` so that they are never reused.
        """
        memory, begin_s = list(lent), self._clock()
        lent.clear()
        has_timed_out, codes = True, [TRANSFER_FAILED] * len(memory)
        try:
            codes = transfer(
                [_address_of(piece) for piece in memory], [self._entry_bytes] * len(memory)
            )
            has_timed_out = self._clock() - begin_s >= self._timeout_s
        finally:
            lent += [
                piece
                for piece, code in zip(memory, codes, strict=True)
                if not (has_timed_out and code < 0 and code not in NO_TRANSFER_RUNS)
            ]
            with self._lock:
                self._aside_bytes += (len(memory) - len(lent)) * self._entry_bytes
        return codes

    def _refuse_errors(self, codes: Sequence[int]) -> None:
        for code in codes:
            if code in MASTER_AWAY:
                raise self._failed(f"the master does not answer ({code})")

    def _failed(self, reason: str) -> TierFailed:
        return TierFailed(f"{self._shown}: {reason}")


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> MooncakeTier:
    """Return the tier; the master need not run yet.

    Raises:
        ConfigInvalid: The URL is invalid, or names an unknown option.
    """
    address = parse_url(spec.url)
    # Each rank lends an equal share.
    share = replace(address, segment_bytes=address.segment_bytes // space.num_shards)
    return MooncakeTier(spec.name, share, pages, space)


def _name(key: PageKey) -> str:
    return f"tandem:kv:1:{key.digest.hex()}"


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
