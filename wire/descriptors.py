"""How many files, sockets included, a process of ours may have open.

Shells start processes with a limit of 1,024, which they may raise by themselves up to another one.
"""

import contextlib
import resource

from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# Of the connecting end: the connection, libzmq's socket, and both ends of its monitor. A bound end has one.
PER_LINK = 4
# A node with torch and no link has 40; the rest is for files that are open for a moment.
OWN = 128

REMEDY = "raise its limit of open files (ulimit -n, or LimitNOFILE= in a systemd unit)"


def allow_descriptors(num_needed: int, used_for: str) -> None:
    """Raise this process's limit as far as it may. Warn when that is less than it needs.

    Args:
        num_needed: Beside `OWN`.
        used_for: What needs them, such as `40 nodes and 4096 clients`.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # a limit that a kernel tells and does not take
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], OWN + num_needed
    if limit not in (resource.RLIM_INFINITY, -1) and limit < needed:
        log.warning(
            "descriptors.too_few",
            limit=limit,
            needed=needed,
            used_for=used_for,
            effect="connections and links beyond the limit are refused",
            action=f"ulimit -n {needed}, or LimitNOFILE={needed} in a systemd unit",
            see="tandem docs troubleshooting#open-files",
        )
