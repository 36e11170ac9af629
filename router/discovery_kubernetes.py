"""Nodes as pods: those with the labels of a role, as the Kubernetes API tells them.

```
 list ──▶ all pods, version ──▶ watch from there ──▶ events ──▶ cut off, ended: watch on
   ▲                                                    │
   └──────────────── 410: version too old ──────────────┘
```

What is known stays while the API cannot be asked: it is no news of the pods. A pod counts from when it
has an address until it is told to end; whether it serves is for the router to see.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import aiohttp
import msgspec
from typing_extensions import override

from tandem.router.config import KubernetesTarget
from tandem.router.kubernetes_api import ApiGone, ApiRefused, Pod, PodApi
from tandem.router.membership import Member
from tandem.telemetry.log import get_logger

log = get_logger(__name__)

# Hundreds of routers that lost one API server must not be what keeps it down; and an operator who binds the
# role that was missing looks whether it helped.
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 5.0
# As often it may be down to something else; then to the version, which a server that was restored does not know.
REFUSALS_BEFORE_LIST = 3
ZONE_LABEL = "topology.kubernetes.io/zone"


class KubernetesSource:
    """The pods of one role.

    Args:
        first_retry_s: After the first failure in a row; the pause doubles with each.

    Raises:
        ConfigInvalid: The files of the service account are missing.
    """

    def __init__(
        self,
        target: KubernetesTarget,
        role: str,
        selector: str,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._role, self._port = role, target.port
        self._api = PodApi(target, selector)
        self._first_retry_s = self._retry_s = first_retry_s
        self._pods: dict[str, Pod] = {}
        self._version, self._num_refused = "", 0
        self.name = f"kubernetes {role} {selector} in {self._api.namespace}"
        self.problem = ""

    @override
    def __repr__(self) -> str:
        return f"<KubernetesSource {self.name} {self.problem or f'{len(self._pods)} pods'}>"

    async def watch(self) -> AsyncGenerator[list[Member], None]:
        """Yield all nodes each time a pod came, changed or went."""
        async with self._api.session() as session:
            while True:
                try:
                    async with aclosing(self._updates(session)) as updates:
                        async for is_news in updates:
                            self._note_problem("")
                            if is_news:
                                yield self._members()
                    self._retry_s = (
                        self._first_retry_s
                    )  # the server ended it, as it does each minute
                except ApiGone:
                    self._version = ""
                except ApiRefused as error:
                    self._num_refused += 1
                    if self._num_refused >= REFUSALS_BEFORE_LIST:
                        self._version = ""
                    self._note_problem(str(error))
                except (aiohttp.ClientError, OSError) as error:
                    self._note_problem(str(error) or type(error).__name__)
                except (ValueError, msgspec.MsgspecError) as error:
                    self._version = ""  # what was passed over may be a change
                    self._note_problem(f"the Kubernetes API tells what cannot be read: {error}")
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    async def _updates(self, session: aiohttp.ClientSession) -> AsyncGenerator[bool, None]:
        """Bring `_pods` up to date; yield true after each change, false when all is well without one."""
        if not self._version:
            listed = await self._api.pods(session)
            self._pods = {pod.metadata.name: pod for pod in listed.items}
            self._version = listed.metadata.resource_version
            yield True
        async with aclosing(self._api.changes(session, self._version)) as changes:
            async for change in changes:
                if change is None:
                    yield False
                    continue
                kind, pod = change
                if kind in {"ADDED", "MODIFIED"}:
                    self._pods[pod.metadata.name] = pod
                elif kind == "DELETED":
                    self._pods.pop(pod.metadata.name, None)
                self._version = pod.metadata.resource_version
                yield True

    def _members(self) -> list[Member]:
        found = [self._member(pod) for _, pod in sorted(self._pods.items())]
        return [member for member in found if member is not None]

    def _member(self, pod: Pod) -> Member | None:
        is_there = pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None
        port = self._port_of(pod)
        if not is_there or not pod.status.ip or port is None:
            return None
        ip = pod.status.ip
        host = f"[{ip}]" if ":" in ip else ip
        zone = pod.metadata.labels.get(ZONE_LABEL, "")
        return Member(f"http://{host}:{port}", self._role, zone=zone, source=self.name)

    def _port_of(self, pod: Pod) -> int | None:
        if self._port.isdigit():
            return int(self._port)
        ports = [port for container in pod.spec.containers for port in container.ports]
        named = [port.container_port for port in ports if port.name == self._port]
        if not named:
            log.debug("kubernetes.no_port", pod=pod.metadata.name, port=self._port)
            return None
        return named[0]

    def _note_problem(self, problem: str) -> None:
        if not problem:
            self._retry_s, self._num_refused = self._first_retry_s, 0
        if problem != self.problem:
            self.problem = problem
            if problem:
                log.warning(
                    "kubernetes.failed",
                    source=self.name,
                    reason=problem,
                    see="tandem docs membership#kubernetes",
                )
            else:
                log.info("kubernetes.follows", source=self.name, num_pods=len(self._pods))
