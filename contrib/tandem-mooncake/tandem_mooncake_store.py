"""A tier in a Mooncake Store: memory that nodes lend to each other, found through a master.

    --kv-tier mooncake://master-host[:50051]?segment=16GiB

The library decides where a page goes and evicts by itself. Its calls cannot be stopped: one to a lender that hangs has
been seen to wait for 50 s and more. So while one waits too long no other is made, and the tier fails at once.
A page whose lender died is not there any more, and that is no failure of the store.
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
# One call to the library: it has them all under way at once.
PIECE_BYTES = 16 << 20
# For copies that the library makes by itself; we give it memory of ours.
LIBRARY_BUFFER_BYTES = 16 << 20
FULL_PAUSE_S = 10.0
# Pieces that the library may still read or write stay registered, and are nobody's. More than this is not lost.
MAX_ASIDE_BYTES = 1 << 30
# What the library answers in place of a length or 0.
NO_SPACE, NOT_FOUND, TRANSFER_FAILED = -200, -704, -800
MASTER_AWAY = frozenset({-900, -901})
# With these no transfer is under way: none began, or it ended before the master was told.
AT_REST = MASTER_AWAY | {NO_SPACE, NOT_FOUND}
_OPTIONS = {
    "host": "own_host",
    "metadata": "metadata",
    "protocol": "protocol",
    "devices": "devices",
}


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """A store by its master.

    Attributes:
        segment_bytes: Memory that this node lends, all its ranks together.
        own_host: Where others reach this node; empty: the address from which the master is reached.
        metadata: The library's metadata server; `P2PHANDSHAKE` is none.
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
    """Read a URL.

    Raises:
        ConfigInvalid: It names no master, or has an unknown option.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigInvalid(f"{url} has no valid host and port") from error
    if parts.scheme != "mooncake" or not host or parts.path.strip("/"):
        raise ConfigInvalid(f"{url}: give a master: mooncake://host:{PORT}?segment=16GiB")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    size = re.fullmatch(r"(\d+)(MiB|GiB)?", given.pop("segment", "0"))
    if size is None:
        raise ConfigInvalid(f"{url}: segment is a size such as 512MiB or 16GiB")
    if unknown := set(given) - set(_OPTIONS):
        raise ConfigInvalid(
            f"{url}: there is no option {min(unknown)!r}; there are segment, " + ", ".join(_OPTIONS)
        )
    if given.get("protocol", "tcp") not in {"tcp", "rdma"}:
        raise ConfigInvalid(f"{url}: protocol is tcp or rdma")
    segment_bytes = int(size[1]) << {None: 0, "MiB": 20, "GiB": 30}[size[2]]
    options = {_OPTIONS[option]: value for option, value in given.items()}
    return MooncakeAddress(host, port or PORT, segment_bytes, **options)


class MooncakeTier:
    """Pages in memory that nodes lend each other. Any thread may call it, several at once.

    Args:
        pages: Of the pool: how large a page is, and what memory they come into.
        space: What all keys have in common: nodes with another find nothing of each other's.
        timeout_s: How long a call may wait before others are not made any more.
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
        # When the calls under way began, by thread.
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
        """Of what this node put or found here."""
        return self._known.journal

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Return the leading pages that are here, or as many as came in time and before the store failed.

        Raises:
            TierFailed: The store could not be asked, and no page came.
        """
        pieces: list[memoryview] = []
        try:
            with self._call() as client:
                for first in range(0, len(keys), self._num_at_once):
                    some = keys[first : first + self._num_at_once]
                    is_late = time.monotonic() >= deadline_s
                    if is_late or self._read(client, some, pieces) < len(some):
                        break
        except TierFailed:
            if not pieces:
                raise
        except BaseException:
            self._memory.give_back(pieces)
            raise
        self._known.met(keys[: len(pieces)])
        return self._memory.lend(pieces, [piece[HEADER_BYTES:] for piece in pieces])

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write what is not here yet; return how much that was, which is little where the store is full.

        Raises:
            TierFailed: The store could not be asked.
        """
        if self._clock() < self._full_until:
            return 0
        num_new = 0
        with self._call() as client:
            here = self._are_here(client, keys)
            self._known.met(key for key, is_here in zip(keys, here, strict=True) if is_here)
            lacking = [index for index, is_here in enumerate(here) if not is_here]
            for first in range(0, len(lacking), self._num_at_once):
                some = lacking[first : first + self._num_at_once]
                num_new += self._write(client, [(keys[index], pages[index]) for index in some])
                if self._clock() < self._full_until:
                    break
        return num_new

    def load(self) -> TierLoad:
        """Return its state; the store does not report how much is in it."""
        return TierLoad(
            name=self.name,
            store=self._store,
            state="full" if self._clock() < self._full_until else "up",
            num_corrupted=self._num_corrupted,
        )

    def close(self) -> None:
        """Leave the store, with what this node lent. A call that hangs is left alone: it would crash."""
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
                        f"transfers that were given up hold {self._aside_bytes >> 20} MiB; restart this node"
                    )
                self._began[me] = now
            try:
                yield self._joined()
            finally:
                with self._lock:
                    del self._began[me]
        except TierFailed:
            # The master may have been started anew, and knows nothing then.
            self._known.forget_all()
            raise

    def _joined(self) -> MooncakeDistributedStore:
        """Return the client, after joining the store if that is not done."""
        with self._setting_up:
            if self._client is not None:
                return self._client
            # The library takes a minute and a half to find that nobody listens.
            address = (self._address.host, self._address.port)
            try:
                with socket.create_connection(address, self._timeout_s) as link:
                    own_host, master = link.getsockname()[0], link.getpeername()
            except OSError as error:
                raise self._failed(str(error)) from error
            client = MooncakeDistributedStore()
            asked = self._address
            status = client.setup(
                asked.own_host or own_host,
                asked.metadata,
                asked.segment_bytes,
                LIBRARY_BUFFER_BYTES,
                asked.protocol,
                asked.devices,
                f"{asked.host}:{asked.port}",
            )
            if status:
                raise self._failed(f"the library could not join the store ({status})")
            self._store = f"mooncake:{master[0]}:{master[1]}-{self._space_name}"
            self._client = client
            return client

    def _registered(self, num_bytes: int) -> memoryview:
        """Return memory that the library may write to: it takes no two regions that share a page of the host's."""
        slab = self._host_memory(num_bytes)
        assert self._client is not None
        if status := self._client.register_buffer(_address_of(slab), slab.nbytes):
            raise self._failed(f"memory could not be registered ({status})")
        self._slabs.append(slab)
        return slab

    def _are_here(self, client: MooncakeDistributedStore, keys: Sequence[PageKey]) -> list[bool]:
        found = client.batch_is_exist([_name(key) for key in keys])
        self._refuse_errors(found)
        return [code == 1 for code in found]

    def _read(
        self,
        client: MooncakeDistributedStore,
        keys: Sequence[PageKey],
        pieces: list[memoryview],
    ) -> int:
        """Append the leading entries that are here and right; return how many."""
        names = [_name(key) for key in keys]
        with self._lent(len(keys)) as lent:
            memory = list(lent)
            lengths = self._moved(lent, partial(client.batch_get_into, names))
            num_right = 0
            for key, length, piece in zip(keys, lengths, memory, strict=True):
                if length != self._entry_bytes or not is_entry_of(key, piece):
                    self._known.missed(key.digest)
                    if length not in {NOT_FOUND, TRANSFER_FAILED} and length not in MASTER_AWAY:
                        with self._lock:
                            self._num_corrupted += 1
                        client.remove(_name(key), True)
                    break
                num_right += 1
            pieces += lent[:num_right]
            del lent[:num_right]
        if not num_right:
            self._refuse_errors(lengths[:1])
        return num_right

    def _write(
        self, client: MooncakeDistributedStore, entries: Sequence[tuple[PageKey, memoryview]]
    ) -> int:
        """Write entries; return how many the store took."""
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
        taken = [key for (key, _), code in zip(entries, codes, strict=True) if not code]
        self._known.met(taken)
        return len(taken)

    @contextlib.contextmanager
    def _lent(self, num_pieces: int) -> Iterator[list[memoryview]]:
        """Lend pieces; what is left of the list afterwards is given back."""
        lent: list[memoryview] = []
        try:
            while len(lent) < num_pieces:
                lent.append(self._memory.take())
            yield lent
        finally:
            self._memory.give_back(lent)

    def _moved(
        self, lent: list[memoryview], transfer: Callable[[list[int], list[int]], list[int]]
    ) -> list[int]:
        """Have the library read or write pieces; return what it answers for each.

        It gives up on a lender that hangs, and on its transfer not: that goes on in the memory, whoever has it
        then. Such pieces, and all of a call that raises, are taken from `lent`: nobody gets them again.
        """
        memory, begin_s = list(lent), self._clock()
        lent.clear()
        gave_up, codes = True, [TRANSFER_FAILED] * len(memory)
        try:
            codes = transfer(
                [_address_of(piece) for piece in memory], [self._entry_bytes] * len(memory)
            )
            gave_up = self._clock() - begin_s >= self._timeout_s
        finally:
            lent += [
                piece
                for piece, code in zip(memory, codes, strict=True)
                if not (gave_up and code < 0 and code not in AT_REST)
            ]
            with self._lock:
                self._aside_bytes += (len(memory) - len(lent)) * self._entry_bytes
        return codes

    def _refuse_errors(self, codes: Sequence[int]) -> None:
        for code in codes:
            if code in MASTER_AWAY:
                raise self._failed(f"the master does not answer ({code})")

    def _failed(self, why: str) -> TierFailed:
        return TierFailed(f"{self._shown}: {why}")


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> MooncakeTier:
    """Return the tier; the master need not be there yet.

    Raises:
        ConfigInvalid: The URL is none, or asks for what there is not.
    """
    address = parse_url(spec.url)
    # What the node lends each of its ranks lends a share of.
    share = replace(address, segment_bytes=address.segment_bytes // space.num_shards)
    return MooncakeTier(spec.name, share, pages, space)


def _name(key: PageKey) -> str:
    return f"tandem:kv:1:{key.digest.hex()}"


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
