"""Limits of an API key: requests in flight, requests per minute, tokens per minute, and priority.

The limits apply to all edge workers of a router together. They share each key's usage in a memory-mapped file. One
lock makes the check of a limit and the count of the request a single step. No class reads a clock: the caller passes the time of a clock
that all workers share. The file of limits:

```toml
[default]                    # keys without a section of their own
requests_in_flight = 32
requests_per_minute = 600
tokens_per_minute = 200_000  # prompt and output tokens together

[b5bb9d80]                   # first 8 hex digits of the key's SHA-256
requests_in_flight = 256
max_priority = 10            # higher priorities of its requests are lowered to this
```
"""

import contextlib
import fcntl
import math
import mmap
import os
import re
import tomllib
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeAlias

import msgspec

from tandem.wire.errors import ConfigInvalid, RateLimited

MINUTE_S = 60.0
# Tolerance of waits: far above the rounding errors of a year, far below a noticeable wait.
ROUNDING_S = 1e-6
# Cells of a key: one for each of the two rates, then the requests in flight of each edge worker.
RATE_CELLS, CELL_BYTES = 2, 8
Cells: TypeAlias = "memoryview[float]"
DEFAULT = "default"
DOCUMENTATION = "docs/admission.md#what-a-key-may-use"
_FILE, _LOCK_FILE = "key-", "key_limits.lock"
_CLIENT = re.compile("[0-9a-f]{8}")


class KeyLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one key. 0: unlimited, except for `max_priority`, which is a priority."""

    requests_in_flight: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_priority: int = 0


def read_limits(path: str) -> dict[str, KeyLimit]:
    """Read a file of limits; return them by key name. Raises `ConfigInvalid`."""
    flag = f"--key-limits {path}"
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        limits = msgspec.convert(data, dict[str, KeyLimit])
    except OSError as error:
        raise ConfigInvalid(f"{flag}: {error.strerror}", topic=DOCUMENTATION) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigInvalid(f"{flag}: {error}", topic=DOCUMENTATION) from error
    for name, limit in limits.items():
        if name != DEFAULT and not _CLIENT.fullmatch(name):
            raise ConfigInvalid(
                f"{flag}: [{name}] does not name a key: use [{DEFAULT}], or the first 8 digits of the "
                "output of `printf %s KEY | sha256sum`",
                topic=DOCUMENTATION,
            )
        if min(msgspec.structs.astuple(limit)) < 0:
            raise ConfigInvalid(
                f"{flag}: [{name}] has a negative limit: use at least 1, or 0 for no limit",
                topic=DOCUMENTATION,
            )
    return limits


class _Lock:
    """An exclusive lock on a file, for several processes. The kernel releases it when the holder exits.

    It is held for a few microseconds. If its holder is suspended then, the other processes wait until it resumes.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._fd)

    def __enter__(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_exception: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


class _Minute:
    """A token bucket that holds at most one minute's allowance, counted in seconds. An answer may overdraw it.

    Args:
        full_at_s: One cell: the time at which the bucket is full again.
    """

    def __init__(self, full_at_s: Cells) -> None:
        self._full_at_s = full_at_s

    def wait_s(self, amount_s: float, now: float) -> float:
        """Return the seconds until the bucket holds `amount_s`, or is full if that exceeds its capacity."""
        missing_s = max(0.0, self._full_at_s[0] - now)
        return max(0.0, min(amount_s, MINUTE_S) + missing_s - MINUTE_S - ROUNDING_S)

    def use(self, amount_s: float, now: float) -> None:
        self._full_at_s[0] = max(self._full_at_s[0], now) + amount_s


class KeyState:
    """Current usage of one key at all edge workers of a router.

    Args:
        cells: Shared by the workers: `RATE_CELLS` numbers, then the requests in flight of each worker.
        index: Index of this worker. Each worker writes only its own cell of requests in flight.
        lock: Held while the cells are checked and changed.

    Attributes:
        limit: The limits that apply now.
    """

    def __init__(
        self, limit: KeyLimit, cells: Cells, index: int, lock: AbstractContextManager[None]
    ) -> None:
        self.limit = limit
        self._requests, self._tokens = _Minute(cells[0:1]), _Minute(cells[1:2])
        self._in_flight, self._index, self._lock = cells[RATE_CELLS:], index, lock

    @property
    def num_in_flight(self) -> int:
        """Requests in flight."""
        return int(sum(self._in_flight))

    def check(self, num_tokens: int, now: float) -> None:
        """Raise `RateLimited` if a request with this many tokens, or more, may not start."""
        with self._lock:
            self._check(num_tokens, now)

    def _check(self, num_tokens: int, now: float) -> None:
        limit = self.limit.requests_in_flight
        if limit and self.num_in_flight >= limit:
            raise RateLimited(
                f"this key has {self.num_in_flight} requests in flight; its limit is {limit}", 1
            )
        for bucket, amount_s, unit in self._uses(num_tokens):
            if amount_s and (wait_s := bucket.wait_s(amount_s, now)) > 0:
                message = f"this key has used its {unit} per minute: send the request again later"
                raise RateLimited(message, math.ceil(wait_s))

    def begin(self, num_tokens: int, now: float) -> None:
        """Count the start of a request. Raises `RateLimited`."""
        with self._lock:
            self._check(num_tokens, now)
            for bucket, amount_s, _ in self._uses(num_tokens):
                bucket.use(amount_s, now)
            self._in_flight[self._index] += 1

    def _uses(self, num_tokens: int) -> Iterable[tuple[_Minute, float, str]]:
        """Return what a request takes from each bucket, in seconds of its allowance, with the bucket's unit."""
        return (
            (self._requests, _allowance_s(1, self.limit.requests_per_minute), "requests"),
            (self._tokens, _allowance_s(num_tokens, self.limit.tokens_per_minute), "tokens"),
        )

    def count_output(self, num_tokens: int, now: float) -> None:
        """Count the tokens of an answer."""
        with self._lock:
            self._tokens.use(_allowance_s(num_tokens, self.limit.tokens_per_minute), now)

    def finish(self) -> None:
        """Count the end of a request counted by `begin`. No lock is needed, because only this worker writes its cell."""
        self._in_flight[self._index] -= 1


def _allowance_s(amount: int, per_minute: int) -> float:
    """Return the seconds in which this amount is allowed; 0 without a limit."""
    return amount * MINUTE_S / per_minute if per_minute else 0.0


class KeyUsage:
    """The limits of all keys, and their usage.

    Args:
        directory: Directory that the edge workers share; empty for a single worker.
        index: Index of this worker.

    Attributes:
        limits: Limits by the name of a key.
    """

    def __init__(
        self,
        limits: Mapping[str, KeyLimit],
        directory: str = "",
        index: int = 0,
        num_workers: int = 1,
    ) -> None:
        self.limits = limits
        self._directory, self._index, self._num_workers = directory, index, num_workers
        self._usage: dict[str, KeyState] = {}
        self._lock = _Lock(Path(directory, _LOCK_FILE)) if directory else contextlib.nullcontext()

    def load(self, path: str) -> None:
        """Apply the limits of a file from now on; usage stays. Raises `ConfigInvalid`."""
        self.limits = read_limits(path)

    def limit_of(self, client: str) -> KeyLimit | None:
        """Return the limits of a key by its name, or None if it has none."""
        return self.limits.get(client) or self.limits.get(DEFAULT)

    def max_priority(self, client: str) -> int:
        """Return the highest priority of a key's requests."""
        limit = self.limit_of(client)
        return 0 if limit is None else limit.max_priority

    def of(self, client: str) -> KeyState | None:
        """Return the usage of a key; None if the key has no limits."""
        limit = self.limit_of(client)
        if not client or limit is None:
            return None
        if client not in self._usage:
            self._usage[client] = KeyState(limit, self._cells(client), self._index, self._lock)
        state = self._usage[client]
        state.limit = limit
        return state

    def _cells(self, client: str) -> Cells:
        size_bytes = CELL_BYTES * (RATE_CELLS + self._num_workers)
        if not self._directory:
            return memoryview(bytearray(size_bytes)).cast("d")
        with open(Path(self._directory, _FILE + client), "a+b") as file:
            file.truncate(size_bytes)  # the first worker fills it with zeros
            return memoryview(mmap.mmap(file.fileno(), size_bytes)).cast("d")


def release_requests(directory: str, index: int) -> None:
    """Reset the number of requests in flight of an edge worker that has exited."""
    for path in Path(directory).glob(_FILE + "*"):
        with path.open("r+b") as file:
            file.seek(CELL_BYTES * (RATE_CELLS + index))
            file.write(bytes(CELL_BYTES))
