"""Parses `--kv-tier`: the tiers behind the prefix cache and their size limits.

```
 host:8GiB                                          memory of this node
 disk:/path:200GiB                                  a directory, of this node or shared by many
 redis://[user:password@]host:port/db               Redis or Valkey; also rediss://, valkey://, unix://
 SCHEME://…                                         a tier from an installed package, found by its entry point
```
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import cast

import msgspec
from typing_extensions import override

from tandem.kvtier.tier import PoolPages, Tier
from tandem.wire.errors import ConfigInvalid
from tandem.wire.prefixes import PageSpace

# Modules with `parse_url(url)`, which raises `ConfigInvalid`, and `open_tier(spec, pages, space)`.
GROUP = "tandem.kv_tiers"
# URL schemes and the names of redis-py for them.
REDIS_SCHEMES: Mapping[str, str] = {
    "redis": "redis",
    "valkey": "redis",
    "rediss": "rediss",
    "valkeys": "rediss",
    "unix": "unix",
}
_EXAMPLES = (
    "use host:SIZE, disk:PATH:SIZE or the URL of a store, "
    "such as host:8GiB, disk:/var/cache/tandem:200GiB or redis://127.0.0.1:6379/0"
)
_UNITS = {"": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("ib", 1024), ("b", 1000))
    for power, prefix in enumerate("kmgt", 1)
}


class TierSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One `--kv-tier`.

    Attributes:
        kind: `host`, `disk`, `redis`, or the scheme of an installed tier's URLs.
        name: Unique on the node: the kind, such as `host`; the second tier of a kind is `host2`.
        limit_bytes: Size limit in bytes for all ranks of a node together; 0: the store's own limit.
        path: The directory of `disk`.
        url: URL of a store. It may contain a password: show `text` instead.
    """

    kind: str
    name: str
    limit_bytes: int = 0
    path: str = ""
    url: str = ""

    @property
    def text(self) -> str:
        """The flag's value for logs: without user, password and options."""
        if self.kind == "host":
            return f"host:{self.limit_bytes}"
        if self.kind == "disk":
            return f"disk:{self.path}:{self.limit_bytes}"
        return re.sub("//.*@", "//", self.url).partition("?")[0]

    @override
    def __repr__(self) -> str:
        return f"<TierSpec {self.name} {self.text}>"


def parse_tier(text: str) -> TierSpec:
    """Parse one `--kv-tier`; raise `ConfigInvalid` with a correct example."""
    kind, _, rest = text.partition(":")
    if kind == "host":
        return TierSpec(kind="host", name="host", limit_bytes=_size(text, rest))
    if kind == "disk":
        path, _, size = rest.rpartition(":")
        if not path:
            raise ConfigInvalid(f"--kv-tier {text}: use a directory and a size, disk:PATH:SIZE")
        return TierSpec(kind="disk", name="disk", limit_bytes=_size(text, size), path=path)
    if not rest.startswith("//"):
        raise ConfigInvalid(f"--kv-tier {text}: there is no such tier; {_EXAMPLES}")
    scheme, kind = kind, "redis" if kind in REDIS_SCHEMES else kind
    try:
        _module(kind).parse_url(text)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"--kv-tier {scheme}://: {error.message}") from error
    return TierSpec(kind=kind, name=kind, url=text)


def parse_tiers(texts: Sequence[str]) -> list[TierSpec]:
    """Parse all `--kv-tier` values, fastest first, and give each tier a unique name.

    Raise `ConfigInvalid` for an invalid or repeated tier.
    """
    specs: list[TierSpec] = []
    count = Counter[str]()
    for text in texts:
        spec = parse_tier(text)
        count[spec.kind] += 1
        if number := count[spec.kind] - 1:
            spec = msgspec.structs.replace(spec, name=f"{spec.kind}{number + 1}")
        if any(spec.path == other.path and spec.url == other.url for other in specs):
            raise ConfigInvalid(f"--kv-tier {spec.text}: this tier is specified twice")
        specs.append(spec)
    return specs


def make_tier(spec: TierSpec, pages: PoolPages, space: PageSpace) -> Tier:
    """Open the tier; raise `ConfigInvalid` if its settings are invalid. A remote store may still be down."""
    return cast(Tier, _module(spec.kind).open_tier(spec, pages, space))


def _module(kind: str) -> ModuleType:
    """Return the module of a kind of tier; raise `ConfigInvalid` if it or its package is missing."""
    try:
        if kind in {"host", "disk", "redis"}:
            return import_module(f"tandem.kvtier.{kind}")
        for entry in entry_points(group=GROUP, name=kind):
            return cast(ModuleType, entry.load())
    except ImportError as error:
        raise ConfigInvalid(f"{error}; pip install 'tandem-serve[{kind}]'") from error
    hint = "; pip install tandem-mooncake" if kind == "mooncake" else ""
    raise ConfigInvalid(f"there is no such tier{hint}; {_EXAMPLES}")


def _size(text: str, size: str) -> int:
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", size.strip().lower())
    unit = _UNITS.get(number[2]) if number else None
    if number is None or unit is None or not (limit := int(float(number[1]) * unit)):
        raise ConfigInvalid(
            f"--kv-tier {text}: {size or 'nothing'!r} is not a size; use one such as 512MiB, 8GiB or 1TiB"
        )
    return limit
