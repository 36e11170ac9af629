"""What `--kv-tier` says, read: which tiers stand behind the prefix cache, and how large they may be.

```
 host:8GiB                                          memory of this node
 disk:/path:200GiB                                  a directory, of this node or shared by many
 redis://[user:password@]host:port/db               Redis or Valkey; also rediss://, valkey://, unix://
 mooncake://host:port                               a Mooncake Store, by its master
```
"""

import re
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import cast

import msgspec
from tandem.wire.prefixes import PageSpace
from typing_extensions import override

from tandem.kvtier.store_url import REDIS_SCHEMES, parse_mooncake_url, parse_redis_url
from tandem.kvtier.tier import PoolPages, Tier
from tandem.wire.errors import ConfigInvalid

_EXAMPLES = (
    "give host:SIZE, disk:PATH:SIZE or the URL of a store, "
    "such as host:8GiB, disk:/var/cache/tandem:200GiB or redis://127.0.0.1:6379/0"
)
_UNITS = {
    "": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tier, as asked for.

    Attributes:
        kind: `host`, `disk` or a store's, such as `redis`: the module of this package that has it.
        name: Unique on the node: the kind, with a number behind it from the second on.
        limit_bytes: How much it may hold, of all ranks of a node together; 0: the store's own limit.
        path: The directory of `disk`.
        url: Of a store, as given; it may hold a password, so show `text` instead.
        shown: The same without one.
    """

    kind: str
    name: str
    limit_bytes: int = 0
    path: str = ""
    url: str = ""
    shown: str = ""

    @property
    def text(self) -> str:
        """What was given, fit for a log: without a password."""
        if self.kind == "host":
            return f"host:{self.limit_bytes}"
        if self.kind == "disk":
            return f"disk:{self.path}:{self.limit_bytes}"
        return self.shown

    @override
    def __repr__(self) -> str:
        return f"<TierSpec {self.name} {self.text}>"


def parse_tier(text: str) -> TierSpec:
    """Read one `--kv-tier`.

    Raises:
        ConfigInvalid: It is none; the sentence says what to give.
    """
    kind, _, rest = text.partition(":")
    if kind == "host":
        return TierSpec(kind="host", name="host", limit_bytes=_size(text, rest))
    if kind == "disk":
        path, _, size = rest.rpartition(":")
        if not path:
            raise ConfigInvalid(f"--kv-tier {text}: give a directory and a size: disk:PATH:SIZE")
        return TierSpec(kind="disk", name="disk", limit_bytes=_size(text, size), path=path)
    if rest.startswith("//") and (kind == "mooncake" or kind in REDIS_SCHEMES):
        return _store(kind, text)
    raise ConfigInvalid(f"--kv-tier {text}: there is no such tier; {_EXAMPLES}")


def parse_tiers(texts: Sequence[str]) -> list[TierSpec]:
    """Read all of them, fastest first, each with a name of its own.

    Raises:
        ConfigInvalid: One is none, or stands there twice.
    """
    specs: list[TierSpec] = []
    count = Counter[str]()
    for text in texts:
        spec = parse_tier(text)
        count[spec.kind] += 1
        if number := count[spec.kind] - 1:
            spec = msgspec.structs.replace(spec, name=f"{spec.kind}{number + 1}")
        if any(spec.path == other.path and spec.url == other.url for other in specs):
            raise ConfigInvalid(f"--kv-tier {spec.text}: it is there already; give each tier once")
        specs.append(spec)
    return specs


def make_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> Tier:
    """Return the tier, ready to be asked; a store need not be there yet.

    Args:
        pages: Of the pool that the tier stands behind.
        space: What all its keys have in common.

    Raises:
        ConfigInvalid: It cannot be had so: its package is missing, or its directory, or the limit is too small.
    """
    try:
        open_tier = import_module(f"tandem.kvtier.{spec.kind}").open_tier
        return cast(Tier, open_tier(spec, pages, space))
    except ImportError as error:
        raise ConfigInvalid(
            f"--kv-tier {spec.text}: {error}; pip install 'tandem-serve[{spec.kind}]'"
        ) from error


def _store(scheme: str, url: str) -> TierSpec:
    # The kind is the name of its module here, too.
    kind = "mooncake" if scheme == "mooncake" else "redis"
    try:
        if kind == "redis":
            return TierSpec(kind=kind, name=kind, url=url, shown=parse_redis_url(url).shown)
        parse_mooncake_url(url)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"--kv-tier {scheme}://: {error.message}") from error
    return TierSpec(kind=kind, name=kind, url=url, shown=url)


def _size(text: str, size: str) -> int:
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", size.strip().lower())
    unit = _UNITS.get(number[2]) if number else None
    if number is None or unit is None or not (limit := int(float(number[1]) * unit)):
        raise ConfigInvalid(
            f"--kv-tier {text}: {size or 'nothing'!r} is no size; give one such as 512MiB, 8GiB or 1TiB"
        )
    return limit
