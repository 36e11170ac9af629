"""A cluster to be hurt: two prefill and two decode nodes, and two routers of which one has two edge workers.

```
 clients ─┬─▶ router a (edge workers a0, a1) ─┬─▶ prefill p0 p1
          └─▶ router b (one edge worker) ─────┴─▶ decode  d0 d1      each on a host and a disk of its own
```
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tandem.cli.up import free_ports
from tandem.node.models.checkpoint import resolve_model
from tandem.wire.keys import ChannelKey
from tests.faults.members import Disk, Member
from tests.faults.network import Loopback, Network, network_of
from tests.faults.probe import Probe
from tests.patience import until_async

SECRET = "of-the-fault-matrix"
# Of torch on several processes of a busy machine; it only guards against a hang.
START_TIMEOUT_S = 900.0
HEAL_TIMEOUT_S = 120.0
MAX_RUNNING = 6
# Stages long enough to be met: a prompt of 192 tokens takes 0.25 s, its 590 kB another 0.3 s at this rate.
PROFILE = {"prefill": {"base_ms": 10, "per_token_ms": 1.2}, "decode": {"base_ms": 30}}
DECODE_MBIT = 16.0
NUM_LAYERS = 4
SIMULATED = (
    *("--engine", "simulated", "--page-size", "16", "--max-total-tokens", "6144"),
    *("--chunked-prefill-size", "64", "--max-running-requests", str(MAX_RUNNING)),
    *("--transfer-backend", "tcp", "--verify-kv", "always", "--push-granularity", "chunk"),
)

# A tiny model that computes: several ranks are several processes, which a simulated engine has not.
RANKED = (
    *("--dtype", "float32", "--page-size", "8", "--chunked-prefill-size", "16"),
    *("--max-total-tokens", "4096", "--num-threads", "1", "--attention-backend", "torch"),
    *("--max-running-requests", str(MAX_RUNNING), "--transfer-backend", "tcp"),
)


def describe_model(directory: Path, profile: dict) -> Path:
    """Write what a simulated engine reads of a model with little KV; return the directory."""
    embedded = resolve_model(None, Path.home() / ".cache" / "tandem" / "models")
    target = directory / "model"
    target.mkdir()
    for file in (*embedded.glob("tokenizer*.json"), *embedded.glob("*.jinja")):
        shutil.copy(file, target)
    facts = json.loads((embedded / "config.json").read_text())
    facts["num_hidden_layers"] = NUM_LAYERS
    (target / "config.json").write_text(json.dumps(facts))
    (directory / "profile.json").write_text(json.dumps(profile))
    return target


# Short prompts too go through both nodes: what is hurt is the hand-off.
HANDED_OFF = ("--local-prefill-threshold", "0")


class NotWell(Exception):
    """A cluster did not heal."""


@dataclass(slots=True)
class Rig:
    """A running cluster.

    Attributes:
        members: By name: p0 ..., d0 ..., a, b.
        probes: Of the nodes, by name.
    """

    network: Network | Loopback
    model_dir: Path
    session: aiohttp.ClientSession
    members: dict[str, Member] = field(default_factory=dict)
    probes: dict[str, Probe] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Member]:
        return [m for m in self.members.values() if m.role != "router"]

    @property
    def routers(self) -> list[Member]:
        return [m for m in self.members.values() if m.role == "router"]

    def of_role(self, role: str) -> list[Member]:
        return [m for m in self.members.values() if m.role == role]

    async def get(self, url: str, timeout_s: float = 2) -> dict:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.session.get(url, timeout=timeout) as response:
            return await response.json(content_type=None)

    async def is_whole(self, router: Member) -> bool:
        """Tell whether every edge worker of a router, as far as it can be known, has every node."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            info = await self.get(f"{router.url}/server_info")
            return (
                all(node["is_up"] for node in info["nodes"])
                and all(worker["is_serving"] for worker in info.get("workers", []))
                and not info.get("silent_workers")
            )
        return False

    async def is_accounted(self) -> bool:
        return all(probe.unaccounted == 0 for probe in self.probes.values())

    async def start(self, *members: Member) -> None:
        for member in members:
            member.start()

    async def heal(self) -> float:
        """Start again what ended, wait until all is well, and return how long routers took to see it.

        Raises:
            NotWell: It did not become so in time.
        """
        await self.until(self._nodes_serve, "nodes serve", START_TIMEOUT_S)
        begun = time.monotonic()
        await self.until(self._routers_see_all, "routers have every node", HEAL_TIMEOUT_S)
        took_s = time.monotonic() - begun
        await self.until(self.is_accounted, "pages are free or cached", HEAL_TIMEOUT_S)
        return took_s

    async def _nodes_serve(self) -> bool:
        # Each time: a node whose rank was killed takes some seconds to end.
        await self.start(*(m for m in self.members.values() if not m.is_running))
        return all(probe.load is not None for probe in self.probes.values())

    async def _routers_see_all(self) -> bool:
        # Twice, for any worker answers.
        return all([await self.is_whole(r) for r in self.routers for _ in range(2)])

    async def until(self, is_so: Callable, what: str, within_s: float) -> None:
        try:
            await until_async(is_so, within_s)
        except TimeoutError:
            message = f"not within {within_s:g} s: {what}\n{self.describe()}"
            raise NotWell(message) from None

    def describe(self) -> str:
        loads = {name: str(probe.load) for name, probe in self.probes.items()}
        logs = [f"--- {m.name}\n{m.log_text()[-1500:]}" for m in self.members.values()]
        return "\n".join([json.dumps(loads, indent=1), *logs])


