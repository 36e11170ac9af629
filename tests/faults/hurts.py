"""The faults: what is done to a process, and how it is undone."""

import asyncio
import contextlib
import functools
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path

import aiohttp

from tandem.wire.generation import new_room
from tests.faults.cells import DELAY_MS, LOSS, Cell
from tests.faults.members import Member
from tests.faults.rig import DECODE_MBIT, Rig
from tests.patience import PATIENCE_S
from tests.processes import children

# A process that was not granted memory before asks for more soon; it gets next to nothing.
MEMORY_BYTES = 256 << 10
# Nearly all pages of a decode node, as requests whose prefill never comes; and of a prefill node, as one.
HOG_PROMPTS, HOG_TOKENS = 4, 1500
LONG_TOKENS = 5600
# Bodies that are read into megabytes: the router refuses such prompts when it has read them.
MANY_IDS, NUM_LARGE, RANK_TOKENS = 30_000, 24, 400

Lift = Callable[[], None]


def nothing() -> None:
    """What ended stays so: `Rig.heal` starts it again."""


def victims_pids(cell: Cell, member: Member) -> list[int]:
    """Return the processes that a fault is for."""
    first = member.pid
    if cell.target in ("edge worker", "engine process"):
        return member.children()[:1]
    if cell.target == "TP rank":
        return sorted(children(member.children()[0]))[-1:]
    # A signal to end is for the first; killed or frozen is a container as a whole.
    return [first] if cell.fault == "SIGTERM" else member.tree()


def hurt(rig: Rig, cell: Cell, member: Member) -> Lift:
    """Do it; return what undoes it. A fault that ends a process has nothing to undo."""
    pids = victims_pids(cell, member)
    match cell.fault:
        case "SIGKILL" | "SIGTERM":
            number = getattr(signal, cell.fault)
            signal_all(pids, number)
            return nothing
        case "restart":
            member.kill()
            member.start()
            return nothing
        case "SIGSTOP":
            signal_all(pids, signal.SIGSTOP)
            return lambda: signal_all(pids, signal.SIGCONT)
        case "network cut":
            rig.network.set_link(member.name, is_cut=True)
            return lambda: rig.network.set_link(member.name, is_cut=False)
        case "delay and loss":
            # For this alone the link is as fast as it goes: TCP finds its own rate.
            mbit = DECODE_MBIT if member.role == "decode" else 0
            rig.network.set_link(member.name, delay_ms=DELAY_MS, loss=LOSS, mbit=0)
            return lambda: rig.network.set_link(member.name, delay_ms=0, loss=0, mbit=mbit)
        case "disk full":
            member.disk.fill()
            return member.disk.free
        case "memory limit":
            unlimit = limit_memory(pids, f"tandem-{os.getpid()}")
            return _cancelling(_ask_for_memory(rig, cell, member), then=unlimit)
        case "out of pages":
            return _cancelling(_take_pages(rig, member))
    raise ValueError(cell.fault)


def _cancelling(work: Coroutine[None, None, None], then: Lift = nothing) -> Lift:
    task = asyncio.ensure_future(work)

    def lift() -> None:
        task.cancel()
        then()

    return lift


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _take_pages(rig: Rig, member: Member) -> None:
    """Hold a node's pages until cancelled, with requests that speak to the nodes themselves."""
    prefill = member if member.role == "prefill" else rig.members["p0"]
    decode = member if member.role == "decode" else rig.members["d0"]
    info = await rig.get(f"{prefill.url}/server_info", PATIENCE_S)
    host, port = _bootstrap_of(info, rig, prefill)

    async def half(node: Member, room: int, num_tokens: int, first: int) -> None:
        params = {"max_new_tokens": 8, "temperature": 0}
        where = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        body = {"input_ids": [first, *range(5, 4 + num_tokens)], "sampling_params": params, **where}
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with rig.session.post(f"{node.url}/generate", json=body) as response:
                await response.read()

    async with asyncio.TaskGroup() as tasks:
        if member.role == "decode":
            for i in range(HOG_PROMPTS):
                tasks.create_task(half(decode, new_room(), HOG_TOKENS, 1000 + i))
        else:
            room = new_room()
            for node in (decode, prefill):
                tasks.create_task(half(node, room, LONG_TOKENS, 2000))


async def _ask_for_memory(rig: Rig, cell: Cell, member: Member) -> None:
    """Send what takes memory to read: a limit tells only whoever needs more than it has."""
    is_node = member.role != "router"
    ids = [300 + i % 30_000 for i in range(LONG_TOKENS if is_node else MANY_IDS)]
    if cell.target == "TP rank":  # it hears of prompts that are computed, and of nothing else
        member, is_node = rig.members["a"], False
        ids = [5 + i % 250 for i in range(RANK_TOKENS)]

    async def one(number: int) -> None:
        body: dict = {"input_ids": [*ids, number], "sampling_params": {"max_new_tokens": 2}}
        if is_node:
            where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1}
            body |= {**where, "bootstrap_room": new_room()}
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with rig.session.post(f"{member.url}/generate", json=body) as response:
                await response.read()

    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_LARGE):
            tasks.create_task(one(number))


def _bootstrap_of(info: dict, rig: Rig, prefill: Member) -> tuple[str, int]:
    return rig.network.addresses[prefill.name], info["bootstrap_port"]


MEMORY_V1, MEMORY_V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@functools.cache
def has_memory_limit() -> bool:
    """Tell whether processes can be put under a limit of memory here."""
    root, file = _memory_root()
    group = root / f"tandem-{os.getpid()}-try"
    try:
        group.mkdir()
    except OSError:
        return False
    has_it = (group / file).exists()
    group.rmdir()
    return has_it


def _memory_root() -> tuple[Path, str]:
    if MEMORY_V1.is_dir():
        return MEMORY_V1, "memory.limit_in_bytes"
    return MEMORY_V2, "memory.max"


def limit_memory(pids: list[int], name: str) -> Lift:
    """Grant processes hardly more memory than they have; the kernel ends what asks for more."""
    root, file = _memory_root()
    group = root / name
    group.mkdir(exist_ok=True)
    (group / file).write_text(str(MEMORY_BYTES))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(str(pid))
    return lambda: _forget(group)


def _forget(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):  # whoever is ending still holds it; the next limit takes it
        group.rmdir()
