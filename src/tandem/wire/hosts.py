"""Host names and URLs from the command line: validation, resolution, and readable errors."""

import ipaddress
import os
import socket
from functools import partial
from urllib.parse import urlsplit

from tandem.settings.flags import Flag
from tandem.wire.errors import ConfigInvalid, PeerLost

# Characters of a process's command line in an error.
MAX_COMMAND = 80


def bare_host(flag: str, text: str) -> str:
    """Return a host without the brackets of an IPv6 address.

    Raises:
        ConfigInvalid: The host is neither an address nor a valid name. The message names `flag`.
    """
    host = text.strip("[]")
    try:
        # The resolver encodes it too, and would raise the UnicodeError far from here.
        is_name = bool(host.encode("idna"))
    except UnicodeError:
        is_name = False
    if not is_name:  # an empty host would make a server listen on all addresses
        raise ConfigInvalid(
            f"{flag} {text} is not a host: use an address, or a name whose parts have 1 to 63 characters"
        )
    return host


HOST = Flag(
    "--host",
    group="server",
    metavar="ADDRESS",
    help="address to listen on",
    parse=partial(bare_host, "--host"),
)


def is_address(host: str) -> bool:
    """Whether a host is an IP address, which needs no resolver."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def resolve(host: str) -> str:
    """Return the IP address of a host. Blocks on the resolver, in the worst case for seconds.

    Raises:
        PeerLost: The name cannot be resolved.
    """
    bare = host.strip("[]")
    if is_address(bare):
        return bare
    try:
        # getaddrinfo sorts by preference: take the first.
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][4][0])
    except UnicodeError as error:
        raise PeerLost(
            f"cannot resolve {bare}: each part of a name must have 1 to 63 characters"
        ) from error
    except OSError as error:
        raise PeerLost(f"cannot resolve {bare}: {reason_of(error)}") from error


def checked_url(flag: str, text: str) -> str:
    """Return a server's URL without a trailing slash.

    Raises:
        ConfigInvalid: `text` is not the URL of a server. The message names `flag`.
    """
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        has_place = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_server = has_place and not (parts.username is not None or parts.query or parts.fragment)
    except ValueError:  # a port that is not a number, or unbalanced brackets
        is_server = False
    if not is_server:
        raise ConfigInvalid(f"{flag} {text} is not a URL: use one such as http://10.0.0.5:8000")
    return url


def reason_of(error: OSError) -> str:
    """Return why an address cannot be bound or reached, without the address."""
    # The resolver's error numbers are negative and unknown to strerror.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)


def listener_on(port: int) -> str:
    """Return the process that listens on a local TCP port; empty if this user may not see it."""
    import psutil  # needed only after a failure

    try:
        pids = [
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid
        ]
        if not pids:
            return ""
        # The lowest pid is the server; its children inherited the socket.
        first = psutil.Process(min(pids))
        return f"process {first.pid} ({' '.join(first.cmdline())[:MAX_COMMAND]})"
    except (psutil.Error, OSError):
        return ""
