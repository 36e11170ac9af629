"""A tier in a Mooncake Store: memory that nodes lend to each other, found through a master.

The library decides where a page goes and evicts by itself. Its calls cannot be stopped: one to a lender that hangs has
been seen to wait for 50 s and more. So while one waits too long no other is made, and the tier fails at once.
A page whose lender died is not there any more, and that is no failure of the store.
"""

import contextlib
import ctypes
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from mooncake.store import MooncakeDistributedStore
from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal
from typing_extensions import override

from tandem.kvtier.entry import STORE_HEADER_BYTES, KnownPages, is_entry_of, store_header
from tandem.kvtier.memory import MemoryLoan, PageMemory
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.store_url import MooncakeAddress, parse_mooncake_url
from tandem.kvtier.tier import PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.messages import TierLoad

log = get_logger("kvtier.mooncake")

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
        self._name, self._address, self._clock = name, address, clock
        self._timeout_s, self._space_name = timeout_s, space.name
        self._shown = f"mooncake://{address.host}:{address.port}"
        self._page_bytes = pages.page_bytes
        self._entry_bytes = STORE_HEADER_BYTES + pages.page_bytes
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
        self._counts = Counter[str]()
        self._store = ""
        self._full_until = 0.0
        self._aside_bytes = 0

    @override
    def __repr__(self) -> str:
        return f"<MooncakeTier {self._name} {self._shown} {self.load().state}>"

    @property
    def name(self) -> str:
        """Unique on a node."""
        return self._name

    @property
    def journal(self) -> PrefixJournal:
        """Of what this node put or found here."""
        return self._known.journal

    def has(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are here.

        Raises:
            TierFailed: The master could not be asked.
        """
        with self._call() as client:
            here = self._are_here(client, keys)
        num_found = here.index(False) if False in here else len(here)
        self._known.met(keys[:num_found])
        if num_found < len(keys):
            self._known.missed(keys[num_found])
        return num_found

    def get(self, keys: Sequence[PageKey]) -> MemoryLoan:
        """Return the leading pages that are here, or as many as came before the store failed.

        Raises:
            TierFailed: The store could not be asked, and no page came.
        """
        pieces: list[memoryview] = []
        try:
            with self._call() as client:
                for first in range(0, len(keys), self._num_at_once):
                    some = keys[first : first + self._num_at_once]
                    if self._read(client, some, pieces) < len(some):
                        break
        except TierFailed:
            if not pieces:
                raise
        except BaseException:
            self._memory.give_back(pieces)
            raise
        self._known.met(keys[: len(pieces)])
        self._count(got_bytes=len(pieces) * self._page_bytes)
        return MemoryLoan(self._memory, pieces, [piece[STORE_HEADER_BYTES:] for piece in pieces])

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
        self._count(put_bytes=num_new * self._page_bytes)
        return num_new

    def load(self) -> TierLoad:
        """Return what this node moved; the store does not tell how much is in it."""
        return TierLoad(
            name=self._name,
            store=self._store,
            state="full" if self._clock() < self._full_until else "up",
            put_bytes=self._counts["put_bytes"],
            got_bytes=self._counts["got_bytes"],
            num_corrupted=self._counts["num_corrupted"],
            num_failures=self._counts["num_failures"],
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
            self._count(num_failures=1)
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
                    self._known.missed(key)
                    if length not in {NOT_FOUND, TRANSFER_FAILED} and length not in MASTER_AWAY:
                        self._count(num_corrupted=1)
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
                piece[:STORE_HEADER_BYTES], piece[STORE_HEADER_BYTES:] = (
                    store_header(key, page),
                    page,
                )
            codes = self._moved(lent, partial(client.batch_put_from, names))
        self._refuse_errors(codes)
        if NO_SPACE in codes:
            self._full_until = self._clock() + FULL_PAUSE_S
            log.warning("kv_tier.full", tier=self._name, server=self._shown)
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

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> MooncakeTier:
    """Return the tier; the master need not be there yet.

    Raises:
        ConfigInvalid: The URL is none, or asks for what there is not.
    """
    address = parse_mooncake_url(spec.url)
    # What the node lends each of its ranks lends a share of.
    share = replace(address, segment_bytes=address.segment_bytes // space.num_shards)
    return MooncakeTier(spec.name, share, pages, space)


def _name(key: PageKey) -> str:
    return f"tandem:kv:1:{key.digest.hex()}"


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
