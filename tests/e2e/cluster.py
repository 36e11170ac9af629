"""Real processes for tests: nodes and routers as a person starts them, on free loopback ports."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.cli.up import free_ports
from tandem.router.config import host_of
from tandem.wire.channel import Link, tcp_address, wait
from tandem.wire.errors import PeerLost
from tandem.wire.keys import ChannelKey
from tandem.wire.messages import FromEngine, Ping, Pong
from tests.patience import PATIENCE_S, eventually, patiently
from tests.processes import Process

# Of a machine that does other things, too: a process that ends is noticed at once.
START_TIMEOUT_S = 600
# Of requests that are to meet: on a machine that stood still meanwhile they may have missed each other.
MAX_ROUNDS = 10


def ask(
    url: str,
    body: dict | list | bytes | None = None,
    *,
    method: str | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """Send a request, a POST if it has a body; return status and JSON (or text), whatever the status."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            status, answer = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, answer = error.code, error.read()
    try:
        return status, json.loads(answer)
    except ValueError:
        return status, answer.decode()


def wait_healthy(url: str, *processes: Process) -> None:
    """Wait until `url` is healthy; fail with the logs when a process ends or time is up."""

    def logs() -> str:
        return "\n".join(f"--- {' '.join(each.argv)}\n{each.output()}" for each in processes)

    def is_healthy() -> bool:
        with contextlib.suppress(OSError):
            if ask(f"{url}/health")[0] == 200:
                return True
        assert all(each.is_running() for each in processes), f"a process ended:\n{logs()}"
        return False

    assert eventually(is_healthy, within_s=START_TIMEOUT_S), f"{url} is not healthy:\n{logs()}"


def info_of(url: str) -> dict:
    """Return a node's /server_info, once it has loaded: a cluster serves when its first decode node does."""
    assert eventually(lambda: ask(f"{url}/server_info")[0] != 503, within_s=START_TIMEOUT_S)
    return ask(f"{url}/server_info")[1]


def load_now(url: str, key: ChannelKey | None = None) -> dict:
    """Ask a node's engine for its load: /server_info has what it last said by itself, before what was done since."""
    info = info_of(url)
    link: Link = Link(tcp_address(host_of(url), info["engine_port"]), FromEngine, key)
    with contextlib.closing(link):
        is_asked = False
        for _ in patiently():
            with contextlib.suppress(PeerLost):  # not connected yet
                if not is_asked:
                    link.send(Ping())
                    is_asked = True
            wait([link], 0.02)
            while (message := link.receive()) is not None:
                if isinstance(message, Pong):
                    return msgspec.to_builtins(message.load)
    raise AssertionError(f"the engine of {url} does not answer")


class Cluster:
    """Prefills, decodes and a router, started with the three commands."""

    def __init__(
        self,
        *node_flags: str,
        prefills: int = 1,
        decodes: int = 1,
        router_flags: tuple = (),
        env: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        prefill_flags: tuple = (),
        decode_flags: tuple = (),
        is_fresh: bool = False,
    ) -> None:
        node_flags = (*node_flags, "--host", host)
        host = f"[{host}]" if ":" in host else host
        ports = iter(free_ports(2 * prefills + decodes + 1))
        self.processes: list[Process] = []
        self.prefill_urls, self.decode_urls = [], []
        bootstrap_ports = []
        for _ in range(prefills):
            port, bootstrap_port = next(ports), str(next(ports))
            self.prefill_urls.append(f"http://{host}:{port}")
            bootstrap_ports.append(bootstrap_port)
            argv = ["prefill", "--port", str(port), "--bootstrap-port", bootstrap_port]
            self.processes.append(
                Process(*argv, *node_flags, *prefill_flags, env=env, is_fresh=is_fresh)
            )
        for _ in range(decodes):
            port = next(ports)
            self.decode_urls.append(f"http://{host}:{port}")
            argv = ["decode", "--port", str(port), *node_flags, *decode_flags]
            self.processes.append(Process(*argv, env=env, is_fresh=is_fresh))
        port = next(ports)
        self.url = f"http://{host}:{port}"
        self.router = Process(
            *("lb", "--prefill", *self.prefill_urls),
            *("--prefill-bootstrap-ports", *bootstrap_ports),
            *("--decode", *self.decode_urls, "--port", str(port), "--host", host),
            # What a test asks for goes through both nodes, however short it is.
            *("--local-prefill-threshold", "0", *router_flags),
            env=env,
            is_fresh=is_fresh,
        )
        self.processes.append(self.router)

    def loads(self) -> list[dict]:
        """Return the load of every node at this moment; of a cluster without a secret."""
        return [load_now(url) for url in self.prefill_urls + self.decode_urls]

    def stop(self) -> list[int]:
        """Stop the router, then all nodes at once; return their exit statuses."""
        status = self.router.stop()
        nodes = self.processes[:-1]
        for node in nodes:
            node.interrupt()
        return [*(node.stop() for node in nodes), status]


@contextlib.contextmanager
def running_cluster(*node_flags: str, **settings) -> Iterator[Cluster]:
    """Start a cluster, wait until it serves, stop it at the end."""
    cluster = Cluster(*node_flags, **settings)
    try:
        wait_healthy(cluster.url, *cluster.processes)
        yield cluster
    finally:
        cluster.stop()


@contextlib.contextmanager
def running(*argv: str, port: int = 0, **how) -> Iterator[tuple[str, Process]]:
    """Start a command, yield its URL and process once it serves, stop it at the end."""
    port = port or free_ports(1)[0]
    process = Process(*argv, "--port", str(port), **how)
    try:
        wait_healthy(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.stop()


@contextlib.contextmanager
def running_router(cluster: Cluster, *flags: str) -> Iterator[str]:
    """Start one more router of the same nodes, yield its URL, stop it at the end."""
    nodes = ("--prefill", *cluster.prefill_urls, "--decode", *cluster.decode_urls)
    with running("lb", *nodes, *flags) as (url, _):
        yield url


@contextlib.contextmanager
def running_serve(*flags: str) -> Iterator[str]:
    """Start `tandem serve`, yield its URL, stop it at the end."""
    with running("serve", *flags) as (url, _):
        yield url
