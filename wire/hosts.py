"""Names of hosts as they are typed, their addresses, and why one cannot be reached."""

import ipaddress
import os
import socket
from typing import Any
from urllib.parse import urlsplit

from tandem.wire.errors import ConfigInvalid, PeerLost


def bare_host(flag: str, text: str) -> str:
    """Return a host without the brackets of an IPv6 one.

    Args:
        flag: What the user gave it with.

    Raises:
        ConfigInvalid: It is nothing that a resolver can be asked for.
    """
    host = text.strip("[]")
    try:
        host.encode(
            "idna"
        )  # as the resolver does, which raises a UnicodeError wherever it is called
    except UnicodeError as error:
        raise ConfigInvalid(
            f"{flag} {text}: give an address, or a name whose parts have 1 to 63 characters"
        ) from error
    return host


def is_address(host: str) -> bool:
    """Whether a host is an IP address, so that no resolver need be asked."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def resolve(host: str) -> str:
    """Return the address of a host. Blocks for as long as the resolver takes: seconds, at worst.

    Raises:
        PeerLost: No address of this name is known.
    """
    bare = host.strip("[]")
    if is_address(bare):
        return bare
    try:
        return first_address(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        raise unresolved(bare, error) from error


def first_address(found: Any) -> str:
    """Return the best address of what `getaddrinfo` returned: it sorts them."""
    return str(found[0][4][0])


def unresolved(host: str, error: OSError | UnicodeError) -> PeerLost:
    """Return the error for a name without an address, or for one that no resolver can be asked for."""
    if isinstance(error, UnicodeError):
        return PeerLost(f"cannot resolve {host}: each part of a name has 1 to 63 characters")
    return PeerLost(f"cannot resolve {host}: {reason_of(error)}")


def checked_url(flag: str, text: str) -> str:
    """Return a server's URL without a slash at its end.

    Args:
        flag: What the user gave it with.

    Raises:
        ConfigInvalid: It is none.
    """
    url = text.rstrip("/")
    if not _is_server(url):
        raise ConfigInvalid(f"{flag} {text}: give a URL such as http://10.0.0.5:8000")
    return url


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not match
        return False
    is_bare = parts.username is None and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and has_address and is_bare


def reason_of(error: OSError) -> str:
    """Return why an address cannot be had or reached, without the address."""
    # The resolver's numbers are negative, and none of the system's.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
