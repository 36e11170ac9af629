"""`python -m tandem.node.rank SOCKET`: a rank other than 0. Rank 0 starts and ends the process; see `ranks.py`."""

import signal
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tandem.engine.forward import ForwardInputs
from tandem.kvtier.stack import CLOSE_S, TierEvent
from tandem.kvtransfer.push_room import PageRun, Wrote
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent
from tandem.node.config import NodeConfig
from tandem.node.pool import PoolPlan, make_region
from tandem.node.process import SWITCH_S, allow_peers, end_process, end_process_after, uncollected
from tandem.node.ranks import received
from tandem.node.tiers import RankTiers, open_tiers
from tandem.node.transfer import open_agent
from tandem.telemetry import log as logs
from tandem.wire.channel import Waker, wait
from tandem.wire.errors import TandemError
from tandem.wire.generation import new_epoch
from tandem.wire.keys import cluster_key

with uncollected():
    from tandem.engine.device import use_device
    from tandem.engine.tensor_parallel import follow, join
    from tandem.node.model_engine import build_shard

log = logs.get_logger(__name__)

# Time to end after rank 0 hung up: for a forward in progress or hanging tiers (`CLOSE_S` twice), then to close the
# agent and release memory that would outlive the process. Less than `STOP_TIMEOUT_S`.
END_TIMEOUT_S = 2 * CLOSE_S + 0.5


def main(descriptor: int) -> int:
    """Run a rank to its end; return its exit status."""
    # Rank 0 decides when this process ends, by hanging up.
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
            _Rank(config, store, link, stack).run()
    except TandemError as error:
        link.send(("failed", error))
        return 1
    except OSError as error:
        log.info("rank.orphaned", reason=str(error))
        return 1
    return 0


class _Rank:
    """A shard of the model with its transfer agent and tiers. `stack` releases them."""

    def __init__(self, config: NodeConfig, store: Path, link: Connection, stack: ExitStack) -> None:
        self._config, self._link, self._stack = config, link, stack
        self._sending = threading.Lock()
        self._calls: deque[tuple[str, str, tuple[object, ...], dict[str, object]]] = deque()
        self._is_over = False
        self._wrote: Wrote | None = None
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
        """Execute rank 0's calls until rank 0 hangs up."""
        self._report("ready", getattr(self._agent, "port", 0))
        while not self._is_over:
            wait([], 1.0, self._waker)
            while self._calls and not self._is_over:
                target, method, arguments, options = self._calls.popleft()
                getattr(self._targets[target], method)(*arguments, **options)
                self._report_transfers()
            self._report_transfers()

    def forward(self, inputs: ForwardInputs, num_sampled: int) -> None:
        """Run this rank's part of a forward."""
        wrote, self._wrote = self._wrote, None
        follow(self._runner, inputs, num_sampled, wrote)

    def push_by_layer(self, runs: Sequence[PageRun]) -> None:
        """Have the next forward report its layers to the agent."""
        assert isinstance(self._agent, PrefillAgent)
        self._wrote = self._agent.push_by_layer(runs)

    def _make_region(self, plan: PoolPlan) -> MemoryRegion | None:
        self._region = make_region(self._config, plan)
        if self._region is not None:
            self._stack.callback(self._region.close)
        return self._region

    def _open_tiers(self, plan: PoolPlan) -> RankTiers | None:
        # Tier events bypass this loop, so that rank 0 does not receive them a step late.
        opened = open_tiers(self._config, plan.shape, self._region, self._report_tiers)
        if opened is None:
            return None
        self._stack.callback(opened.close)  # runs before the agent and the pool's memory are closed
        engine = self._config.engine
        space = plan.shape.page_space(engine.page_size, engine.tp_rank, engine.tp_size)
        return RankTiers(opened, space.shard)

    # ── towards rank 0 ───────────────────────────────────────────────────────────────────────────

    def _report(self, source: str, event: object) -> None:
        with self._sending:
            self._link.send((source, event))

    def _report_transfers(self) -> None:
        for event in () if self._agent is None else self._agent.events():
            self._report("agent", event)

    def _report_tiers(self, event: TierEvent) -> None:
        with suppress(OSError):  # rank 0 is dead; the loop ends
            self._report("tiers", event)

    def _read(self) -> None:
        try:
            for call in received(self._link):
                self._calls.append(call)
                self._waker.wake()
        finally:
            self._is_over = True
            self._waker.wake()
            # A forward that waits for a dead rank may never return.
            end_process_after(END_TIMEOUT_S)


if __name__ == "__main__":
    end_process(main(int(sys.argv[1])))
