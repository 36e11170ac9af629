"""Nodes as pods: those with the labels of a role, as the Kubernetes API lists them and reports changes.

```
 list ──▶ all pods, version ──▶ watch from there ──▶ events ──▶ cut off, ended: watch on
   ▲                                                    │
   └──────────────── 410: version too old ──────────────┘
```

What is known stays while the API cannot be asked. A pod counts from when it has an address until it is told to end;
whether it serves is for the router to see. The official client is not used: it is made for threads, and of it this would
take one call.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from typing_extensions import override

from tandem.router.config import KubernetesTarget
from tandem.router.membership import Member
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid

log = get_logger(__name__)

# Hundreds of routers that lost one API server must not be what keeps it down; and an operator who binds the role that
# was missing looks whether it helped.
FIRST_RETRY_S = 1.0
LAST_RETRY_S = 5.0
# After so many errors in a row the version may be the reason: a server that was restored does not know it.
REFUSALS_BEFORE_LIST = 3
ZONE_LABEL = "topology.kubernetes.io/zone"
LIST_TIMEOUT_S = 30.0
# The server ends a watch after so long; one that is cut off without a word is noticed by then.
WATCH_S = 60
# etcd's limit for one object is 1.5 MiB.
MAX_EVENT_BYTES = 2 << 20
GONE = 410

Pod = dict[str, Any]


class ApiRefused(Exception):
    """The API answered with an error; the message says what to do, for people."""


class ApiGone(ApiRefused):
    """The version asked for is not known any more: list again."""


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
        self._first_retry_s = self._retry_s = first_retry_s
        self._pods: dict[str, Pod] = {}
        self._version, self._num_refused = "", 0
        self.name = f"kubernetes {role} {selector} in {self._namespace}"
        self.problem = ""

    @override
    def __repr__(self) -> str:
        return f"<KubernetesSource {self.name} {self.problem or f'{len(self._pods)} pods'}>"

    async def watch(self) -> AsyncGenerator[list[Member], None]:
        """Yield all nodes each time a pod came, changed or went."""
        connector = aiohttp.TCPConnector(ssl=self._tls)
        async with aiohttp.ClientSession(
            connector=connector, read_bufsize=MAX_EVENT_BYTES
        ) as session:
            while True:
                try:
                    async with aclosing(self._updates(session)) as updates:
                        async for is_news in updates:
                            self._note_problem("")
                            if is_news:
                                yield self._members()
                    self._retry_s = self._first_retry_s  # the server ends a watch each minute
                except ApiGone:
                    self._version = ""
                except ApiRefused as error:
                    self._num_refused += 1
                    if self._num_refused >= REFUSALS_BEFORE_LIST:
                        self._version = ""
                    self._note_problem(str(error))
                except (aiohttp.ClientError, OSError) as error:
                    self._note_problem(str(error) or type(error).__name__)
                except (ValueError, LookupError, TypeError, AttributeError) as error:
                    self._version = ""  # what was passed over may be a change
                    self._note_problem(f"the Kubernetes API sends what cannot be read: {error}")
                await asyncio.sleep(self._retry_s)
                self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    async def _updates(self, session: aiohttp.ClientSession) -> AsyncGenerator[bool, None]:
        """Bring `_pods` up to date; yield true after each change, false when the watch has begun."""
        if not self._version:
            async with self._asked(session, "list", LIST_TIMEOUT_S) as response:
                listed = msgspec.json.decode(await response.read())
            self._pods = {pod["metadata"]["name"]: pod for pod in listed["items"]}
            self._version = listed["metadata"]["resourceVersion"]
            yield True
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
            "resourceVersion": self._version,
        }
        limit_s = WATCH_S + LIST_TIMEOUT_S
        async with self._asked(session, "watch", limit_s, **params) as response:
            yield False
            async for line in response.content:
                event = msgspec.json.decode(line)
                kind, pod = event["type"], event["object"]
                if kind == "ERROR":
                    raise _error(pod.get("code", 0), pod.get("message", ""))
                self._version = pod["metadata"]["resourceVersion"]
                if kind in {"ADDED", "MODIFIED"}:
                    self._pods[pod["metadata"]["name"]] = pod
                elif kind == "DELETED":
                    self._pods.pop(pod["metadata"]["name"], None)
                yield True

    @asynccontextmanager
    async def _asked(
        self, session: aiohttp.ClientSession, verb: str, limit_s: float, **params: str
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        headers = {}
        if (
            self._token_file.exists()
        ):  # none through `kubectl proxy`; Kubernetes renews it within the hour
            headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
        async with session.get(
            self._url,
            params={"labelSelector": self._selector, **params},
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=limit_s),
        ) as response:
            if response.status != 200:
                raise self._refusal(verb, response.status, await response.read())
            yield response

    def _refusal(self, verb: str, status: int, body: bytes) -> ApiRefused:
        try:
            message = str(msgspec.json.decode(body)["message"])
        except (msgspec.DecodeError, LookupError, TypeError):
            message = ""
        if status != 403:
            return _error(status, message)
        return ApiRefused(
            f"may not {verb} pods in namespace {self._namespace!r} ({message}): bind the router's "
            "service account to a Role of that namespace with the rule apiGroups: [''], "
            "resources: [pods], verbs: [list, watch]"
        )

    def _members(self) -> list[Member]:
        found = [self._member(pod) for _, pod in sorted(self._pods.items())]
        return [member for member in found if member is not None]

    def _member(self, pod: Pod) -> Member | None:
        meta, status = pod["metadata"], pod.get("status") or {}
        is_running = status.get("phase") == "Running" and not meta.get("deletionTimestamp")
        ip, port = status.get("podIP"), self._port_of(pod)
        if not is_running or not ip or port is None:
            return None
        host = f"[{ip}]" if ":" in ip else ip
        zone = (meta.get("labels") or {}).get(ZONE_LABEL, "")
        return Member(f"http://{host}:{port}", self._role, zone=zone, source=self.name)

    def _port_of(self, pod: Pod) -> int | None:
        if self._port.isdigit():
            return int(self._port)
        for container in pod["spec"]["containers"]:
            for port in container.get("ports") or ():
                if port.get("name") == self._port:
                    return int(port["containerPort"])
        log.debug("kubernetes.no_port", pod=pod["metadata"]["name"], port=self._port)
        return None

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


def _error(code: int, message: str) -> ApiRefused:
    if code == GONE:
        return ApiGone(message)
    return ApiRefused(f"the Kubernetes API answers {code}: {message or 'without a reason'}")