@contextlib.asynccontextmanager
async def running_rig(
    directory: Path,
    *,
    flags: Sequence[str] = SIMULATED,
    model_dir: Path | None = None,
    profile: dict = PROFILE,
    prefills: int = 2,
    decodes: int = 2,
    routers: Sequence[str] = ("a", "b"),
    decode_flags: Sequence[str] = (),
    router_flags: Sequence[str] = HANDED_OFF,
    is_networked: bool = True,
    shared_memory: str = "",
) -> AsyncIterator[Rig]:
    """Start a cluster, wait until both routers have every node, stop it at the end.

    Args:
        model_dir: A real model; None describes one to be simulated.
        shared_memory: A directory to be their /dev/shm; empty leaves them the machine's.
    """
    if model_dir is None:
        model_dir = describe_model(directory, profile)
        flags = [*flags, "--sim-profile", str(directory / "profile.json")]
    names = [*(f"p{i}" for i in range(prefills)), *(f"d{i}" for i in range(decodes)), *routers]
    with network_of(names, is_wanted=is_networked) as network, contextlib.ExitStack() as stack:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            # Whoever ends this process ends the cluster with it.
            loop, running = asyncio.get_running_loop(), asyncio.current_task()
            assert running is not None
            loop.add_signal_handler(signal.SIGTERM, running.cancel)
            rig = Rig(network, model_dir, session)
            flags = ["--model", str(model_dir), *flags]
            _add_members(rig, names, directory, flags, decode_flags, router_flags, shared_memory)
            for member in rig.members.values():
                stack.callback(member.disk.close)
            try:
                probing = [tasks.create_task(probe.run(session)) for probe in rig.probes.values()]
                if network.is_real:
                    for member in rig.of_role("decode"):
                        network.set_link(member.name, mbit=DECODE_MBIT)
                await rig.heal()
                yield rig
                for task in probing:
                    task.cancel()
            finally:
                loop.remove_signal_handler(signal.SIGTERM)
                for member in rig.members.values():
                    member.kill()


def _add_members(
    rig: Rig,
    names: Sequence[str],
    directory: Path,
    flags: Sequence[str],
    decode_flags: Sequence[str],
    router_flags: Sequence[str],
    shared_memory: str,
) -> None:
    key, ports = ChannelKey.from_secret(SECRET), iter(free_ports(3 * len(names)))
    env = {"TANDEM_CLUSTER_KEY": SECRET}
    pairs: dict[str, list[str]] = {"prefill": [], "decode": []}
    for name in names:
        host, port = rig.network.addresses[name], str(next(ports))
        url = f"http://{host}:{port}"
        at = ["--host", host, "--port", port]
        if name in ("p1", "d1"):
            at += ["--heartbeat-interval-ms", "250"]
        if name[0] == "p":
            role, bootstrap = "prefill", str(next(ports))
            argv = ["prefill", *at, "--bootstrap-port", bootstrap, *flags]
            pairs["prefill"] += [url, bootstrap]
        elif name[0] == "d":
            role = "decode"
            argv = ["decode", *at, *flags, *decode_flags]
            pairs["decode"].append(url)
        else:
            role, workers = "router", "2" if name == "a" else "1"
            argv = ["lb", *at, "--workers", workers, *router_flags]
            argv += ["--prefill", *pairs["prefill"], "--decode", *pairs["decode"]]
        disk = Disk(directory / name, is_real=os.geteuid() == 0)
        where = {"namespace": rig.network.namespace(name), "shared_memory": shared_memory}
        rig.members[name] = Member(name, role, url, argv, disk, env, **where)
        if role != "router":
            rig.probes[name] = Probe(url, key)
