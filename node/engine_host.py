"""The engine process of a node: reads its config, loads the model, reports `Ready`, and runs the loop.

```
 parent (HTTP) ── stdin: a line of NodeConfig, then orders while the parent lives ──▶ engine
 parent (HTTP) ◀── stdout: a line of Ready or Failed, then reports ──────────────── engine
```

End of file on standard input is the order to stop, so an engine never outlives its parent, however the parent
died. Under tensor parallelism this process is rank 0. It starts the other ranks (`ranks.py`) and ends with them.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import msgspec

from tandem.engine.core import Engine
from tandem.engine.errors import DeviceLost
from tandem.engine.profile import Simulation
from tandem.engine.simulated import SimulatedLauncher, SimulatedPages, read_model
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent
from tandem.node.answers import Answers
from tandem.node.config import NodeConfig
from tandem.node.engine_process import Drained, Failed, Order, Ready, Report
from tandem.node.loop import EngineLoop
from tandem.node.metrics import Measures
from tandem.node.pool import MakeRegion, PoolPlan, checked_pages, make_region
from tandem.node.process import (
    SWITCH_S,
    StepWatch,
    allow_peers,
    claim_stdout,
    end_process_after,
    uncollected,
)
from tandem.node.ranks import Ranks
from tandem.node.role import Role
from tandem.node.tiering import Tiering, make_tiering
from tandem.node.tiers import open_group
from tandem.node.transfer import NodeAgent, RankAgent, join_ranks, open_agent
from tandem.telemetry import log as logs
from tandem.wire.channel import Inbox, Waker, tcp_address
from tandem.wire.errors import TandemError
from tandem.wire.generation import Epoch, new_epoch
from tandem.wire.keys import cluster_key
from tandem.wire.messages import ModelInfo, ToEngine

log = logs.get_logger(__name__)

# Time for the loop to send its last answers after a rank died. On CPUs a forward in progress fails at once.
RANK_LOST_GRACE_S = 2.0
# Time to release resources at the end: some of them may wait for the device.
DEVICE_LOST_GRACE_S = 2.0
# Tokens in a pool of pages without bytes. A 70B model's KV for them would take 320 GiB, as on a few large GPUs.
_TOKENS_WITHOUT_KV = 1 << 20


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts from which a role is built. `agent` acts for all ranks; None on a colocated node."""

    config: NodeConfig
    engine: Engine
    agent: NodeAgent | None
    answers: Answers
    tiering: Tiering


MakeRole = Callable[[Parts], Role[Any]]


class Hosted(Protocol):
    """An engine that serves under a node's HTTP process."""

    def run(self) -> int:
        """Serve; return the exit status, or raise the error for which it cannot start."""

    def close(self) -> None:
        """Release what outlives a process."""


def main(make_role: MakeRole) -> int:
    """Run an engine process to its end; return its exit status."""
    return host(lambda config, parent: _EngineProcess(config, make_role, parent))


class Parent:
    """The node's HTTP process, as its engine reports to it. `out`: claimed standard output."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def report(self, message: Report) -> None:
        """Send a report."""
        self._out.write(msgspec.json.encode(message) + b"\n")
        self._out.flush()

    def report_drained(self, number: int) -> None:
        """Report the end of a drain."""
        try:
            self.report(Drained(number=number))
        except OSError:  # the parent died: the end of standard input stops the loop
            log.debug("engine.parent_gone")

    @staticmethod
    def follow(loop: EngineLoop) -> None:
        """Have the parent's orders reach the loop; it stops when the parent ends."""
        threading.Thread(
            target=_take_orders, args=(loop,), name="parent-watch", daemon=True
        ).start()


def host(make: Callable[[NodeConfig, Parent], Hosted]) -> int:
    """Read the config from the parent, and run the engine that `make` returns for it; return the exit status."""
    # Ctrl-C, and sometimes SIGTERM, reaches the whole process group. The parent drains and decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    out = claim_stdout()
    sys.setswitchinterval(SWITCH_S)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeConfig)
    logs.configure(config.log_level, config.log_format, role=config.role)
    allow_peers()
    parent = Parent(out)
    process = make(config, parent)
    try:
        return process.run()
    except TandemError as error:
        parent.report(Failed(error=error.info()))
        return 1
    finally:
        process.close()


