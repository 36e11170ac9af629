"""The two questions that a router asks the Kubernetes API: which pods there are, and what changes.

The official client is not used: it is made for threads, generated from the whole API, and of it this
would take one call; waiting for events beside a server's other work is what aiohttp is here for.
"""

import ssl
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import msgspec

from tandem.router.config import KubernetesTarget
from tandem.wire.errors import ConfigInvalid

LIST_TIMEOUT_S = 30.0
# The server ends a watch after so long; one that is cut off without a word is noticed by then.
WATCH_S = 60
# etcd's limit for one object is 1.5 MiB.
MAX_EVENT_BYTES = 2 << 20
GONE = 410


class ApiRefused(Exception):
    """The API answered with an error; the message says what to do, for people."""


class ApiGone(ApiRefused):
    """What happened since the version asked for is not known any more: list again."""


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """What every object has."""

    name: str = ""
    labels: dict[str, str] = {}
    deletion_timestamp: str | None = None
    resource_version: str = ""


class Port(msgspec.Struct, frozen=True, rename="camel"):
    """One port of a container."""

    container_port: int
    name: str = ""


class Container(msgspec.Struct, frozen=True):
    """One container of a pod."""

    ports: list[Port] = []


class PodSpec(msgspec.Struct, frozen=True):
    """What a pod was asked to be."""

    containers: list[Container] = []


class PodStatus(msgspec.Struct, frozen=True):
    """What a pod is."""

    phase: str = ""
    ip: str = msgspec.field(name="podIP", default="")


class Pod(msgspec.Struct, frozen=True):
    """The part of a pod that is read."""

    metadata: Meta = Meta()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Bookmark(msgspec.Struct, frozen=True):
    """How far the watch is. Looks like a pod of which everything else is null."""

    metadata: Meta


class PodList(msgspec.Struct, frozen=True):
    """All pods at one version."""

    metadata: Meta
    items: list[Pod]


class Event(msgspec.Struct, frozen=True):
    """One change: ADDED, MODIFIED or DELETED of a pod; BOOKMARK; or ERROR of a `Failure`."""

    type: str
    object: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """Why the API did not do something."""

    message: str = ""
    code: int = 0


class PodApi:
    """Asks for the pods of one label selector.

    Raises:
        ConfigInvalid: The namespace or the authority of the API cannot be read.
    """

    def __init__(self, target: KubernetesTarget, selector: str) -> None:
        account = Path(target.account_dir)
        try:
            self.namespace = target.namespace or (account / "namespace").read_text().strip()
            is_tls = target.api_url.startswith("https://")
            self._tls = ssl.create_default_context(cafile=account / "ca.crt") if is_tls else True
        except OSError as error:
            raise ConfigInvalid(
                f"--discover-kubernetes: cannot read {error.filename}: {error.strerror}; run the router in "
                "a pod with a service account, or give --kubernetes-api and --kubernetes-namespace"
            ) from error
        self._token_file = account / "token"
        self._url = f"{target.api_url.rstrip('/')}/api/v1/namespaces/{self.namespace}/pods"
        self._selector = {"labelSelector": selector}

    def session(self) -> aiohttp.ClientSession:
        """Return the session that the questions take."""
        connector = aiohttp.TCPConnector(ssl=self._tls)
        return aiohttp.ClientSession(connector=connector, read_bufsize=MAX_EVENT_BYTES)

    async def pods(self, session: aiohttp.ClientSession) -> PodList:
        """Return all pods.

        Raises:
            ApiRefused: It may not be asked, or not like this.
            aiohttp.ClientError: It cannot be reached. TimeoutError likewise.
        """
        timeout = aiohttp.ClientTimeout(total=LIST_TIMEOUT_S)
        async with session.get(
            self._url, params=self._selector, headers=self._headers(), timeout=timeout
        ) as response:
            await self._check(response, "list")
            return msgspec.json.decode(await response.read(), type=PodList)

    async def changes(
        self, session: aiohttp.ClientSession, version: str
    ) -> AsyncGenerator[tuple[str, Pod] | None, None]:
        """Yield what changes after a version, as the event's type and the pod, until the server ends it.

        The first is None: the server tells what changes from now on, which may be nothing for long.

        Raises:
            ApiGone: The version is too old.
            ApiRefused: As `pods`.
            aiohttp.ClientError: As `pods`.
        """
        params = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        params |= self._selector | {"resourceVersion": version}
        timeout = aiohttp.ClientTimeout(total=WATCH_S + LIST_TIMEOUT_S)
        async with session.get(
            self._url, params=params, headers=self._headers(), timeout=timeout
        ) as response:
            await self._check(response, "watch")
            yield None
            async for line in response.content:
                event = msgspec.json.decode(line, type=Event)
                if event.type == "ERROR":
                    failure = msgspec.json.decode(event.object, type=Failure)
                    raise _error(failure.code, failure.message)
                if event.type == "BOOKMARK":
                    bookmark = msgspec.json.decode(event.object, type=Bookmark)
                    yield event.type, Pod(bookmark.metadata)
                else:
                    yield event.type, msgspec.json.decode(event.object, type=Pod)

    def _headers(self) -> dict[str, str]:
        """Return who asks. The token is read anew: Kubernetes renews it within the hour."""
        try:
            return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        except FileNotFoundError:  # such as through `kubectl proxy`
            return {}

    async def _check(self, response: aiohttp.ClientResponse, verb: str) -> None:
        if response.status == 200:
            return
        try:
            message = msgspec.json.decode(await response.read(), type=Failure).message
        except msgspec.MsgspecError:
            message = ""
        if response.status == 403:
            raise ApiRefused(
                f"may not {verb} pods in namespace {self.namespace!r} ({message}): bind the router's "
                "service account to a Role of that namespace with the rule apiGroups: [''], "
                "resources: [pods], verbs: [list, watch]"
            )
        raise _error(response.status, message)


def _error(code: int, message: str) -> ApiRefused:
    if code == GONE:
        return ApiGone(message)
    return ApiRefused(f"the Kubernetes API answers {code}: {message or 'without a reason'}")
