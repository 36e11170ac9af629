"""Which Mooncake Store, and what this node lends to it, read from a URL. Opens nothing.

    mooncake://master-host[:50051]?segment=16GiB

with, after `?`, further: `host`, `metadata`, `protocol`, `devices`. Without `segment`, and without other
lenders, nothing can be kept.
"""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from tandem.wire.errors import ConfigInvalid

DEFAULT_PORT = 50051


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """A store by its master.

    Attributes:
        segment_bytes: What this node lends, all its ranks together.
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


def parse_mooncake_url(url: str) -> MooncakeAddress:
    """Read a URL.

    Raises:
        ConfigInvalid: It names no master, or asks for what there is not.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigInvalid(f"{url} has no valid host and port") from error
    if parts.scheme != "mooncake" or not host or parts.path.strip("/"):
        raise ConfigInvalid(f"{url}: give a master: mooncake://host:{DEFAULT_PORT}?segment=16GiB")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    size = re.fullmatch(r"(\d+)(MiB|GiB)?", options.pop("segment", "0"))
    if size is None:
        raise ConfigInvalid(f"{url}: segment is a size such as 512MiB or 16GiB")
    names = {
        "host": "own_host",
        "metadata": "metadata",
        "protocol": "protocol",
        "devices": "devices",
    }
    if unknown := set(options) - set(names):
        raise ConfigInvalid(
            f"{url}: there is no option {min(unknown)!r}; there are segment, " + ", ".join(names)
        )
    if options.get("protocol", "tcp") not in {"tcp", "rdma"}:
        raise ConfigInvalid(f"{url}: protocol is tcp or rdma")
    segment_bytes = int(size[1]) << {None: 0, "MiB": 20, "GiB": 30}[size[2]]
    given = {names[option]: value for option, value in options.items()}
    return MooncakeAddress(host, port or DEFAULT_PORT, segment_bytes, **given)
