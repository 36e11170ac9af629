"""A tier in a Redis or Valkey server, shared by all nodes that are given it.

```
 tandem:kv:1:DIGEST  ──▶  header (see `entry`) + page
 tandem:kv:store     ──▶  which store this is
```

The server evicts, by its own `maxmemory` and policy. One that takes no more (full, a replica, its disk
failing) is read from all the same. Values that are not what was put are removed. How replies are read is in
`redis_link`.
"""

import contextlib
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from typing_extensions import override

from tandem.kvtier.entry import HEADER_BYTES, is_entry_of
from tandem.kvtier.known import KnownPages
from tandem.kvtier.page_memory import MemoryLoan, PageMemory
from tandem.kvtier.redis_commands import STORE_KEY, EntryCommands, command, entry_key
from tandem.kvtier.redis_link import Link, Links, Refused
from tandem.kvtier.redis_url import RedisAddress, parse_redis_url
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.tier import PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.messages import TierLoad
from tandem.wire.page_keys import PageKey, PageSpace
from tandem.wire.prefix_journal import PrefixJournal

log = get_logger("kvtier.redis")

# A call that takes longer has been given up by whoever asked, unless their limit is longer.
TIMEOUT_S = 2.0
# Asked for ahead of what is read: enough that neither end waits for the other (4.7 GB/s on loopback, with 8 MiB
# half of that: what the server wrote is out of the caches when it is read), and all that a miss reads in vain.
AHEAD_BYTES = 4 << 20
# Commands without pages in one go. The server serves others between them.
MAX_COMMANDS = 512
# What a server says that takes nothing but may be read, and how long it is not asked to take anything again.
TAKES_NOTHING = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM"})
FULL_PAUSE_S = 10.0


