"""A tier in a Redis or Valkey server, shared by all nodes that are given it.

```
 tandem:kv:1:DIGEST  ──▶  header (see `entry`) + page
 tandem:kv:store     ──▶  the store's identity
```

The server evicts, by its own `maxmemory` and policy. One that takes no more (full, a replica, its disk failing) is
read from all the same. Values that are not what was put are removed.

The `redis` package does all but one thing: pages are read straight into the memory that they are lent from. Its
parser copies every value several times (0.5 GB/s on a core where `_Replies` reads 3), and its time limit is for
one read, which a server that trickles never reaches.
"""

import contextlib
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal
from typing_extensions import override

from tandem.kvtier.entry import STORE_HEADER_BYTES, KnownPages, is_entry_of, store_header
from tandem.kvtier.memory import MemoryLoan, PageMemory, copy_page
from tandem.kvtier.spec import TierSpec
from tandem.kvtier.store_url import RedisAddress, parse_redis_url
from tandem.kvtier.tier import PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.messages import TierLoad

log = get_logger("kvtier.redis")

# A call that takes longer was given up by the stack, unless the operator's limit is longer.
TIMEOUT_S = 2.0
# Requested ahead of what is read: enough that neither end waits for the other (4.7 GB/s on loopback, with 8 MiB
# half of that: what the server wrote is out of the caches when it is read), and all that a miss reads in vain.
AHEAD_BYTES = 4 << 20
# Commands without pages in one pipeline. The server serves others between them.
MAX_COMMANDS = 512
# How long a server that takes nothing is not asked to take anything again.
FULL_PAUSE_S = 10.0
STORE_KEY = "tandem:kv:store"
_MAX_LINE_BYTES = 4096
# Larger reads bypass the buffer.
_READ_AHEAD_BYTES = 1 << 14
_REFUSALS = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
)


