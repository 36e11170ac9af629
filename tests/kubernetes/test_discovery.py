"""The source of pods against a real API server: what it knows follows what the server knows."""

import asyncio
import contextlib

import pytest

from tandem.router.config import KubernetesTarget
from tandem.router.discovery import KubernetesSource
from tandem.router.membership import SourceFailed
from tests.kubernetes.network import GATEWAY
from tests.kubernetes.pods import Pods
from tests.patience import PATIENCE_S

SELECTOR = "app=tandem,role=decode"


class Line:
    """A way to the API server that can be cut. It has the server's address, for which its certificate is."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task] = set()
        self._is_cut = False

    async def __aenter__(self) -> "Line":
        self._server = await asyncio.start_server(self._carry, GATEWAY, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.cut()
        self._server.close()
        await asyncio.gather(*self._carrying)

    def cut(self) -> None:
        self._is_cut = True
        for writer in self._open:
            writer.transport.abort()

    def mend(self) -> None:
        self._is_cut = False

    async def _carry(self, reader, writer) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        self._carrying.add(asyncio.current_task())
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(GATEWAY, self._port)
            self._open |= {writer, far_writer}
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))


async def _pump(reader, writer) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class Follower:
    """A source, and what it said last."""

    def __init__(self, source: KubernetesSource) -> None:
        self.source = source
        self.urls: set[str] = set()
        self.problem = ""

    async def follow(self) -> None:
        while True:
            try:
                self.urls = {member.url for member in await self.source.find()}
                self.problem = ""
            except SourceFailed as failed:
                self.problem = str(failed)
            await asyncio.sleep(0.05)

    async def knows(self, *addresses: str) -> None:
        """Wait until these are all that it knows."""
        wanted = urls_of(*addresses)
        async with asyncio.timeout(PATIENCE_S):
            while self.urls != wanted:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)

    async def fails(self) -> None:
        """Wait until it says that something is wrong."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.problem:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)


def urls_of(*addresses: str) -> set[str]:
    return {f"http://{address}:7000" for address in addresses}


@pytest.fixture
def account(control_plane, namespace):
    """Files of a service account that may list pods, as a router's pod has them."""
    common = ("--namespace", namespace)
    verbs = ("--verb", "list", "--resource", "pods")
    control_plane.kubectl("create", "serviceaccount", "router", *common)
    control_plane.kubectl("create", "role", "router", *verbs, *common)
    bound = ("--role", "router", f"--serviceaccount={namespace}:router")
    control_plane.kubectl("create", "rolebinding", "router", *bound, *common)
    return control_plane.service_account(namespace, "router")


@contextlib.asynccontextmanager
async def following(control_plane, account, selector=SELECTOR, api=""):
    target = KubernetesTarget(api_url=api or control_plane.url, account_dir=str(account))
    follower = Follower(KubernetesSource(target, "decode", selector))
    task = asyncio.create_task(follower.follow())
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_pod_is_a_node_from_when_it_runs_until_it_is_told_to_end(
    control_plane, namespace, account
):
    pods = Pods(control_plane.admin, namespace)
    pods.create("first", "decode")
    async with following(control_plane, account) as follower:
        await follower.knows()
        pods.run("first", "10.244.9.1", ready=False)  # the router sees by itself that it serves
        await follower.knows("10.244.9.1")
        pods.create("other-role", "prefill")
        pods.run("other-role", "10.244.9.2")
        pods.create("second", "decode")
        pods.run("second", "10.244.9.3")
        await follower.knows("10.244.9.1", "10.244.9.3")
        pods.run("first", "10.244.9.1", ready=True)

        ending = pods.delete("first")
        assert ending["metadata"]["deletionTimestamp"]
        assert {one["status"] for one in ending["status"]["conditions"]} == {"True"}, "ready still"
        await follower.knows("10.244.9.3")
        pods.forget("first")
        pods.create("first", "decode")  # as a StatefulSet names the one after it
        pods.run("first", "10.244.9.4")
        await follower.knows("10.244.9.3", "10.244.9.4")


async def test_labels_decide_at_any_time_who_is_a_node(control_plane, namespace, account):
    pods = Pods(control_plane.admin, namespace)
    for index in (1, 2):
        pods.create(f"pod-{index}", "decode")
        pods.run(f"pod-{index}", f"10.244.9.{index}")
    async with following(control_plane, account) as follower:
        await follower.knows("10.244.9.1", "10.244.9.2")
        pods.label("pod-1", role="prefill")
        await follower.knows("10.244.9.2")
        async with following(control_plane, account, "app=tandem,role=prefill") as prefills:
            await prefills.knows("10.244.9.1")
            pods.label("pod-1", role="decode")
            await prefills.knows()
        await follower.knows("10.244.9.1", "10.244.9.2")
        pods.label("pod-2", app=None)
        await follower.knows("10.244.9.1")


async def test_known_nodes_stay_while_the_api_is_away_and_what_was_missed_is_known_after(
    control_plane, namespace, account
):
    port = int(control_plane.url.rpartition(":")[2])
    pods = Pods(control_plane.admin, namespace)
    for index in (1, 2):
        pods.create(f"pod-{index}", "decode")
        pods.run(f"pod-{index}", f"10.244.9.{index}")
    async with (
        Line(port) as line,
        following(control_plane, account, api=f"https://{GATEWAY}:{line.port}") as away,
    ):
        await away.knows("10.244.9.1", "10.244.9.2")
        line.cut()
        await away.fails()
        pods.delete("pod-1")
        pods.forget("pod-1")
        assert away.urls == urls_of("10.244.9.1", "10.244.9.2")
        line.mend()
        await away.knows("10.244.9.2")
        assert away.problem == ""