class RedisTier:
    """Pages in a server that many share. Any thread may call it, several at once.

    Args:
        pages: Of the pool: how large a page is, and what memory they come into.
        space: What all keys have in common: nodes with another find nothing of each other's.
        timeout_s: For a `has` or `get`; for each page of a `put`.
    """

    def __init__(
        self,
        name: str,
        address: RedisAddress,
        pages: PoolPages,
        space: PageSpace,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._timeout_s, self._clock = name, timeout_s, clock
        self._shown, self._commands = address.shown, EntryCommands(address.ttl_s)
        self._links = Links(address, timeout_s, clock)
        self._page_bytes, self._space_name = pages.page_bytes, space.name
        self._entry_bytes = HEADER_BYTES + pages.page_bytes
        self._num_ahead = max(2, AHEAD_BYTES // self._entry_bytes)
        # The two bytes that end a value are read with it.
        self._memory = PageMemory(pages.host_memory, self._entry_bytes + 2)
        self._known = KnownPages()
        # What follows is changed under the lock; what loads tell of is read without it.
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._store, self._num_keys = "", 0
        self._full_until = 0.0

    @override
    def __repr__(self) -> str:
        return f"<RedisTier {self._name} {self._shown} {self.load().state}>"

    @property
    def name(self) -> str:
        """Unique on a node."""
        return self._name

    @property
    def journal(self) -> PrefixJournal:
        """Of what this node put or found here."""
        return self._known.journal

    def has(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are here; it marks them as used.

        Raises:
            TierFailed: The server could not be asked.
        """
        num_found = 0
        with self._call() as link:
            for first in range(0, len(keys), MAX_COMMANDS):
                piece = keys[first : first + MAX_COMMANDS]
                here = self._are_here(link, piece)
                num_leading = here.index(False) if False in here else len(here)
                self._known.met(piece[:num_leading])
                num_found += num_leading
                if num_leading < len(here):
                    self._miss(link, piece[num_leading])
                    break
        return num_found

    def get(self, keys: Sequence[PageKey]) -> MemoryLoan:
        """Return the leading pages that are here, or as many of them as came in time.

        Raises:
            TierFailed: The server could not be asked, and no page came.
        """
        pieces: list[memoryview] = []
        try:
            with self._call() as link:
                self._read(link, keys, pieces)
        except TierFailed:
            if not pieces:
                raise
        self._known.met(keys[: len(pieces)])
        self._count(got_bytes=len(pieces) * self._page_bytes)
        return MemoryLoan(self._memory, pieces, [piece[HEADER_BYTES:-2] for piece in pieces])

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write what is not here yet; return how much that was, which is little where the server is full.

        A full server is read from as ever, so that is no failure. It is tried again `FULL_PAUSE_S` later.

        Raises:
            TierFailed: The server could not be asked.
        """
        if self._clock() < self._full_until:
            return 0
        num_new = 0
        with self._call() as link:
            self._identify(link)
            for first in range(0, len(keys), MAX_COMMANDS):
                piece = keys[first : first + MAX_COMMANDS]
                here = self._are_here(link, piece)
                self._known.met(key for key, is_here in zip(piece, here, strict=True) if is_here)
                lacking = [
                    (keys[index], pages[index])
                    for index, is_here in enumerate(here, first)
                    if not is_here
                ]
                num_new += self._write(link, lacking)
                if self._clock() < self._full_until:
                    break
        self._count(put_bytes=num_new * self._page_bytes)
        with self._lock:
            self._num_keys += num_new  # until the server is asked again
        return num_new

    def load(self) -> TierLoad:
        """Return what is in it, and what this node moved."""
        return TierLoad(
            name=self._name,
            store=self._store and f"{self._store}-{self._space_name}",
            state="full" if self._clock() < self._full_until else "up",
            num_pages=self._num_keys,
            num_bytes=self._num_keys * self._entry_bytes,
            put_bytes=self._counts["put_bytes"],
            got_bytes=self._counts["got_bytes"],
            num_corrupted=self._counts["num_corrupted"],
            num_failures=self._counts["num_failures"],
        )

    def close(self) -> None:
        """Close all connections."""
        self._links.close()
        self._memory.clear()

    @contextlib.contextmanager
    def _call(self) -> Iterator[Link]:
        try:
            with self._links.link(self._timeout_s) as link:
                if link.is_new:
                    self._identify(link)
                yield link
        except TierFailed:
            self._count(num_failures=1)
            raise

    def _identify(self, link: Link) -> None:
        """Learn which store this is, and name it if it has no name; another one than before was emptied."""
        ask = command(b"GET", STORE_KEY) + command(b"DBSIZE")
        link.send(ask)
        store, num_keys = link.reply(), link.reply()
        if store is None:
            name = uuid.uuid4().hex.encode()
            link.send(command(b"SET", STORE_KEY, name, b"NX") + ask)
            link.reply()  # a replica refuses: it has no name then, and is taken for this node's own
            store, num_keys = link.reply(), link.reply()
        if isinstance(store, Refused):
            raise self._failed(store)
        found = store.decode(errors="replace") if isinstance(store, bytes) else ""
        with self._lock:
            before, self._store = self._store, found
            # Without our own key. Where the account may not ask, it is not known.
            self._num_keys = max(0, num_keys - 1) if isinstance(num_keys, int) else 0
        if before and before != found:
            self._known.forget_all()
            log.warning("kv_tier.emptied", tier=self._name, server=self._shown)

    def _are_here(self, link: Link, keys: Sequence[PageKey]) -> list[bool]:
        """Return of each key whether it is here; what is another length than it must be is removed."""
        link.send(b"".join(map(self._commands.length, keys)))
        here, wrong = [], []
        for key in keys:
            length = link.reply()
            self._read_stay(link)
            if isinstance(length, Refused) and length.code != "WRONGTYPE":
                raise self._failed(length)
            here.append(length == self._entry_bytes)
            if length not in {0, self._entry_bytes}:
                wrong.append(key)
        for key in wrong:
            self._remove(link, key)
        return here

    def _read(self, link: Link, keys: Sequence[PageKey], pieces: list[memoryview]) -> None:
        """Append the leading entries to `pieces` as they come, up to one that is not here or not right."""
        num_asked = min(self._num_ahead, len(keys))
        link.send(b"".join(map(self._commands.get, keys[:num_asked])))
        for index, key in enumerate(keys):
            memory = self._memory.take()
            length = link.value_into(memory)
            self._read_stay(link)
            if isinstance(length, Refused) and length.code != "WRONGTYPE":
                raise self._failed(length)
            if length != self._entry_bytes or not is_entry_of(key, memory[:-2]):
                for _ in range(index + 1, num_asked):
                    link.value_into(memory)
                    self._read_stay(link)
                self._memory.give_back([memory])
                if length is None:
                    self._miss(link, key)
                else:
                    self._remove(link, key)
                return
            pieces.append(memory)
            if num_asked < len(keys):
                link.send(self._commands.get(keys[num_asked]))
                num_asked += 1

    def _write(self, link: Link, entries: Sequence[tuple[PageKey, memoryview]]) -> int:
        """Write entries in order until the server takes no more; return how many it took."""
        under_way: deque[PageKey] = deque()
        num_taken = 0
        for key, page in entries:
            link.extend(self._timeout_s)
            if len(under_way) == self._num_ahead:
                num_taken += self._was_taken(link, under_way.popleft())
                if self._clock() < self._full_until:
                    break
            link.send(*self._commands.set(key, page))
            under_way.append(key)
        for key in under_way:
            num_taken += self._was_taken(link, key)
        return num_taken

    def _was_taken(self, link: Link, key: PageKey) -> bool:
        reply = link.reply()
        if not isinstance(reply, Refused):
            self._known.met([key])
            return True
        if reply.code not in TAKES_NOTHING:
            raise self._failed(reply)
        if self._clock() >= self._full_until:
            self._full_until = self._clock() + FULL_PAUSE_S
            log.warning("kv_tier.full", tier=self._name, server=self._shown, reason=reply.sentence)
        return False

    def _miss(self, link: Link, key: PageKey) -> None:
        if self._known.missed(key):
            # Evicted, or all is gone: a server that was emptied keeps its connections.
            self._identify(link)

    def _remove(self, link: Link, key: PageKey) -> None:
        """Remove an entry that is wrong; where the server does not let us, it stays, and is never given out."""
        self._count(num_corrupted=1)
        self._known.missed(key)
        link.send(command(b"DEL", entry_key(key)))
        link.reply()

    def _read_stay(self, link: Link) -> None:
        if self._commands.has_two_replies:
            link.reply()  # a replica refuses, and has what its primary let stay

    def _failed(self, refused: Refused) -> TierFailed:
        return TierFailed(f"{self._shown}: {refused.sentence}")

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> RedisTier:
    """Return what `make_redis` does."""
    return make_redis(spec.url, pages, space, name=spec.name)


def make_redis(
    url: str,
    pages: PoolPages,
    space: PageSpace,
    *,
    name: str = "redis",
    timeout_s: float = TIMEOUT_S,
) -> RedisTier:
    """Return the tier; the server need not be there yet.

    Raises:
        ConfigInvalid: The URL is none, or asks for what there is not.
    """
    return RedisTier(name, parse_redis_url(url), pages, space, timeout_s=timeout_s)