class RedisTier:
    """Pages in a server that many share. Any thread may call it, several at once.

    Args:
        pages: How large a page is, and what memory pages are read into.
        space: What all keys have in common: nodes with another find nothing of each other's.
        timeout_s: For a whole `get`; otherwise for each answer of the server.
    """

    lends_own_memory = False

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
        self._shown, self._ttl_s = address.shown, address.ttl_s or None
        self._pool = redis.ConnectionPool.from_url(
            address.url,
            socket_timeout=timeout_s,
            protocol=2,  # the one that `_Replies` reads
            retry=Retry(NoBackoff(), 0),  # the stack knows when to try again
            **address.options,
        )
        self._client = redis.Redis(connection_pool=self._pool)
        self._page_bytes, self._space_name = pages.page_bytes, space.name
        self._entry_bytes = STORE_HEADER_BYTES + pages.page_bytes
        self._num_ahead = max(2, AHEAD_BYTES // self._entry_bytes)
        # The two bytes that end a value are read with it.
        self._memory = PageMemory(pages.host_memory, self._entry_bytes + 2)
        self._known = KnownPages()
        self._lock = threading.Lock()
        self._counts = Counter[str]()
        self._store, self._num_keys, self._full_until_s = "", 0, 0.0

    @override
    def __repr__(self) -> str:
        return f"<RedisTier {self._name} {self._shown} {self.load().state}>"

    @property
    def name(self) -> str:
        """Unique on a node."""
        return self._name

    @property
    def journal(self) -> PrefixJournal:
        """The blocks of pages that this node put or found here."""
        return self._known.journal

    def has(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading keys are here; it marks them as used.

        Raises:
            TierFailed: The server could not be asked.
        """
        with self._answering():
            self._identify_once()
            for first in range(0, len(keys), MAX_COMMANDS):
                piece = keys[first : first + MAX_COMMANDS]
                here = self._are_here(piece)
                num_leading = here.index(False) if False in here else len(here)
                self._known.met(piece[:num_leading])
                if num_leading < len(here):
                    self._miss(piece[num_leading])
                    return first + num_leading
        return len(keys)

    def get(self, keys: Sequence[PageKey]) -> MemoryLoan:
        """Return the leading pages that are here, or as many of them as came in time.

        Raises:
            TierFailed: The server could not be asked, and no page came.
        """
        pieces: list[memoryview] = []
        try:
            with self._answering():
                self._identify_once()
                self._read(keys, pieces)
        except TierFailed:
            if not pieces:
                raise
        self._known.met(keys[: len(pieces)])
        self._count(got_bytes=len(pieces) * self._page_bytes)
        pages = [piece[STORE_HEADER_BYTES:-2] for piece in pieces]
        return MemoryLoan(self._memory, pieces, pages)

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write what is not here yet; return how much that was, which is little where the server is full.

        A full server is read from as ever, so that is no failure. It is tried again `FULL_PAUSE_S` later.

        Raises:
            TierFailed: The server could not be asked.
        """
        num_new = 0
        with self._answering():
            if not self._is_full:
                self._identify()
            for first in range(0, len(keys), MAX_COMMANDS):
                if self._is_full:
                    break
                piece = keys[first : first + MAX_COMMANDS]
                here = self._are_here(piece)
                self._known.met(key for key, is_here in zip(piece, here, strict=True) if is_here)
                num_new += self._write(
                    [(keys[i], pages[i]) for i, is_here in enumerate(here, first) if not is_here]
                )
        self._count(put_bytes=num_new * self._page_bytes)
        with self._lock:
            self._num_keys += num_new  # until the server is asked again
        return num_new

    def load(self) -> TierLoad:
        """Return what is in it, and what this node moved."""
        return TierLoad(
            name=self._name,
            store=self._store and f"{self._store}-{self._space_name}",
            state="full" if self._is_full else "up",
            num_pages=self._num_keys,
            num_bytes=self._num_keys * self._entry_bytes,
            put_bytes=self._counts["put_bytes"],
            got_bytes=self._counts["got_bytes"],
            num_corrupted=self._counts["num_corrupted"],
            num_failures=self._counts["num_failures"],
        )

    def close(self) -> None:
        """Close all connections, those of calls under way too."""
        self._pool.disconnect()

    @property
    def _is_full(self) -> bool:
        return self._clock() < self._full_until_s

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Translate failures. No message of the package has a password."""
        try:
            yield
        except (redis.RedisError, OSError, EOFError) as error:
            self._count(num_failures=1)
            raise TierFailed(f"{self._shown}: {str(error) or type(error).__name__}") from error

    def _ask(self, *commands: tuple[object, ...]) -> list[Any]:
        """Send commands together; return the answers, errors of a single command among them."""
        pipeline: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute(raise_on_error=False))

    def _identify_once(self) -> None:
        if not self._store:
            self._identify()

    def _identify(self) -> None:
        """Learn which store this is, and name it if it has no name; another one than before was emptied."""
        ask = (("GET", STORE_KEY), ("DBSIZE",))
        store, num_keys = self._ask(*ask)
        if store is None:
            # A replica refuses: it has no name then, and counts as this node's own.
            _, store, num_keys = self._ask(("SET", STORE_KEY, uuid.uuid4().hex, "NX"), *ask)
        if isinstance(store, Exception):
            raise store
        found = store.decode(errors="replace") if store else ""
        with self._lock:
            before, self._store = self._store, found
            # Without our own key. Where the account may not ask, it is not known.
            self._num_keys = max(0, num_keys - 1) if isinstance(num_keys, int) else 0
        if before and before != found:
            self._known.forget_all()
            log.warning("kv_tier.emptied", tier=self._name, server=self._shown)

    def _are_here(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return of each key whether it is here; a value of another length is removed."""
        # Its length marks a value as used.
        asks = [("STRLEN", _name(key)) for key in keys]
        lengths = self._ask(*asks, *self._stays(keys))[: len(keys)]
        for key, length in zip(keys, lengths, strict=True):
            if isinstance(length, Exception) and "WRONGTYPE" not in str(length):
                raise length
            if length not in {0, self._entry_bytes}:
                self._remove(key)
        return [length == self._entry_bytes for length in lengths]

    def _stays(self, keys: Sequence[PageKey]) -> list[tuple[object, ...]]:
        """Return commands that let entries stay for another while. A replica refuses them."""
        return [("EXPIRE", _name(key), self._ttl_s) for key in keys] if self._ttl_s else []

    def _read(self, keys: Sequence[PageKey], pieces: list[memoryview]) -> None:
        """Append the leading entries to `pieces` as they come, up to one that is not here or not right."""
        first_of_none: PageKey | None = None
        is_missing = False
        with self._replies() as replies:
            replies.ask(keys[: self._num_ahead])
            num_asked = min(self._num_ahead, len(keys))
            for index, key in enumerate(keys):
                piece = self._memory.take()
                try:
                    length = replies.value_into(piece)
                    is_right = length == self._entry_bytes and is_entry_of(key, piece[:-2])
                    if not is_right:
                        for _ in range(index + 1, num_asked):
                            replies.value_into(piece)
                        first_of_none, is_missing = key, length is None
                        break
                    pieces.append(piece)
                finally:
                    if not pieces or pieces[-1] is not piece:
                        self._memory.give_back([piece])
                if num_asked < len(keys):
                    replies.ask(keys[num_asked : num_asked + 1])
                    num_asked += 1
        if pieces and self._ttl_s:
            self._ask(*self._stays(keys[: len(pieces)]))
        if first_of_none is not None:
            (self._miss if is_missing else self._remove)(first_of_none)

    @contextlib.contextmanager
    def _replies(self) -> Iterator["_Replies"]:
        """Give a connection for one `get`. It is closed when that fails: replies may be on their way."""
        connection = self._pool.get_connection()
        try:
            with _Replies(connection, self._timeout_s) as replies:
                yield replies
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        finally:
            self._pool.release(connection)

    def _write(self, entries: Sequence[tuple[PageKey, memoryview]]) -> int:
        """Write entries in order until the server takes no more; return how many it took."""
        pieces = [self._memory.take() for _ in range(min(self._num_ahead, len(entries)))]
        options = ("EX", self._ttl_s) if self._ttl_s else ()
        num_taken = 0
        try:
            for first in range(0, len(entries), self._num_ahead):
                some = entries[first : first + self._num_ahead]
                sets: list[tuple[object, ...]] = []
                for (key, page), piece in zip(some, pieces, strict=False):
                    piece[:STORE_HEADER_BYTES] = store_header(key, page)
                    copy_page(page, piece[STORE_HEADER_BYTES:-2])
                    sets.append(("SET", _name(key), piece[:-2], *options))
                answers = self._ask(*sets)
                num_taken += sum(map(self._was_taken, (key for key, _ in some), answers))
                if self._is_full:
                    break
        finally:
            self._memory.give_back(pieces)
        return num_taken

    def _was_taken(self, key: PageKey, answer: object) -> bool:
        if not isinstance(answer, Exception):
            self._known.met([key])
            return True
        reason = str(answer)
        if not (isinstance(answer, _REFUSALS) or "MISCONF" in reason or "NOREPLICAS" in reason):
            raise answer
        if not self._is_full:
            self._full_until_s = self._clock() + FULL_PAUSE_S
            log.warning("kv_tier.full", tier=self._name, server=self._shown, reason=reason)
        return False

    def _miss(self, key: PageKey) -> None:
        if self._known.missed(key):
            # Evicted, or all is gone: a server that was emptied keeps its connections.
            self._identify()

    def _remove(self, key: PageKey) -> None:
        """Remove an entry that is wrong; where the server does not let us, it stays, and is never lent."""
        self._count(num_corrupted=1)
        self._known.missed(key)
        self._ask(("DEL", _name(key)))

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


class _Replies:
    """The values of a pipeline of `GET`s, read from a connection of the package until a deadline.

    Every value that was asked for must be read before the connection is used for anything else.
    """

    def __init__(self, connection: Any, timeout_s: float) -> None:
        # The package has no public name for it; a connection that the pool gave out has it.
        self._connection = connection
        self._socket = cast(socket.socket, connection._sock)  # noqa: SLF001
        self._timeout_s, self._deadline_s = timeout_s, time.monotonic() + timeout_s
        self._file = cast(BufferedReader, self._socket.makefile("rb", buffering=_READ_AHEAD_BYTES))

    def __enter__(self) -> "_Replies":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with contextlib.suppress(OSError):  # closed meanwhile
            self._socket.settimeout(self._timeout_s)

    def ask(self, keys: Sequence[PageKey]) -> None:
        """Ask for the values of these keys."""
        self._set_timeout()
        commands = [("GET", _name(key)) for key in keys]
        self._connection.send_packed_command(self._connection.pack_commands(commands))

    def value_into(self, memory: memoryview) -> int | None:
        """Read the next value, and the two bytes behind it.

        Returns:
            Its length, if `memory` is as long as that and two bytes more; otherwise the value is dropped.
            None: there is no such key. -1: it is no string.
        """
        line = self._line()
        if line.startswith(b"-WRONGTYPE"):
            return -1
        if line[:1] != b"$" or not line[1:].lstrip(b"-").isdigit():
            raise redis.ResponseError(line[:200].decode(errors="replace"))
        if (num_bytes := int(line[1:])) < 0:
            return None
        left = num_bytes + 2
        while left:
            piece = memory[: min(left, memory.nbytes)]
            self._fill(piece)
            left -= piece.nbytes
        return num_bytes

    def _line(self) -> bytes:
        self._set_timeout()
        line = self._file.readline(_MAX_LINE_BYTES)
        if not line.endswith(b"\r\n"):
            raise EOFError("the server closed the connection, or speaks another protocol")
        return line[:-2]

    def _fill(self, memory: memoryview) -> None:
        filled = 0
        while filled < memory.nbytes:
            self._set_timeout()
            num_bytes = self._file.readinto1(memory[filled:])
            if not num_bytes:
                raise EOFError("the server closed the connection in the middle of a value")
            filled += num_bytes

    def _set_timeout(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no whole answer in time")
        self._socket.settimeout(left_s)


def _name(key: PageKey) -> str:
    return f"tandem:kv:1:{key.digest.hex()}"


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> RedisTier:
    """Return the tier; the server need not be there yet.

    Raises:
        ConfigInvalid: The URL is none, or has an unknown option.
    """
    return RedisTier(spec.name, parse_redis_url(spec.url), pages, space)
