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

# A call that takes longer was given up by the stack, unless the operator's limit is longer.
TIMEOUT_S = 2.0
# Requested ahead of what is read: enough that neither end waits for the other (4.7 GB/s on loopback, with 8 MiB
# half of that: what the server wrote is out of the caches when it is read), and all that a miss reads in vain.
AHEAD_BYTES = 4 << 20
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


_TLS_OPTIONS = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One database of one server; entries that nobody asks for go after `ttl_s`, or with 0 never."""

    options: Mapping[str, Any] = field(repr=False)
    shown: str
    ttl_s: int


def parse_url(url: str) -> RedisAddress:
    """Read a URL; raise `ConfigInvalid`, without its password, where it is wrong.

    See `tandem docs tiers` for its options.
    """
    try:
        parts = urlsplit(url)
        scheme = REDIS_SCHEMES[parts.scheme]
        plain = f"{scheme}://{parts.netloc}{parts.path}"
        where = redis.connection.parse_url(plain)  # type: ignore[no-untyped-call]
        port = parts.port or 6379
    except ValueError as error:
        raise ConfigInvalid(
            "the URL of a Redis tier has no valid host and port: give redis://host:6379/0; "
            "in a password, write @ : / ? # as %40 %3A %2F %3F %23"
        ) from error
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"ttl", "password_file"}
    known |= {"unix": {"db"}, "rediss": set(_TLS_OPTIONS)}.get(scheme, set())
    if unknown := set(given) - known:
        raise ConfigInvalid(
            f"a Redis tier has no option {min(unknown)!r}; there are {', '.join(sorted(known))}; "
            "its size is the server's `maxmemory`"
        )
    if scheme == "unix":
        if not parts.path.startswith("/") or parts.hostname:
            raise ConfigInvalid("give the socket's whole path: unix:///run/redis/redis.sock?db=0")
        db = given.get("db", "0")
        shown = f"unix://{parts.path}?db={db}"
    else:
        if not parts.hostname:
            raise ConfigInvalid("the URL of a Redis tier names no host: give redis://host:6379/0")
        db = parts.path.strip("/") or "0"
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        shown = f"{scheme}://{host}:{port}/{db}"
    options: dict[str, Any] = {**where, "db": _whole_number("the database", db)}
    options |= {name: given[option] for option, name in _TLS_OPTIONS.items() if option in given}
    if "password_file" in given:
        options["password"] = _password_of(given["password_file"], is_in_url=bool(parts.password))
    return RedisAddress(options, shown, _whole_number("ttl", given.get("ttl", "0")))


def _whole_number(name: str, text: str) -> int:
    if not re.fullmatch("[0-9]+", text):
        # Not what was given: a password with a slash in it ends up here.
        raise ConfigInvalid(
            f"{name} of a Redis tier must be a whole number, such as 0; in a password, write / as %2F"
        )
    return int(text)


def _password_of(file: str, *, is_in_url: bool) -> str:
    if is_in_url:
        raise ConfigInvalid(
            "give a Redis tier its password in the URL or in password_file, not both"
        )
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"password_file of a Redis tier cannot be read: {error}") from error


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
        self.name, self._timeout_s, self._clock = name, timeout_s, clock
        self._shown, self._ttl_s = address.shown, address.ttl_s or None
        self._pool = redis.ConnectionPool(
            socket_timeout=timeout_s,
            protocol=2,  # the one that `_Replies` reads
            retry=Retry(NoBackoff(), 0),  # the stack knows when to try again
            **address.options,
        )
        self._client = redis.Redis(connection_pool=self._pool)
        self._space_name = space.name
        self._entry_bytes = HEADER_BYTES + pages.page_bytes
        self._num_ahead = max(2, AHEAD_BYTES // self._entry_bytes)
        # The two bytes that end a value are read with it.
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
        """The blocks of pages that this node put or found here."""
        return self._known.journal

    def get(self, keys: Sequence[PageKey], deadline_s: float = NEVER_S) -> Loan:
        """Return the leading pages that are here, or as many of them as came in time."""
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
            self._memory.give_back(pieces)
            raise
        self._known.met(keys[: len(pieces)])
        return self._memory.lend(pieces, [piece[HEADER_BYTES:-2] for piece in pieces])

    def put(self, keys: Sequence[PageKey], pages: Sequence[memoryview]) -> int:
        """Write what is not here yet; return how much that was.

        A full server is no failure: it is read from as ever.
        """
        if self._is_full:
            return 0
        with self._answering():
            self._identify()
            here = self._are_here(keys)
            self._known.met(key for key, is_here in zip(keys, here, strict=True) if is_here)
            num_new = self._write(
                [(keys[i], pages[i]) for i, is_here in enumerate(here) if not is_here]
            )
        with self._lock:
            self._num_keys += num_new  # until the server is asked again
        return num_new

    def load(self) -> TierLoad:
        """Return what is in it, as far as the server told."""
        return TierLoad(
            name=self.name,
            store=self._store and f"{self._store}-{self._space_name}",
            state="full" if self._is_full else "up",
            num_pages=self._num_keys,
            num_bytes=self._num_keys * self._entry_bytes,
            num_corrupted=self._num_corrupted,
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
            raise TierFailed(f"{self._shown}: {str(error) or type(error).__name__}") from error

    def _ask(self, *commands: tuple[object, ...]) -> list[Any]:
        """Send commands together; return the answers, errors of a single command among them."""
        pipeline: Any = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(pipeline.execute(raise_on_error=False))

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
            log.warning("kv_tier.emptied", tier=self.name, server=self._shown)

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

    def _read(self, keys: Sequence[PageKey], pieces: list[memoryview], deadline_s: float) -> None:
        """Append the leading entries to `pieces` as they come, up to one that is not here or not right."""
        first_of_none: PageKey | None = None
        is_missing = False
        with self._replies(deadline_s) as replies:
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
    def _replies(self, deadline_s: float) -> Iterator["_Replies"]:
        """Give a connection for one `get`. It is closed when that fails: replies may be on their way."""
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
        """Write entries in order until the server takes no more; return how many it took."""
        pieces: list[memoryview] = []
        options = ("EX", self._ttl_s) if self._ttl_s else ()
        num_taken = 0
        try:
            pieces += (self._memory.take() for _ in entries[: self._num_ahead])
            for first in range(0, len(entries), self._num_ahead):
                some = entries[first : first + self._num_ahead]
                sets: list[tuple[object, ...]] = []
                for (key, page), piece in zip(some, pieces, strict=False):
                    piece[:HEADER_BYTES] = header_of(key, page)
                    copy_page(page, piece[HEADER_BYTES:-2])
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
            log.warning("kv_tier.full", tier=self.name, server=self._shown, reason=reason)
        return False

    def _miss(self, key: PageKey) -> None:
        if self._known.missed(key.digest):
            # Evicted, or all is gone: a server that was emptied keeps its connections.
            self._identify()

    def _remove(self, key: PageKey) -> None:
        """Remove an entry that is wrong; where the server does not let us, it stays, and is never lent."""
        with self._lock:
            self._num_corrupted += 1
        self._known.missed(key.digest)
        self._ask(("DEL", _name(key)))


class _Replies:
    """The values of a pipeline of `GET`s, read from a connection of the package until a deadline.

    Every value that was asked for must be read before the connection is used for anything else.
    """

    def __init__(self, connection: Any, deadline_s: float, timeout_s: float) -> None:
        # The package has no public name for it; a connection that the pool gave out has it.
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

    def ask(self, keys: Sequence[PageKey]) -> None:
        """Ask for the values of these keys."""
        self._set_timeout()
        commands = [("GET", _name(key)) for key in keys]
        self._connection.send_packed_command(self._connection.pack_commands(commands))

    def value_into(self, memory: memoryview) -> int | None:
        """Read the next value into `memory`, two bytes longer, or drop one of another length.

        Return its length; None: no such key; -1: no string.
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
    """Return the tier of a URL; the server need not be there yet."""
    return RedisTier(spec.name, parse_url(spec.url), pages, space)
