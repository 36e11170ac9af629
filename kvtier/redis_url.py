"""Where a Redis or Valkey server is and what is kept there, read from a URL. Opens nothing.

```
 redis://[user:password@]host[:port][/db]    valkey:// is the same
 rediss://…                                  over TLS; valkeys:// is the same
 unix://[user:password@]/path/of/socket?db=0
```

with, after `?`: `ttl`, `password_file`, and for TLS `ca`, `cert`, `key`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from tandem.wire.errors import ConfigInvalid

Way = Literal["tcp", "tls", "unix"]
SCHEMES: Mapping[str, Way] = {
    "redis": "tcp",
    "valkey": "tcp",
    "rediss": "tls",
    "valkeys": "tls",
    "unix": "unix",
}
DEFAULT_PORT = 6379
_OPTIONS: Mapping[Way, frozenset[str]] = {
    "tcp": frozenset({"ttl", "password_file"}),
    "tls": frozenset({"ttl", "password_file", "ca", "cert", "key"}),
    "unix": frozenset({"ttl", "password_file", "db"}),
}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One database of one server.

    Attributes:
        host, port: Of `tcp` and `tls`.
        path: Of the socket of `unix`.
        ttl_s: How long an entry stays that nobody asks for; 0: as long as the server keeps it.
        ca, cert, key: Files of `tls`: whom to trust instead of the system's authorities, and who we are.
    """

    way: Way
    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ttl_s: int = 0
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def shown(self) -> str:
        """What logs and people are shown: all but who logs in, and how."""
        if self.way == "unix":
            return f"unix://{self.path}?db={self.db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.way == 'tls' else 'redis'}://{host}:{self.port}/{self.db}"


def parse_redis_url(url: str) -> RedisAddress:
    """Read a URL.

    Raises:
        ConfigInvalid: It names no server, or asks for what there is not. No word of it tells a password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigInvalid(
            "the URL of a Redis tier has no valid host and port: give redis://host:6379/0; "
            "in a password, write @ : / ? # as %40 %3A %2F %3F %23"
        ) from error
    way = SCHEMES.get(parts.scheme)
    if way is None:
        raise ConfigInvalid(
            f"{parts.scheme}:// is no store that Redis speaks: give one of "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
        )
    options = _options(way, parts.query)
    path = unquote(parts.path)
    if way == "unix":
        if not path.startswith("/") or host:
            raise ConfigInvalid("give the socket's whole path: unix:///run/redis/redis.sock?db=0")
        db = options.get("db", "0")
    else:
        if not host:
            raise ConfigInvalid("the URL of a Redis tier names no host: give redis://host:6379/0")
        db, path = path.strip("/") or "0", ""
    return RedisAddress(
        way,
        host,
        DEFAULT_PORT if port is None else port,
        path,
        _whole_number("the database", db),
        unquote(parts.username) if parts.username else None,
        _password(parts.password, options.get("password_file")),
        _whole_number("ttl", options.get("ttl", "0")),
        options.get("ca"),
        options.get("cert"),
        options.get("key"),
    )


def _options(way: Way, query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name == "limit":
            raise ConfigInvalid(
                "a Redis tier has no limit of its own, for many nodes write to it: set the server's "
                "`maxmemory`, with `maxmemory-policy allkeys-lru`"
            )
        if name not in _OPTIONS[way]:
            raise ConfigInvalid(
                f"a Redis tier has no option {name!r}; there are "
                + ", ".join(sorted(_OPTIONS[way]))
            )
    return options


def _whole_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        # Not what was given: a password with a slash in it ends up here.
        raise ConfigInvalid(f"{name} of a Redis tier must be a whole number, such as 0")
    return int(text)


def _password(given: str | None, file: str | None) -> str | None:
    if file is None:
        return unquote(given) if given else None
    if given:
        raise ConfigInvalid(
            "give a Redis tier its password in the URL or in password_file, not both"
        )
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"password_file of a Redis tier cannot be read: {error}") from error
