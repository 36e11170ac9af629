"""Announces a node to its routers every 3 s, and withdraws it when it stops.

```
 start ──▶ POST ROUTER/nodes {"url", "role", "ttl_s"} ──3 s──▶ POST ... ──stop──▶ DELETE ROUTER/nodes/URL
```

If a router is unreachable or rejects the node, the node logs the failure once and keeps trying.
"""

import asyncio
import socket
from collections.abc import Callable
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from tandem.node.config import NodeConfig
from tandem.telemetry.log import get_logger
from tandem.wire.hosts import reason_of
from tandem.wire.keys import is_loopback

log = get_logger(__name__)

INTERVAL_S = 3.0
# Two announcements may be lost before a router removes the node.
TTL_S = 10.0
TIMEOUT_S = 2.0
# Maximum time by which an unreachable router delays the node's exit.
LEAVE_TIMEOUT_S = 1.0

LATE = "does not answer in time"
ANNOUNCING = "docs/operations.md#announcing"

# Remedies by status code. For other codes the router's message has to suffice.
ACTIONS = {
    401: "set TANDEM_CLUSTER_KEY on this node to the router's value",
    403: "set TANDEM_CLUSTER_KEY to the same secret on this node and the router",
    404: "this router accepts no announcements; list the node there with --prefill or --decode",
}


class Announcer:
    """Announces one node to its routers.

    Args:
        port: The node's HTTP port.
        role: Returns the node's current role.
        bearer: Operator key that routers require; empty: none.
    """

    def __init__(
        self, config: NodeConfig, port: int, role: Callable[[], str], bearer: str = ""
    ) -> None:
        self._config, self._port, self._role = config, port, role
        self._headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Announce the node until `stop`, then withdraw it from every router that may have accepted it."""
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for router in self._config.routers:
                tasks.create_task(self._keep(session, router))

    def stop(self) -> None:
        """Make `run` withdraw the node and return."""
        self._stopping.set()

    async def _keep(self, session: aiohttp.ClientSession, router: str) -> None:
        outcome: str | None = None
        url, may_be_known = "", False
        while not self._stopping.is_set():
            before, url = outcome, await self.advertised(router)
            outcome = await self._announce(session, router, url)
            # A router that answered late may have accepted the node.
            may_be_known |= outcome in ("", LATE)
            if outcome and outcome != before:
                log.warning(
                    "announce.refused",
                    router=router,
                    url=url,
                    reason=outcome,
                    action="retrying",
                    see=ANNOUNCING,
                )
            elif outcome != before:
                log.info("announce.accepted", router=router, url=url)
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue
        if may_be_known:
            await self._leave(session, router, url)

    async def _announce(self, session: aiohttp.ClientSession, router: str, url: str) -> str:
        """Return the failure and its remedy; empty if the router accepted the node."""
        body = {"url": url, "role": self._role(), "ttl_s": TTL_S}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with session.post(f"{router}/nodes", json=body, timeout=timeout) as response:
                if response.status < 300:
                    return ""
                return _refusal(response.status, await response.content.read(4096))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return _why(error)

    async def _leave(self, session: aiohttp.ClientSession, router: str, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=LEAVE_TIMEOUT_S)
        node = f"{router}/nodes/{quote(url, safe='')}"
        try:
            async with session.delete(node, timeout=timeout) as response:
                log.info("announce.left", router=router, status=response.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.info(
                "announce.not_left",
                router=router,
                reason=_why(error),
                effect=f"the router removes the node after {TTL_S:g} s",
            )

    async def advertised(self, router: str) -> str:
        """Return the URL at which a router reaches this node."""
        if self._config.advertise_url:
            return self._config.advertise_url
        host = self._config.host
        if host in ("0.0.0.0", "::"):
            host = await _address_towards(router) or host
        shown = f"[{host}]" if ":" in host else host
        return f"{self._config.http.scheme}://{shown}:{self._port}"


def warn_of_loopback(config: NodeConfig) -> None:
    """Log a warning for each router on another machine that would receive a loopback address."""
    for router in config.routers if is_loopback(config.host) and not config.advertise_url else ():
        if not is_loopback(urlsplit(router).hostname or ""):
            log.warning(
                "announce.loopback",
                router=router,
                host=config.host,
                action="set --host to an address that the router reaches, or set --advertise-url",
                see=ANNOUNCING,
            )


def _refusal(status: int, body: bytes) -> str:
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
        message = ""
    action = ACTIONS.get(status, "")
    return ": ".join(filter(None, [f"it answers with status {status}", message, action]))


def _why(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return (
                f"its certificate is not trusted ({error.certificate_error}); set SSL_CERT_FILE to the "
                "certificate of its authority"
            )
        case aiohttp.ClientConnectorError():
            return (
                f"cannot be reached ({reason_of(error.os_error)}); check that it runs, and --router"
            )
        case TimeoutError():
            return LATE
        case _:
            return str(error) or type(error).__name__


async def _address_towards(router: str) -> str:
    """Return this machine's source address for connections to a router; empty if there is no route to it."""
    parts = urlsplit(router)
    try:
        resolve = asyncio.get_running_loop().getaddrinfo
        found = await resolve(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)  # sends nothing; the kernel only selects a route
            return str(sock.getsockname()[0])
    except (OSError, UnicodeError):  # unknown or invalid host name
        return ""
