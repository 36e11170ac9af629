"""Names of hosts as they are typed, and why one cannot be reached."""

import os
from urllib.parse import urlsplit

from wire.errors import ConfigInvalid


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
