"""The sources of nodes that a configuration names: the addresses of a name, and the pods with some labels.

The parent asks each every two seconds. While one fails, the nodes that it named stay.
"""

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from tandem.router.config import DnsTarget, KubernetesTarget, RouterConfig
from tandem.router.membership import Member, Source, SourceFailed
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import reason_of

log = get_logger(__name__)

DNS_TIMEOUT_S = 5.0
# Asked every two seconds, a minute: longer than a name server takes to be started anew.
ABSENCES_BELIEVED = 30
ABSENT = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
ZONE_LABEL = "topology.kubernetes.io/zone"
LIST_TIMEOUT_S = 30.0

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name, as the system's resolver knows them. Raises `OSError`."""
    async with asyncio.timeout(DNS_TIMEOUT_S):
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class DnsSource:
    """The nodes behind one name.

    A name that is gone counts as one without nodes after a minute only: names vanish for seconds when
    servers are restarted. A name server that does not answer takes no node away.
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
            if self._num_absent > ABSENCES_BELIEVED:
                return []
            reason = reason_of(error) or "the name server does not answer in time"
            raise SourceFailed(reason) from error
        self._num_absent = 0
        urls = [_url(address, target.port) for address in sorted(set(addresses))]
        return [Member(url, target.role, source=self.name) for url in urls]


class KubernetesSource:
    """The pods of one role, as the Kubernetes API lists them.

    A pod counts from when it has an address until it is told to end; whether it serves is for the router to see.

    Raises:
        ConfigInvalid: The files of the service account are missing.
    """

    def __init__(self, target: KubernetesTarget, role: str, selector: str) -> None:
        account = Path(target.account_dir)
        try:
            self._namespace = target.namespace or (account / "namespace").read_text().strip()
            is_tls = target.api_url.startswith("https://")
            self._tls = ssl.create_default_context(cafile=account / "ca.crt") if is_tls else True
        except OSError as error:
            raise ConfigInvalid(
                f"--discover-kubernetes: cannot read {error.filename}: {error.strerror}; run the router in "
                "a pod with a service account, or give --kubernetes-api and --kubernetes-namespace"
            ) from error
        self._role, self._port, self._selector = role, target.port, selector
        self._token_file = account / "token"
        self._url = f"{target.api_url.rstrip('/')}/api/v1/namespaces/{self._namespace}/pods"
        self.name = f"kubernetes {role} {selector} in {self._namespace}"

    async def find(self) -> list[Member]:
        """Return a node for each pod that runs. Raises `SourceFailed`."""
        try:
            status, body = await self._list()
            if status != 200:
                raise SourceFailed(self._refusal(status, body))
            pods = sorted(
                msgspec.json.decode(body)["items"], key=lambda pod: pod["metadata"]["name"]
            )
            members = [self._member(pod) for pod in pods]
        except (aiohttp.ClientError, OSError) as error:
            raise SourceFailed(str(error) or type(error).__name__) from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise SourceFailed(f"the Kubernetes API sends what cannot be read: {error}") from error
        return [member for member in members if member is not None]

    async def _list(self) -> tuple[int, bytes]:
        headers = {}
        # None through `kubectl proxy`; Kubernetes renews it within the hour.
        if self._token_file.exists():
            headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
        timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls)) as session,
            session.get(
                self._url,
                params={"labelSelector": self._selector},
                headers=headers,
                timeout=timeout,
            ) as response,
        ):
            return response.status, await response.read()

    def _refusal(self, status: int, body: bytes) -> str:
        try:
            message = msgspec.json.decode(body)["message"]
        except (ValueError, LookupError, TypeError):
            message = ""
        if status != 403:
            return f"the Kubernetes API answers {status}: {message or 'without a reason'}"
        return (
            f"may not list pods in namespace {self._namespace!r} ({message}): bind the router's "
            "service account to a Role of that namespace with the rule apiGroups: [''], "
            "resources: [pods], verbs: [list]"
        )

    def _member(self, pod: dict[str, Any]) -> Member | None:
        meta, status, port = pod["metadata"], pod.get("status", {}), self._port_of(pod)
        is_running = status.get("phase") == "Running" and not meta.get("deletionTimestamp")
        address = status.get("podIP")
        if not is_running or not address or port is None:
            return None
        zone = (meta.get("labels") or {}).get(ZONE_LABEL, "")
        return Member(_url(address, port), self._role, zone=zone, source=self.name)

    def _port_of(self, pod: dict[str, Any]) -> int | None:
        if self._port.isdigit():
            return int(self._port)
        for container in pod["spec"].get("containers") or ():
            for port in container.get("ports") or ():
                if port.get("name") == self._port:
                    return int(port["containerPort"])
        log.debug("kubernetes.no_port", pod=pod["metadata"]["name"], port=self._port)
        return None


def sources_of(config: RouterConfig) -> list[Source]:
    """Return the sources that a configuration names. Raises `ConfigInvalid`."""
    sources: list[Source] = [DnsSource(target) for target in config.dns]
    if (pods := config.kubernetes) is not None:
        selectors = {"prefill": pods.prefill_selector, "decode": pods.decode_selector}
        sources += [
            KubernetesSource(pods, role, selector)
            for role, selector in selectors.items()
            if selector
        ]
    return sources
