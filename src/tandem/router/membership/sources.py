"""The sources of nodes that a configuration names: the addresses behind DNS names.

The parent polls each source every two seconds. While a source fails, its last nodes stay.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from tandem.router.config import DnsTarget, RouterConfig
from tandem.router.membership.membership import Member, NodeSource, SourceFailed
from tandem.wire.hosts import reason_of

DNS_TIMEOUT_S = 5.0
# Consecutive polls that do not find the name before its nodes are removed: one minute, longer than a name server's restart.
MAX_ABSENCES = 30
ABSENT = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name from the system's resolver. Raises `OSError`."""
    async with asyncio.timeout(DNS_TIMEOUT_S):
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class DnsSource:
    """The nodes behind one DNS name.

    If the name no longer exists, its nodes are removed after a minute: names vanish for seconds while name
    servers restart. A name server that does not answer removes no node.
    """

    def __init__(self, target: DnsTarget, resolve: Resolve = resolve) -> None:
        self._target, self._resolve = target, resolve
        self._num_absent = 0
        self.name = f"dns {target.role or 'any'}={target.host}:{target.port}"

    async def find(self) -> list[Member]:
        """Return a node for each address of the name. Raises `SourceFailed`."""
        target = self._target
        try:
            addresses = await self._resolve(target.host, target.port)
        except OSError as error:  # TimeoutError is one
            self._num_absent += error.errno in ABSENT
            if self._num_absent > MAX_ABSENCES:
                return []
            reason = reason_of(error) or "the name server does not answer in time"
            raise SourceFailed(reason) from error
        self._num_absent = 0
        urls = [_url(address, target.port) for address in sorted(set(addresses))]
        return [Member(url, target.role, source=self.name) for url in urls]


def sources_of(config: RouterConfig) -> list[NodeSource]:
    """Return the sources that a configuration names."""
    return [DnsSource(target) for target in config.dns]
