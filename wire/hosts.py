"""Names of hosts as they are typed, their addresses, and why one cannot be reached."""

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from tandem.wire.errors import ConfigInvalid, PeerLost

# Characters of a command line that an error shows.
MAX_COMMAND = 80


def bare_host(flag: str, text: str) -> str:
    """Return a host without the brackets of an IPv6 one.

    Raises:
        ConfigInvalid: A resolver cannot be asked for it; names `flag`.
    """
    host = text.strip("[]")
    try:
        is_name = bool(
            host.encode("idna")
        )  # as the resolver does, which raises a UnicodeError anywhere
    except UnicodeError:
        is_name = False
    if not is_name:  # an empty one would have a server listen on all addresses
        raise ConfigInvalid(
            f"{flag} {text}: give an address, or a name whose parts have 1 to 63 characters"
        )
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
        # The best one is the first.
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][4][0])
    except UnicodeError as error:
        raise PeerLost(
            f"cannot resolve {bare}: each part of a name has 1 to 63 characters"
        ) from error
    except OSError as error:
        raise PeerLost(f"cannot resolve {bare}: {reason_of(error)}") from error


def checked_url(flag: str, text: str) -> str:
    """Return a server's URL without a slash at its end.

    Raises:
        ConfigInvalid: It is none; names `flag`.
    """
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        has_place = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_server = has_place and not (parts.username is not None or parts.query or parts.fragment)
    except ValueError:  # a port that is no number, brackets that do not match
        is_server = False
    if not is_server:
        raise ConfigInvalid(f"{flag} {text}: give a URL such as http://10.0.0.5:8000")
    return url


def reason_of(error: OSError) -> str:
    """Return why an address cannot be had or reached, without the address."""
    # The resolver's numbers are negative, and none of the system's.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def listener_on(port: int) -> str:
    """Return the process that listens on a TCP port of this machine; empty if this user may not see it."""
    import psutil  # only after a failure

    try:
        pids = [
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid
        ]
        if not pids:
            return ""
        first = psutil.Process(min(pids))  # the others are its children, which share its socket
        return f"process {first.pid} ({' '.join(first.cmdline())[:MAX_COMMAND]})"
    except (psutil.Error, OSError):
        return ""