class _EngineProcess:
    """Builds the engine from the config and runs its loop."""

    def __init__(self, config: NodeConfig, make_role: MakeRole, parent: Parent) -> None:
        self._config, self._make_role, self._parent = config, make_role, parent
        self._waker = Waker()
        self._loop: EngineLoop | None = None
        self._lost_rank: TandemError | None = None
        self._plan: PoolPlan | None = None
        self._region: MemoryRegion | None = None
        self._agent: RankAgent | None = None
        self._ranks = (
            Ranks(config, self._waker.wake, self._rank_ended) if config.engine.tp_size > 1 else None
        )
        self._others = [] if self._ranks is None else self._ranks.others

    def run(self) -> int:
        """Serve; return the exit status."""
        config, epoch = self._config, new_epoch()
        key = cluster_key(config.host, is_insecure=config.is_insecure)
        engine = build_engine(config, self._make_region, self._waker, self._ranks)
        inbox: Inbox[ToEngine] = Inbox(
            tcp_address(config.host, config.engine_port), ToEngine, key, config.heartbeat
        )
        stack = open_group(config, engine.shape, self._region, self._waker, self._others)
        tiering = make_tiering(config.tiers, engine, stack)
        journals = {} if stack is None else stack.journals()
        answers = Answers(inbox, epoch, engine.cache.journal, journals)
        assert self._plan is not None, "an engine has a pool"
        self._agent = open_agent(
            config,
            self._plan,
            self._region,
            epoch=epoch,
            waker=self._waker,
            key=key,
            port=config.transfer.bootstrap_port,
            rank_ports=[rank.bootstrap_port for rank in self._others],
        )
        agent = join_ranks(self._agent, self._others)
        role = self._make_role(Parts(config, engine, agent, answers, tiering))
        times = None if self._agent is None else self._agent.times
        watch = StepWatch(config.step_timeout_s, engine.steps)
        loop = self._loop = EngineLoop(
            role,
            inbox,
            answers,
            self._waker,
            heartbeat=config.heartbeat,
            measures=Measures(engine.steps, times, tiering.seconds),
            on_drained=self._parent.report_drained,
            wait_s=tiering.wait_s,
            turned=watch.turned,
        )
        self._parent.follow(loop)
        self._parent.report(self._ready(epoch, engine, inbox.port))
        try:
            is_lost = not run_until_lost(loop)
        finally:
            watch.stop()
            inbox.close()
            if stack is not None:
                stack.close()  # before the pool's memory is released
        return int(is_lost or self._lost_rank is not None)

    def close(self) -> None:
        """Close the transfer agent, release the pool's memory, and end the other ranks."""
        self._close_memory()
        if self._ranks is not None:
            self._ranks.close()

    def _make_region(self, plan: PoolPlan) -> MemoryRegion | None:
        self._plan, self._region = plan, make_region(self._config, plan)
        return self._region

    def _close_memory(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._region is not None:
            self._region.close()

    def _ready(self, epoch: Epoch, engine: Engine, engine_port: int) -> Ready:
        config, shape = self._config, engine.shape
        return Ready(
            epoch=epoch,
            engine_port=engine_port,
            bootstrap_port=self._agent.port if isinstance(self._agent, PrefillAgent) else None,
            max_prompt_tokens=engine.max_tokens - 1,
            model=ModelInfo(
                name=config.served_model_name,
                fingerprint=shape.fingerprint,
                context_length=shape.context_length,
                vocab_size=shape.vocab_size,
                eos_token_ids=sorted(shape.eos_token_ids),
                default_sampling=config.default_sampling,
                weight_version=config.weight_version,
            ),
        )

    def _rank_ended(self, error: TandemError) -> None:
        """End this process, because the rank's shard of every request is lost. Called on the rank's reader thread."""
        log.error("rank.died", reason=str(error), effect="the node ends")
        self._lost_rank = error
        # The main thread may wait for the dead rank forever (NCCL does).
        end_process_after(RANK_LOST_GRACE_S)
        if self._loop is None:
            self._parent.report(Failed(error=error.info()))
            self._close_memory()  # the pool's file would outlive the process
            os._exit(1)
        self._loop.stop()  # the current pass still answers its requests


def build_engine(
    config: NodeConfig, make_region: MakeRegion, waker: Waker, ranks: Ranks | None = None
) -> Engine:
    """Make the engine that the config specifies, and its pool; raise `ConfigInvalid` if that is impossible."""
    if config.engine.simulation is not None:
        return build_simulated(config, config.engine.simulation, make_region)
    # A simulated engine never imports torch, which costs 200 MB and a second.
    with uncollected():
        from tandem.node.model_engine import build_model

    return build_model(config, make_region, waker, ranks)


def build_simulated(config: NodeConfig, simulation: Simulation, make_region: MakeRegion) -> Engine:
    """Make an engine whose forwards only take time; its pool has a model's size, or hardly any bytes."""
    settings = config.engine
    shape, ordinary_ids = read_model(settings, simulation.kv)
    num_tokens = settings.max_total_tokens or (
        settings.kv_bytes // shape.kv_bytes_per_token
        if simulation.kv == "real"
        else _TOKENS_WITHOUT_KV
    )
    plan = PoolPlan(shape, checked_pages(num_tokens // settings.page_size), settings.page_size)
    region = make_region(plan)
    pages = None
    if region is not None and config.role != "decode":
        bytes_ = region.array()[: plan.layout.pool_bytes]
        num_planes = sum(1 + bool(layer.value_dim) for layer in shape.kv_layers)
        pages = SimulatedPages(bytes_, plan.num_pages, plan.page_size, num_planes)
    log.info(
        "engine.simulated",
        model=config.served_model_name,
        fingerprint=shape.fingerprint,
        num_pages=plan.num_pages,
        max_total_tokens=plan.num_pages * plan.page_size,
        pool_bytes=plan.layout.pool_bytes if region is not None else 0,
    )
    launcher = SimulatedLauncher(simulation.profile, ordinary_ids, shape.num_layers, pages=pages)
    return Engine(launcher, shape, settings, plan.num_pages)


def run_until_lost(loop: EngineLoop) -> bool:
    """Run a loop until it is stopped; return False if its device was lost: this process then ends soon."""
    try:
        loop.run()
    except DeviceLost as lost:
        log.exception("device.lost", reason=str(lost), effect="the node ends")
        end_process_after(DEVICE_LOST_GRACE_S)
        return False
    return True


def _take_orders(loop: EngineLoop) -> None:
    # Not `sys.stdin`: this thread would hold its lock while it waits, and the process could not end.
    unread = b""
    while data := os.read(sys.stdin.fileno(), 4096):
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            loop.order(msgspec.json.decode(line, type=Order))
    loop.stop()
