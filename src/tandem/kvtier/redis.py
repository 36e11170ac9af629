"""A tier in a Redis or Valkey server, shared by all nodes with the same URL.

```
 tandem:kv:1:DIGEST  ──▶  header (see `entry`) + page
 tandem:kv:store     ──▶  the store's identity
```

The server evicts by its own `maxmemory` and policy. A server that rejects writes (full, a replica, a failing disk) is
still used for reads. Corrupted values are removed.

The `redis` package does everything except reading pages: `_Replies` reads them straight into the memory that is lent.
The package's parser copies each value several times (0.5 GB/s per core instead of 3), and its timeout applies to each
read, so a server that sends byte by byte never exceeds it.
"""

import contextlib
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import override

from tandem.kvtier.entry import HEADER_BYTES, KnownPages, header_of, is_entry_of
from tandem.kvtier.memory import Loan, PageMemory, copy_page
from tandem.kvtier.spec import REDIS_SCHEMES, TierSpec
from tandem.kvtier.tier import NEVER_S, PoolPages, TierFailed
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.messages import TierLoad
from tandem.wire.prefixes import PageKey, PageSpace, PrefixJournal

log = get_logger("kvtier.redis")

# Default time limit of a call. With a shorter --kv-tier-timeout-ms, the stack discards answers after that time.
TIMEOUT_S = 2.0
# Bytes requested ahead of reading, so that neither end waits for the other: 4.7 GB/s on loopback. With 8 MiB the speed
# halves, because the data leaves the CPU's cache before it is read. After a miss, this much is transferred in vain.
AHEAD_BYTES = 4 << 20
# Pause of writing after the server rejected a write.
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


