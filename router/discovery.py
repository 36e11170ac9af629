"""The sources of nodes that a configuration names, and the one by name: every address of a name is a node.

While a name server does not answer, the known nodes stay. A name that is gone, or has no address, empties the list
after a while only: names vanish for seconds when servers are restarted.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable

from typing_extensions import override

from tandem.router.config import DnsTarget, RouterConfig
from tandem.router.discovery_kubernetes import KubernetesSource
from tandem.router.membership import Member, Source
from tandem.telemetry.log import get_logger
from tandem.wire.hosts import reason_of

log = get_logger(__name__)

# Kubernetes lets its own answers be kept for 5 s; a node that is up must serve within as many.
INTERVAL_S = 2.0
TIMEOUT_S = 5.0
# A minute: longer than a name server takes to be started anew.
ABSENCE_BELIEVED_S = 60.0
ABSENT = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name, as the system's resolver knows them.

    Raises:
        OSError: It knows none now; says why.
    """
    async with asyncio.timeout(TIMEOUT_S):
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsSource:
    """The nodes behind one name.

    Args:
        resolve: Of a host and a port to addresses.
        interval_s: Between two questions.
    """

    def __init__(
        self, target: DnsTarget, resolve: Resolve = resolve, interval_s: float = INTERVAL_S
    ) -> None:
        self._target, self._resolve, self._interval_s = target, resolve, interval_s
        self.name = f"dns {target.role or 'any'}={target.host}:{target.port}"
        self.problem = ""

    @override
    def __repr__(self) -> str:
        return f"<DnsSource {self.name} {self.problem or 'found'}>"

    async def watch(self) -> AsyncGenerator[list[Member], None]:
        """Yield all nodes each time the name was resolved."""
        num_absent = 0
        while True:
            try:
                addresses = await self._resolve(self._target.host, self._target.port)
            except OSError as error:  # TimeoutError is one
                self._note_problem(reason_of(error) or "the name server does not answer in time")
                num_absent += error.errno in ABSENT
                if num_absent * self._interval_s > ABSENCE_BELIEVED_S:
                    yield []
            else:
                self._note_problem("")
                num_absent = 0
                yield [self._member(address) for address in sorted(set(addresses))]
            await asyncio.sleep(self._interval_s)

    def _member(self, address: str) -> Member:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._target.port}"
        return Member(url, self._target.role, source=self.name)

    def _note_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            if problem:
                log.warning(
                    "dns.unresolved",
                    name=self._target.host,
                    reason=problem,
                    see="tandem docs membership#dns",
                )
            else:
                log.info("dns.resolved", name=self._target.host)


def sources_of(config: RouterConfig) -> list[Source]:
    """Return the sources that a configuration names.

    Raises:
        ConfigInvalid: One cannot be set up.
    """
    sources: list[Source] = [DnsSource(target) for target in config.dns]
    if (pods := config.kubernetes) is not None:
        selectors = {"prefill": pods.prefill_selector, "decode": pods.decode_selector}
        sources += [
            KubernetesSource(pods, role, selector)
            for role, selector in selectors.items()
            if selector
        ]
    return sources
