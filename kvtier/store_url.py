"""Which store a URL names, and what is wanted of it. Opens nothing, and needs no store's package.

```
 redis://[user:password@]host[:port][/db]    valkey:// is the same
 rediss://…                                  over TLS; valkeys:// is the same
 unix://[user:password@]/path/of/socket?db=0
 mooncake://master-host[:50051]?segment=16GiB
```

Options after `?`: of a Redis server `ttl`, `password_file`, and for TLS `ca`, `cert`, `key`; of a Mooncake Store
`segment`, without which this node lends nothing, `host`, `metadata`, `protocol`, `devices`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tandem.wire.errors import ConfigInvalid

# As redis-py names them.
REDIS_SCHEMES: Mapping[str, str] = {
    "redis": "redis",
    "valkey": "redis",
    "rediss": "rediss",
    "valkeys": "rediss",
    "unix": "unix",
}
REDIS_PORT, MOONCAKE_PORT = 6379, 50051
_TLS_OPTIONS = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
_MOONCAKE_OPTIONS = {
    "host": "own_host",
    "metadata": "metadata",
    "protocol": "protocol",
    "devices": "devices",
}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One database of one server.

    Attributes:
        url: For redis-py; it may hold a password.
        options: Further arguments of a connection of redis-py.
        shown: For logs and people: without user and password.
        ttl_s: Entries that nobody asks for expire after this time; 0: as long as the server keeps them.
    """

    url: str = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    shown: str
    ttl_s: int


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


def parse_redis_url(url: str) -> RedisAddress:
    """Read a URL.

    Raises:
        ConfigInvalid: It names no server, or has an unknown option. The message shows no password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or REDIS_PORT
    except ValueError as error:
        raise ConfigInvalid(
            "the URL of a Redis tier has no valid host and port: give redis://host:6379/0; "
            "in a password, write @ : / ? # as %40 %3A %2F %3F %23"
        ) from error
    scheme = REDIS_SCHEMES.get(parts.scheme)
    if scheme is None:
        raise ConfigInvalid(
            f"{parts.scheme}:// is no store that Redis speaks: give one of "
            + ", ".join(f"{name}://" for name in REDIS_SCHEMES)
        )
    given = _redis_options(scheme, parts.query)
    if scheme == "unix":
        if not parts.path.startswith("/") or host:
            raise ConfigInvalid("give the socket's whole path: unix:///run/redis/redis.sock?db=0")
        db = _whole_number("the database", given.get("db", "0"))
        shown = f"unix://{unquote(parts.path)}?db={db}"
        query = f"?db={db}"
    else:
        if not host:
            raise ConfigInvalid("the URL of a Redis tier names no host: give redis://host:6379/0")
        db = _whole_number("the database", unquote(parts.path).strip("/") or "0")
        shown = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/{db}"
        query = ""
    options = {name: given[option] for option, name in _TLS_OPTIONS.items() if option in given}
    if "password_file" in given:
        options["password"] = _password_of(parts, given["password_file"])
    ttl_s = _whole_number("ttl", given.get("ttl", "0"))
    clean = f"{scheme}://{parts.netloc}{parts.path}{query}"
    return RedisAddress(clean, options, shown, ttl_s)


def parse_mooncake_url(url: str) -> MooncakeAddress:
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
        raise ConfigInvalid(f"{url}: give a master: mooncake://host:{MOONCAKE_PORT}?segment=16GiB")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    size = re.fullmatch(r"(\d+)(MiB|GiB)?", given.pop("segment", "0"))
    if size is None:
        raise ConfigInvalid(f"{url}: segment is a size such as 512MiB or 16GiB")
    if unknown := set(given) - set(_MOONCAKE_OPTIONS):
        raise ConfigInvalid(
            f"{url}: there is no option {min(unknown)!r}; there are segment, "
            + ", ".join(_MOONCAKE_OPTIONS)
        )
    if given.get("protocol", "tcp") not in {"tcp", "rdma"}:
        raise ConfigInvalid(f"{url}: protocol is tcp or rdma")
    segment_bytes = int(size[1]) << {None: 0, "MiB": 20, "GiB": 30}[size[2]]
    options = {_MOONCAKE_OPTIONS[option]: value for option, value in given.items()}
    return MooncakeAddress(host, port or MOONCAKE_PORT, segment_bytes, **options)


def _redis_options(scheme: str, query: str) -> dict[str, str]:
    known = {"ttl", "password_file"}
    known |= {"unix": {"db"}, "rediss": set(_TLS_OPTIONS)}.get(scheme, set())
    given = dict(parse_qsl(query, keep_blank_values=True))
    if "limit" in given:
        raise ConfigInvalid(
            "a Redis tier has no limit of its own, for many nodes write to it: set the server's "
            "`maxmemory`, with `maxmemory-policy allkeys-lru`"
        )
    if unknown := set(given) - known:
        raise ConfigInvalid(
            f"a Redis tier has no option {min(unknown)!r}; there are " + ", ".join(sorted(known))
        )
    return given


def _whole_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        # Not what was given: a password with a slash in it ends up here.
        raise ConfigInvalid(f"{name} of a Redis tier must be a whole number, such as 0")
    return int(text)


def _password_of(parts: SplitResult, file: str) -> str:
    if parts.password:
        raise ConfigInvalid(
            "give a Redis tier its password in the URL or in password_file, not both"
        )
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"password_file of a Redis tier cannot be read: {error}") from error