_TLS_OPTIONS = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One database of one server. Entries expire `ttl_s` after their last use; 0: never."""

    options: Mapping[str, Any] = field(repr=False)
    shown: str
    ttl_s: int


def parse_url(url: str) -> RedisAddress:
    """Parse a URL; raise `ConfigInvalid`, without the password, if it is invalid.

    See docs/tiers.md for its options.
    """
    try:
        parts = urlsplit(url)
        scheme = REDIS_SCHEMES[parts.scheme]
        plain = f"{scheme}://{parts.netloc}{parts.path}"
        where = redis.connection.parse_url(plain)  # type: ignore[no-untyped-call]
        port = parts.port or 6379
    except ValueError as error:
        raise ConfigInvalid(
            "the URL of a Redis tier has no valid host and port: use redis://host:6379/0; "
            "in a password, write @ : / ? # as %40 %3A %2F %3F %23"
        ) from error
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"ttl", "password_file"}
    known |= {"unix": {"db"}, "rediss": set(_TLS_OPTIONS)}.get(scheme, set())
    if unknown := set(query) - known:
        raise ConfigInvalid(
            f"a Redis tier has no option {min(unknown)!r}, only {', '.join(sorted(known))}; "
            "its size is the server's `maxmemory`"
        )
    if scheme == "unix":
        if not parts.path.startswith("/") or parts.hostname:
            raise ConfigInvalid(
                "the URL of a Redis tier has no absolute path: use unix:///run/redis/redis.sock?db=0"
            )
        db = query.get("db", "0")
        shown = f"unix://{parts.path}?db={db}"
    else:
        if not parts.hostname:
            raise ConfigInvalid("the URL of a Redis tier has no host: use redis://host:6379/0")
        db = parts.path.strip("/") or "0"
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        shown = f"{scheme}://{host}:{port}/{db}"
    options: dict[str, Any] = {**where, "db": _whole_number("the database", db)}
    options |= {name: query[option] for option, name in _TLS_OPTIONS.items() if option in query}
    if "password_file" in query:
        options["password"] = _password_of(query["password_file"], is_in_url=bool(parts.password))
    return RedisAddress(options, shown, _whole_number("ttl", query.get("ttl", "0")))


def _whole_number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        # The value is not quoted: a password that contains a slash ends up here.
        raise ConfigInvalid(
            f"{name} of a Redis tier must be a whole number, such as 0; in a password, write / as %2F"
        )
    return int(text)


def _password_of(file: str, *, is_in_url: bool) -> str:
    if is_in_url:
        raise ConfigInvalid(
            "a Redis tier has a password in the URL and a password_file: use one of them"
        )
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"password_file of a Redis tier cannot be read: {error}") from error


class RedisTier:
    """Pages in a shared server. Several threads may call it at once.

    Args:
        pages: The pool; it allocates the memory that pages are read into.
        space: Namespace of all keys; nodes with a different one never see these pages.
        timeout_s: Time limit of a whole `get`; in other calls, of each reply.
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
        self.name, self._timeout_s, self._clock = name, timeout_s, clock
        self._shown, self._ttl_s = address.shown, address.ttl_s or None
        self._pool = redis.ConnectionPool(
            socket_timeout=timeout_s,
            protocol=2,  # the version that `_Replies` parses
            retry=Retry(NoBackoff(), 0),  # the stack decides when to retry
            **address.options,
        )
        self._client = redis.Redis(connection_pool=self._pool)
        self._space_name = space.name
        self._entry_bytes = HEADER_BYTES + pages.page_bytes
        self._num_ahead = max(2, AHEAD_BYTES // self._entry_bytes)
        # The CRLF after a value is read with it.
        self._memory = PageMemory(pages.host_memory, self._entry_bytes + 2)
        self._known = KnownPages()
        self._lock = threading.Lock()
        self._store, self._num_keys, self._num_corrupted = "", 0, 0
        self._full_until_s = 0.0

    @override
    def __repr__(self) -> str:
        return f"<RedisTier {self.name} {self._shown} {self.load().state}>"

    @property
    def journal(self) -> PrefixJournal:
        """Blocks whose pages this node has stored or found here."""
        return self._known.journal

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Return the leading pages that are stored here and arrive in time."""
        pieces: list[memoryview] = []
        try:
            with self._answering():
                if not self._store:
                    self._identify()
                self._read(keys, pieces, min(deadline_s, time.monotonic() + self._timeout_s))
        except TierFailed:
            if not pieces:
                raise
        except BaseException:
            self._memory.release(pieces)
            raise
        self._known.record(keys[: len(pieces)])
        return self._memory.lend(pieces, [piece[HEADER_BYTES:-2] for piece in pieces])

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write the pages that are missing; return how many.

        A full server is not a failure: it is still used for reads.
        """
        if self._is_full:
            return 0
        with self._answering():
            self._identify()
            stored = self._are_stored(keys)
            self._known.record(key for key, is_here in zip(keys, stored, strict=True) if is_here)
            num_new = self._write(
                [(keys[i], pages[i]) for i, is_here in enumerate(stored) if not is_here]
            )
        with self._lock:
            self._num_keys += num_new  # until the next DBSIZE
        return num_new

    def load(self) -> TierLoad:
        """Return the tier's gauges, as the server last reported them."""
        return TierLoad(
            name=self.name,
            store=self._store and f"{self._store}-{self._space_name}",
            state="full" if self._is_full else "up",
            num_pages=self._num_keys,
            num_bytes=self._num_keys * self._entry_bytes,
            num_corrupted=self._num_corrupted,
        )

    def close(self) -> None:
        """Close all connections, including those in use."""
        self._pool.disconnect()

    @property
    def _is_full(self) -> bool:
        return self._clock() < self._full_until_s

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn the package's errors into `TierFailed`. None of its messages contains a password."""
        try:
            yield
        except (redis.RedisError, OSError, EOFError) as error:
            raise TierFailed(f"{self._shown}: {str(error) or type(error).__name__}") from error

    def _execute(self, *commands: tuple[object, ...]) -> list[Any]:
        """Run commands in one pipeline; return the replies, with errors of single commands as values."""
        pipeline: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute(raise_on_error=False))

    def _identify(self) -> None:
        """Read the store's identity, or create it. A changed identity means that the store was emptied."""
        query = (("GET", STORE_KEY), ("DBSIZE",))
        store, num_keys = self._execute(*query)
        if store is None:
            # A replica rejects the write: the store then has no identity and counts as private to this node.
            _, store, num_keys = self._execute(("SET", STORE_KEY, uuid.uuid4().hex, "NX"), *query)
        if isinstance(store, Exception):
            raise store
        found = store.decode(errors="replace") if store else ""
        with self._lock:
            before, self._store = self._store, found
            # Do not count the identity's key. 0 if the account may not run DBSIZE.
            self._num_keys = max(0, num_keys - 1) if isinstance(num_keys, int) else 0
        if before and before != found:
            self._known.forget_all()
            log.warning("kv_tier.emptied", tier=self.name, server=self._shown)

    def _are_stored(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return for each key whether its page is stored. Values of the wrong length are removed."""
        # STRLEN also marks a value as used.
        commands = [("STRLEN", _name(key)) for key in keys]
        lengths = self._execute(*commands, *self._renewals(keys))[: len(keys)]
        for key, length in zip(keys, lengths, strict=True):
            if isinstance(length, Exception) and "WRONGTYPE" not in str(length):
                raise length
            if length not in {0, self._entry_bytes}:
                self._remove(key)
        return [length == self._entry_bytes for length in lengths]

    def _renewals(self, keys: Sequence[PageKey]) -> list[tuple[object, ...]]:
        """Return commands that renew the entries' expiry. A replica rejects them."""
        return [("EXPIRE", _name(key), self._ttl_s) for key in keys] if self._ttl_s else []

    def _read(self, keys: Sequence[PageKey], pieces: list[memoryview], deadline_s: float) -> None:
        """Append the leading entries to `pieces` as they arrive, up to the first missing or corrupted one."""
        first_absent: PageKey | None = None
        is_missing = False
        with self._replies(deadline_s) as replies:
            replies.request(keys[: self._num_ahead])
            num_requested = min(self._num_ahead, len(keys))
            for index, key in enumerate(keys):
                piece = self._memory.take()
                try:
                    length = replies.value_into(piece)
                    is_valid = length == self._entry_bytes and is_entry_of(key, piece[:-2])
                    if not is_valid:
                        for _ in range(index + 1, num_requested):
                            replies.value_into(piece)
                        first_absent, is_missing = key, length is None
                        break
                    pieces.append(piece)
                finally:
                    if not pieces or pieces[-1] is not piece:
                        self._memory.release([piece])
                if num_requested < len(keys):
                    replies.request(keys[num_requested : num_requested + 1])
                    num_requested += 1
        if pieces and self._ttl_s:
            self._execute(*self._renewals(keys[: len(pieces)]))
        if first_absent is not None:
            (self._miss if is_missing else self._remove)(first_absent)

    @contextlib.contextmanager
    def _replies(self, deadline_s: float) -> Iterator["_Replies"]:
        """Lend a connection to one `get`. After an error it is closed, because replies may still arrive."""
        connection = self._pool.get_connection()
        try:
            with _Replies(connection, deadline_s, self._timeout_s) as replies:
                yield replies
        except BaseException:
            connection.disconnect()  # type: ignore[no-untyped-call]
            raise
        finally:
            self._pool.release(connection)

    def _write(self, entries: Sequence[tuple[PageKey, memoryview]]) -> int:
        """Write entries in order until the server rejects one; return how many it accepted."""
        pieces: list[memoryview] = []
        options = ("EX", self._ttl_s) if self._ttl_s else ()
        num_accepted = 0
        try:
            pieces += (self._memory.take() for _ in entries[: self._num_ahead])
            for first in range(0, len(entries), self._num_ahead):
                some = entries[first : first + self._num_ahead]
                sets: list[tuple[object, ...]] = []
                for (key, page), piece in zip(some, pieces, strict=False):
                    piece[:HEADER_BYTES] = header_of(key, page)
                    copy_page(page, piece[HEADER_BYTES:-2])
                    sets.append(("SET", _name(key), piece[:-2], *options))
                answers = self._execute(*sets)
                num_accepted += sum(map(self._is_accepted, (key for key, _ in some), answers))
                if self._is_full:
                    break
        finally:
            self._memory.release(pieces)
        return num_accepted

    def _is_accepted(self, key: PageKey, answer: object) -> bool:
        if not isinstance(answer, Exception):
            self._known.record([key])
            return True
        reason = str(answer)
        if not (isinstance(answer, _REFUSALS) or "MISCONF" in reason or "NOREPLICAS" in reason):
            raise answer
        if not self._is_full:
            self._full_until_s = self._clock() + FULL_PAUSE_S
            log.warning("kv_tier.full", tier=self.name, server=self._shown, reason=reason)
        return False

    def _miss(self, key: PageKey) -> None:
        if self._known.forget(key.digest):
            # Either this page was evicted, or the server was emptied, which does not close connections.
            self._identify()

    def _remove(self, key: PageKey) -> None:
        """Remove a corrupted entry. If the server rejects this, the entry stays, and later gets skip it again."""
        with self._lock:
            self._num_corrupted += 1
        self._known.forget(key.digest)
        self._execute(("DEL", _name(key)))


class _Replies:
    """Reads the values of pipelined `GET`s from a connection of the package, until a deadline.

    Every requested value must be read before the connection is used for anything else.
    """

    def __init__(self, connection: Any, deadline_s: float, timeout_s: float) -> None:
        # The package has no public name for the socket; a pooled connection always has one.
        self._connection = connection
        self._socket = cast(socket.socket, connection._sock)  # noqa: SLF001
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._file = cast(BufferedReader, self._socket.makefile("rb", buffering=_READ_AHEAD_BYTES))

    def __enter__(self) -> "_Replies":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        with contextlib.suppress(OSError):  # closed meanwhile
            self._socket.settimeout(self._timeout_s)

    def request(self, keys: Sequence[PageKey]) -> None:
        """Request the values of these keys."""
        self._set_timeout()
        commands = [("GET", _name(key)) for key in keys]
        self._connection.send_packed_command(self._connection.pack_commands(commands))

    def value_into(self, memory: memoryview) -> int | None:
        """Read the next value and its CRLF into `memory`; a value that is too long is discarded.

        Return the value's length in bytes; None: no such key; -1: not a string.
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
            raise EOFError("the server closed the connection or uses a different protocol")
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
            raise TimeoutError("the reply did not arrive in time")
        self._socket.settimeout(left_s)


def _name(key: PageKey) -> str:
    return f"tandem:kv:1:{key.digest.hex()}"


def open_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> RedisTier:
    """Open the tier of a URL. The server may still be down."""
    return RedisTier(spec.name, parse_url(spec.url), pages, space)
