"""`python -m tandem.node.rank`: one of the ranks beside rank 0, which starts it and ends it.

It repeats rank 0's forwards on its own shard, and its transfer agent and its tiers do what rank 0's do. All
that rank 0 says is done in the order it was said: a page is pushed, or saved, after the forward that wrote it.
"""

import signal
import sys
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from tandem.kvtier.stack import CLOSE_S
from tandem.node.engine_host import SWITCH_S, allow_peers
from tandem.node.quick_process import end_process, uncollected
from tandem.node.rank_agent import RankAgent, rank_agent
from tandem.node.rank_messages import (
    Forward,
    RankFailed,
    RankReady,
    RankStart,
    ToRank,
    ToTiers,
    unpack_inputs,
)
from tandem.node.rank_pipe import RankPipe, claim_stdout, end_process_after
from tandem.node.rank_tiers import RankTiersThread
from tandem.node.tiers import open_rank_tiers
from tandem.telemetry import log as logs
from tandem.wire.channel import Waker, wait
from tandem.wire.errors import TandemError

with uncollected():
    from tandem.engine.device import use_device
    from tandem.engine.runner import Runner
    from tandem.engine.tensor_parallel import follow, join
    from tandem.node.model_engine import build_shard

log = logs.get_logger(__name__)

# How long the end may take after rank 0 hung up: first of a forward under way or of tiers that hang, which takes
# `CLOSE_S` twice, then of the agent, whose memory would outlive the process. Less than `STOP_TIMEOUT_S`.
_END_TIMEOUT_S = 2 * CLOSE_S + 0.5


def main() -> int:
    """Run a rank to its end; return its exit status."""
    # Rank 0 decides when to end, and says so by hanging up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_S)
    pipe: RankPipe[ToRank] = RankPipe(sys.stdin.buffer, claim_stdout(), ToRank)
    start = pipe.receive()
    if not isinstance(start, RankStart):
        return 1
    config = start.config
    logs.configure(
        config.log_level, config.log_format, role=config.role, rank=config.engine.tp_rank
    )
    allow_peers()
    try:
        with ExitStack() as stack:
            _Rank(start, pipe, stack).run()
    except TandemError as error:
        pipe.send(RankFailed(error=error.info()))
        return 1
    return 0


class _Rank:
    """A shard, its agent, and the tiers behind its pool.

    Args:
        stack: Gives back what is made here.
    """

    def __init__(self, start: RankStart, pipe: RankPipe[ToRank], stack: ExitStack) -> None:
        self._pipe = pipe
        self._waker = Waker()
        stack.callback(self._waker.close)
        self._told: deque[ToRank] = deque()
        self._is_over = False
        threading.Thread(target=self._read, name="rank-0", daemon=True).start()
        use_device(start.config.engine)
        join(start.config.engine, Path(start.store))
        self._runner, self._agent, self._tiers = self._load(start, stack)

    def run(self) -> None:
        """Do what is told until rank 0 hangs up."""
        self._pipe.send(RankReady(bootstrap_port=self._agent.bootstrap_port))
        while not self._is_over:
            wait([], 1.0, self._waker)
            while self._told and not self._is_over:
                self._do(self._told.popleft())
                self._report()
            self._report()

    def _load(
        self, start: RankStart, stack: ExitStack
    ) -> tuple[Runner, RankAgent, RankTiersThread | None]:
        agent = rank_agent(start.config, self._waker)
        stack.callback(agent.close)
        runner, plan = build_shard(start.config, agent.memory)
        agent.start(plan)
        tiers = open_rank_tiers(start.config, plan.shape, agent.region, self._pipe.send)
        if tiers is not None:
            stack.callback(tiers.close)  # before the agent, and with it the pool's memory
        return runner, agent, tiers

    def _do(self, message: ToRank) -> None:
        if isinstance(message, Forward):
            wrote = self._agent.take_wrote()
            follow(self._runner, unpack_inputs(message), message.num_sampled, wrote)
        elif isinstance(message, ToTiers):
            assert self._tiers is not None
            self._tiers.do(message)
        else:
            self._agent.do(message)

    def _report(self) -> None:
        for event in self._agent.events():
            self._pipe.send(event)

    def _read(self) -> None:
        while (message := self._pipe.receive()) is not None:
            self._told.append(message)
            self._waker.wake()
        self._is_over = True
        self._waker.wake()
        # A forward that waits for a rank that is gone may never return.
        end_process_after(_END_TIMEOUT_S)


if __name__ == "__main__":
    end_process(main())
