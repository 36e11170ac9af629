"""Names of hosts as they are typed, and why one cannot be reached."""

import os

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


def reason_of(error: OSError) -> str:
    """Return why an address cannot be had or reached, without the address."""
    # The resolver's numbers are negative, and none of the system's.
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
