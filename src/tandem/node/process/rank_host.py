"""`python -m tandem.node.process.rank_host SOCKET`: the process of a rank other than 0, started and ended by rank 0."""

import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tandem.engine.scheduling.forward import ForwardInputs
from tandem.kvtier.stack import CLOSE_S, TierEvent
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_rooms import OnLayerWritten, PageRun
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.life.ending import (
    SWITCH_S,
    allow_peers,
    end_process,
    end_process_after,
    without_gc,
)
from tandem.node.ranks.pool import PoolPlan, make_region
from tandem.node.ranks.ranks import messages_of
from tandem.node.ranks.transfer import open_agent
from tandem.node.tiers.tiers import RankTiers, open_tiers
from tandem.telemetry import log as logs
from tandem.wire.channel import Waker, wait
from tandem.wire.errors import TandemError
from tandem.wire.generation import new_epoch
from tandem.wire.keys import cluster_key

with without_gc():
    from tandem.engine.device import use_device
    from tandem.engine.execution.tensor_parallel import follow, join
    from tandem.node.ranks.model_engine import build_shard

log = logs.get_logger(__name__)

# Time limit for the exit after rank 0 closed the socket. `CLOSE_S` twice is for a forward in progress or tiers that
# hang, the rest for closing the agent and releasing memory that would outlive the process. Must be less than
# `STOP_TIMEOUT_S`.
END_TIMEOUT_S = 2 * CLOSE_S + 0.5


def main(descriptor: int) -> int:
    """Run a rank; return its exit status."""
    # Rank 0 ends this process by closing the socket.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    link = Connection(descriptor)
    config, store = link.recv()
    logs.configure(
        config.log_level, config.log_format, role=config.role, rank=config.engine.tp_rank
    )
    allow_peers()
    try:
        with ExitStack() as stack:
            _RankMain(config, store, link, stack).run()
    except TandemError as error:
        link.send(("failed", error))
        return 1
    except OSError as error:
        log.info("rank.orphaned", reason=str(error))
        return 1
    return 0


class _RankMain:
    """A shard of the model with its transfer agent and tiers. `stack` closes them."""

    def __init__(self, config: NodeConfig, store: Path, link: Connection, stack: ExitStack) -> None:
        self._config, self._link, self._stack = config, link, stack
        self._sending = threading.Lock()
        self._calls: deque[tuple[str, str, tuple[object, ...], dict[str, object]]] = deque()
        self._is_ending = False
        self._on_layer_written: OnLayerWritten | None = None
        self._region: MemoryRegion | None = None
        self._waker = Waker()
        stack.callback(self._waker.close)
        threading.Thread(target=self._read, name="rank-0", daemon=True).start()
        use_device(config.engine)
        join(config.engine, store)
        self._runner, plan = build_shard(config, self._make_region)
        self._agent = open_agent(
            config,
            plan,
            self._region,
            epoch=new_epoch(),
            waker=self._waker,
            key=cluster_key(config.host, is_insecure=config.is_insecure),
        )
        if self._agent is not None:
            stack.callback(self._agent.close)
        self._tiers = self._open_tiers(plan)
        self._targets = {"rank": self, "agent": self._agent, "tiers": self._tiers}

    def run(self) -> None:
        """Execute rank 0's calls until rank 0 closes the socket."""
        self._report("ready", getattr(self._agent, "port", 0))
        while not self._is_ending:
            wait([], 1.0, self._waker)
            while self._calls and not self._is_ending:
                target, method, arguments, options = self._calls.popleft()
                getattr(self._targets[target], method)(*arguments, **options)
                self._report_transfers()
            self._report_transfers()

    def forward(self, inputs: ForwardInputs, num_sampled: int) -> None:
        """Run this rank's part of a forward."""
        on_layer_written, self._on_layer_written = self._on_layer_written, None
        follow(self._runner, inputs, num_sampled, on_layer_written)

    def push_by_layer(self, runs: Sequence[PageRun]) -> None:
        """Push the layers of the next forward as they are written."""
        assert isinstance(self._agent, PrefillAgent)
        self._on_layer_written = self._agent.push_by_layer(runs)

    def _make_region(self, plan: PoolPlan) -> MemoryRegion | None:
        self._region = make_region(self._config, plan)
        if self._region is not None:
            self._stack.callback(self._region.close)
        return self._region

    def _open_tiers(self, plan: PoolPlan) -> RankTiers | None:
        # Tier events bypass this loop; otherwise rank 0 would receive them one step late.
        opened = open_tiers(self._config, plan.shape, self._region, self._report_tiers)
        if opened is None:
            return None
        self._stack.callback(opened.close)  # runs before the agent and the pool's memory are closed
        engine = self._config.engine
        space = plan.shape.page_space(engine.page_size, engine.tp_rank, engine.tp_size)
        return RankTiers(opened, space.shard)

    # ── messages to rank 0 ───────────────────────────────────────────────────────────────────────

    def _report(self, source: str, event: object) -> None:
        with self._sending:
            self._link.send((source, event))

    def _report_transfers(self) -> None:
        for event in () if self._agent is None else self._agent.events():
            self._report("agent", event)

    def _report_tiers(self, event: TierEvent) -> None:
        with suppress(OSError):  # rank 0 is dead, so the loop ends
            self._report("tiers", event)

    def _read(self) -> None:
        try:
            for call in messages_of(self._link):
                self._calls.append(call)
                self._waker.wake()
        finally:
            self._is_ending = True
            self._waker.wake()
            # A forward that waits for a dead rank may never return.
            end_process_after(END_TIMEOUT_S)


if __name__ == "__main__":
    end_process(main(int(sys.argv[1])))
