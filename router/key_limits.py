"""What one API key may use: requests at once, requests and tokens a minute. Pure, given the time.

```toml
[default]                    # of keys that are not named below
requests_in_flight = 32
requests_per_minute = 600
tokens_per_minute = 200_000  # of prompts and answers together

[b5bb9d80]                   # the first 8 hex digits of a key's SHA-256
requests_in_flight = 256
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
LIMITS = "admission#what-a-key-may-use"  # of the documentation
_CLIENT = re.compile("[0-9a-f]{8}")


class KeyLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one key; 0 is none."""

    requests_in_flight: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def divided(self, num_workers: int) -> "KeyLimit":
        """Return the share of one of several edge workers, at least 1 of what is limited."""
        return KeyLimit(
            requests_in_flight=math.ceil(self.requests_in_flight / num_workers),
            requests_per_minute=math.ceil(self.requests_per_minute / num_workers),
            tokens_per_minute=math.ceil(self.tokens_per_minute / num_workers),
        )


def read_limits(path: str) -> dict[str, KeyLimit]:
    """Return the limits in a file by the names of keys. Raises `ConfigInvalid`."""
    flag = f"--key-limits {path}"
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        limits = msgspec.convert(data, dict[str, KeyLimit])
    except OSError as error:
        raise ConfigInvalid(f"{flag}: {error.strerror}", topic=LIMITS) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigInvalid(f"{flag}: {error}", topic=LIMITS) from error
    for name, limit in limits.items():
        if name != DEFAULT and not _CLIENT.fullmatch(name):
            raise ConfigInvalid(
                f"{flag}: [{name}] is no key: give [{DEFAULT}], or the first 8 digits of what "
                "`printf %s KEY | sha256sum` prints",
                topic=LIMITS,
            )
        if min(msgspec.structs.astuple(limit)) < 0:
            raise ConfigInvalid(
                f"{flag}: [{name}]: limits are at least 1, or 0 for none", topic=LIMITS
            )
    return limits


class _Bucket:
    """Fills with what a minute allows, and holds as much; answers may leave it in debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_s, self._most = per_minute / MINUTE_S, float(per_minute)
        self._level, self._at = self._most, now

    def missing_s(self, amount: float, now: float) -> float:
        """Return in how many seconds it holds `amount`; one larger than all waits until it is full."""
        self._level = min(self._most, self._level + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, min(amount, self._most) - self._level) / self._per_s

    def use(self, amount: float) -> None:
        self._level -= amount


class Usage:
    """What one key uses now."""

    def __init__(self, limit: KeyLimit, now: float) -> None:
        self.limit = limit
        self.num_in_flight = 0
        self._requests = (
            _Bucket(limit.requests_per_minute, now) if limit.requests_per_minute else None
        )
        self._tokens = _Bucket(limit.tokens_per_minute, now) if limit.tokens_per_minute else None

    def begin(self, num_tokens: int, now: float) -> None:
        """Count a request that begins. Raises `RateLimited`."""
        most = self.limit.requests_in_flight
        if most and self.num_in_flight >= most:
            raise RateLimited(f"this key has {self.num_in_flight} requests running, of {most}", 1)
        amounts = ((self._requests, 1, "requests"), (self._tokens, num_tokens, "tokens"))
        for bucket, amount, what in amounts:
            if bucket is not None and (missing_s := bucket.missing_s(amount, now)) > 0:
                sentence = f"this key has used the {what} of a minute: send it again later"
                raise RateLimited(sentence, math.ceil(missing_s))
        for bucket, amount, _ in amounts:
            if bucket is not None:
                bucket.use(amount)
        self.num_in_flight += 1

    def answered(self, num_tokens: int) -> None:
        """Count the tokens of an answer."""
        if self._tokens is not None:
            self._tokens.use(num_tokens)

    def end(self) -> None:
        """Count the end of a request that had begun."""
        self.num_in_flight -= 1


class KeyUsage:
    """What all keys use at one edge worker."""

    def __init__(self, limits: Mapping[str, KeyLimit]) -> None:
        self._limits = limits
        self._usage: dict[str, Usage] = {}

    def of(self, client: str, now: float) -> Usage | None:
        """Return what a key uses; None if nothing limits it."""
        limit = self._limits.get(client) or self._limits.get(DEFAULT)
        if not client or limit is None:
            return None
        if client not in self._usage:
            self._usage[client] = Usage(limit, now)
        return self._usage[client]
