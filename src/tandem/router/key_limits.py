"""Limits of an API key: requests in flight, requests per minute, tokens per minute, and priority.

The classes do no I/O and read no clock: the caller passes the time. The file of limits:

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

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tandem.wire.errors import ConfigInvalid, RateLimited

MINUTE_S = 60.0
DEFAULT = "default"
DOCUMENTATION = "docs/admission.md#what-a-key-may-use"
_CLIENT = re.compile("[0-9a-f]{8}")


class KeyLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one key. 0: unlimited, except for `max_priority`, which is a priority."""

    requests_in_flight: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_priority: int = 0

    def divided(self, num_workers: int) -> "KeyLimit":
        """Return the share of one of several edge workers, rounded up: at least 1 of each limit that is set."""
        return msgspec.structs.replace(
            self,
            requests_in_flight=math.ceil(self.requests_in_flight / num_workers),
            requests_per_minute=math.ceil(self.requests_per_minute / num_workers),
            tokens_per_minute=math.ceil(self.tokens_per_minute / num_workers),
        )


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


class _Bucket:
    """A token bucket with a capacity of one minute's allowance. The tokens of an answer may make its level negative."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_s, self._capacity = per_minute / MINUTE_S, float(per_minute)
        self._level, self._updated_s = self._capacity, now

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until the bucket holds `amount`, or is full if `amount` exceeds its capacity."""
        self._level = min(self._capacity, self._level + (now - self._updated_s) * self._per_s)
        self._updated_s = now
        return max(0.0, min(amount, self._capacity) - self._level) / self._per_s

    def use(self, amount: float) -> None:
        self._level -= amount


class KeyState:
    """Current usage of one key."""

    def __init__(self, limit: KeyLimit, now: float) -> None:
        self.limit = limit
        self.num_in_flight = 0
        self._requests = (
            _Bucket(limit.requests_per_minute, now) if limit.requests_per_minute else None
        )
        self._tokens = _Bucket(limit.tokens_per_minute, now) if limit.tokens_per_minute else None

    def begin(self, num_tokens: int, now: float) -> None:
        """Count the start of a request. Raises `RateLimited`."""
        limit = self.limit.requests_in_flight
        if limit and self.num_in_flight >= limit:
            raise RateLimited(
                f"this key has {self.num_in_flight} requests in flight; its limit is {limit}", 1
            )
        amounts = ((self._requests, 1, "requests"), (self._tokens, num_tokens, "tokens"))
        for bucket, amount, unit in amounts:
            if bucket is not None and (wait_s := bucket.wait_s(amount, now)) > 0:
                message = f"this key has used its {unit} per minute: send the request again later"
                raise RateLimited(message, math.ceil(wait_s))
        for bucket, amount, _ in amounts:
            if bucket is not None:
                bucket.use(amount)
        self.num_in_flight += 1

    def count_output(self, num_tokens: int) -> None:
        """Count the tokens of an answer."""
        if self._tokens is not None:
            self._tokens.use(num_tokens)

    def finish(self) -> None:
        """Count the end of a request counted by `begin`."""
        self.num_in_flight -= 1


def limit_of(limits: Mapping[str, KeyLimit], client: str) -> KeyLimit | None:
    """Return the limits of a key by its name, or None if it has none."""
    return limits.get(client) or limits.get(DEFAULT)


def max_priority(limits: Mapping[str, KeyLimit], client: str) -> int:
    """Return the highest priority of a key's requests."""
    limit = limit_of(limits, client)
    return 0 if limit is None else limit.max_priority


class KeyUsage:
    """Usage of all keys at one edge worker."""

    def __init__(self, limits: Mapping[str, KeyLimit]) -> None:
        self._limits = limits
        self._usage: dict[str, KeyState] = {}

    def of(self, client: str, now: float) -> KeyState | None:
        """Return the usage of a key; None if the key has no limits."""
        limit = limit_of(self._limits, client)
        if not client or limit is None:
            return None
        if client not in self._usage:
            self._usage[client] = KeyState(limit, now)
        return self._usage[client]
