"""The engine process of a node: reads its config, loads the model, reports `Ready` and runs the loop.

```
 parent (HTTP) ── stdin: a line of NodeConfig, then orders while the parent lives ──▶ engine
 parent (HTTP) ◀── stdout: a line of Ready or StartFailed, then reports ──────────── engine
```

End of file on standard input means stop, even while the model loads. So an engine never outlives its parent by more
than `STOP_TIMEOUT_S`, even if the parent is killed. With tensor parallelism this process is rank 0, which starts the
other ranks (`ranks.py`) and ends with them.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import msgspec

from tandem.engine.errors import DeviceLost
from tandem.engine.profile import Simulation
from tandem.engine.scheduling.core import Engine
from tandem.engine.simulated import SimulatedLauncher, SimulatedPages, read_model
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.answers import Answers
from tandem.node.config import NodeConfig
from tandem.node.life.ending import (
    SWITCH_S,
    StepWatch,
    allow_peers,
    claim_stdout,
    end_process_after,
    without_gc,
)
from tandem.node.life.engine_process import (
    STOP_TIMEOUT_S,
    Drained,
    EngineReport,
    Order,
    Ready,
    StartFailed,
)
from tandem.node.loop import EngineLoop
from tandem.node.metrics import Measures
from tandem.node.ranks.pool import MakeRegion, PoolPlan, checked_pages, make_region
from tandem.node.ranks.ranks import Ranks
from tandem.node.ranks.transfer import NodeAgent, RankAgent, join_ranks, open_agent
from tandem.node.role import Role
from tandem.node.tiers.tiering import Tiering, make_tiering
from tandem.node.tiers.tiers import open_group
from tandem.telemetry import log as logs
from tandem.wire.channel import Inbox, Waker, tcp_address
from tandem.wire.errors import TandemError
from tandem.wire.events.publisher import KvEventPublisher
from tandem.wire.generation import Epoch, new_epoch
from tandem.wire.keys import cluster_key
from tandem.wire.messages import ModelInfo, ToEngine

log = logs.get_logger(__name__)

# Time for the loop to send its last answers after a rank died. On CPUs a forward in progress fails immediately.
RANK_LOST_GRACE_S = 2.0
# Time to release resources after the device was lost; releasing some of them may hang on the device.
DEVICE_LOST_GRACE_S = 2.0
# Tokens in a pool without bytes. Their KV would take 320 GiB with a 70B model, as on a few large GPUs.
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


class OrderHandler(Protocol):
    """Carries out the parent's orders in the engine process. Any thread may call it."""

    def order(self, order: Order) -> None:
        """Carry out an order."""

    def stop(self) -> None:
        """Stop serving."""


class Hosted(Protocol):
    """An engine that serves under a node's HTTP process."""

    def run(self) -> int:
        """Serve; return the exit status. Raise a `TandemError` if the engine cannot start."""

    def close(self) -> None:
        """Release resources that would outlive the process."""


def main(make_role: MakeRole) -> int:
    """Run an engine process; return its exit status."""
    return host(lambda config, parent: _EngineMain(config, make_role, parent))


class Parent:
    """The engine's connection to the node's HTTP process. `out`: standard output, from `claim_stdout`."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._loop: OrderHandler | None = None

    def report(self, message: EngineReport) -> None:
        """Send a report."""
        self._out.write(msgspec.json.encode(message) + b"\n")
        self._out.flush()

    def report_drained(self, number: int) -> None:
        """Report the end of a drain."""
        try:
            self.report(Drained(number=number))
        except OSError:  # the parent died; end of file on standard input stops the loop
            log.debug("engine.parent_gone")

    def watch(self, close: Callable[[], None]) -> None:
        """Watch the parent in a thread, and end this process when the parent ends.

        `close` releases what would outlive this process. The thread calls it if no loop runs yet.
        """
        threading.Thread(
            target=self._take_orders, args=(close,), name="parent-watch", daemon=True
        ).start()

    def follow(self, loop: OrderHandler) -> None:
        """Pass the parent's orders to the loop from now on; stop the loop when the parent ends."""
        self._loop = loop

    def _take_orders(self, close: Callable[[], None]) -> None:
        # Not `sys.stdin`: a waiting read holds its lock, and the process could not exit.
        unread = b""
        while data := os.read(sys.stdin.fileno(), 4096):
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                assert self._loop is not None, "the parent sends orders after `Ready`"
                self._loop.order(msgspec.json.decode(line, type=Order))
        end_process_after(STOP_TIMEOUT_S)  # the main thread may hang on the device
        if self._loop is not None:
            self._loop.stop()
            return
        try:
            close()
        finally:
            os._exit(1)


def host(make: Callable[[NodeConfig, Parent], Hosted]) -> int:
    """Read the config from the parent and run the engine that `make` returns; return the exit status."""
    # Ctrl-C, and sometimes SIGTERM, reaches the whole process group. Only the parent acts on it: it drains first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    out = claim_stdout()
    sys.setswitchinterval(SWITCH_S)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeConfig)
    logs.configure(config.log_level, config.log_format, role=config.role)
    allow_peers()
    parent = Parent(out)
    process = make(config, parent)
    parent.watch(process.close)
    try:
        return process.run()
    except TandemError as error:
        parent.report(StartFailed(error=error.info()))
        return 1
    finally:
        process.close()


class _EngineMain:
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
        """Serve until the loop stops; return the exit status."""
        config, epoch = self._config, new_epoch()
        key = cluster_key(config.host, is_insecure=config.is_insecure)
        engine = build_engine(config, self._make_region, self._waker, self._ranks)
        inbox: Inbox[ToEngine] = Inbox(
            tcp_address(config.host, config.engine_port), ToEngine, key, config.heartbeat
        )
        publisher = None
        if config.kv_events.endpoint:
            publisher = KvEventPublisher(config.kv_events)
            engine.cache.listen(publisher)
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
            other_ports=[rank.bootstrap_port for rank in self._others],
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
            on_pass=watch.on_pass,
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
            if publisher is not None:
                publisher.close()
        return int(is_lost or self._lost_rank is not None)

    def close(self) -> None:
        """Close the transfer agent, release the pool's memory and end the other ranks."""
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
                aliases=list(config.served_model_names[1:]),
            ),
        )

    def _rank_ended(self, error: TandemError) -> None:
        """End this process, because the rank's shard of every request is lost. Runs on the rank's reader thread."""
        log.error("rank.died", reason=str(error), effect="the node exits")
        self._lost_rank = error
        # The main thread may wait forever for the dead rank (NCCL does).
        end_process_after(RANK_LOST_GRACE_S)
        if self._loop is None:
            self._parent.report(StartFailed(error=error.info()))
            self._close_memory()  # otherwise the pool's file would outlive the process
            os._exit(1)
        self._loop.stop()  # after the current pass has answered its requests


def build_engine(
    config: NodeConfig, make_region: MakeRegion, waker: Waker, ranks: Ranks | None = None
) -> Engine:
    """Make the engine and its pool from the config; raise `ConfigInvalid` if that is impossible."""
    if config.engine.simulation is not None:
        return build_simulated(config, config.engine.simulation, make_region)
    # Imported here, because a simulated engine does not need torch, which takes 200 MB and one second.
    with without_gc():
        from tandem.node.ranks.model_engine import build_model

    return build_model(config, make_region, waker, ranks)


def build_simulated(config: NodeConfig, simulation: Simulation, make_region: MakeRegion) -> Engine:
    """Make an engine whose forwards only take time; its pool has the model's size, or two bytes per token."""
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
    """Run a loop until it is stopped. If the device was lost, return False and end this process soon."""
    try:
        loop.run()
    except DeviceLost as lost:
        log.exception("device.lost", reason=str(lost), effect="the node exits")
        end_process_after(DEVICE_LOST_GRACE_S)
        return False
    return True
