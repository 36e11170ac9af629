"""The engine process of a node: reads its config, loads the model, says that it is ready, loops.

```
 parent (HTTP) ── stdin: a line of NodeConfig, then orders while the parent lives ──▶ engine
 parent (HTTP) ◀── stdout: a line of Ready or Failed, then reports ──────────────── engine
```

Standard input's end is the order to stop, so an engine never outlives its parent, however that died.
Under tensor parallelism this is rank 0, which starts the others (`ranks.py`) and ends with them.
"""

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import msgspec

from tandem.engine.core import Engine
from tandem.engine.errors import DeviceLost
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.answers import Answers
from tandem.node.config import NodeConfig
from tandem.node.engine_report import Drained, Failed, Order, Ready, Report
from tandem.node.loop import EngineLoop, Role
from tandem.node.measures import Measures
from tandem.node.pool_plan import PoolPlan
from tandem.node.quick_process import uncollected
from tandem.node.rank_pipe import claim_stdout, end_process_after
from tandem.node.ranks import RankProcess, Ranks
from tandem.node.step_watch import StepWatch
from tandem.node.tiering import Tiering
from tandem.node.tiers import make_tiering, open_tiers
from tandem.telemetry import log as logs
from tandem.wire.channel import Inbox, Waker, tcp_address
from tandem.wire.descriptors import PER_LINK, allow_descriptors
from tandem.wire.errors import TandemError
from tandem.wire.ids import Epoch, new_epoch
from tandem.wire.keys import ChannelKey, cluster_key
from tandem.wire.messages import ToEngine

log = logs.get_logger(__name__)

# Time for the loop's last answers after a rank died. On CPUs a forward under way fails at once.
RANK_LOST_GRACE_S = 2.0
# For what is given back at the end: some of it may wait for the device.
DEVICE_LOST_GRACE_S = 2.0
# How long a thread in the interpreter makes another wait. The pushing thread waits for the loop's after the
# last layer, when every tenth of a millisecond is in the time to the second token; Python's own is 5 ms.
SWITCH_S = 0.0005
# How many there will be nobody says. Each has a link, and up to four streams of its transport.
NUM_PEERS, DESCRIPTORS_PER_PEER = 64, PER_LINK + 4


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role is built from.

    Attributes:
        measures: What this process counts for operators; the role's host adds its agent's.
        tiering: What brings prefixes from the tiers behind the pool, if there are any.
        others: The ranks beside this one.
    """

    config: NodeConfig
    epoch: Epoch
    engine: Engine
    answers: Answers
    waker: Waker
    key: ChannelKey | None
    measures: Measures
    tiering: Tiering[Any]
    others: Sequence[RankProcess] = ()


class RoleHost(ABC):
    """What differs between the engine processes of the roles.

    `memory` is called once, before `role`.

    Attributes:
        region: What `memory` returned.
    """

    region: MemoryRegion | None = None

    def memory(self, config: NodeConfig, plan: PoolPlan) -> MemoryRegion | None:
        """Return the memory of the pool, which stays this host's; None where nobody else needs it."""
        del config, plan
        return None

    @abstractmethod
    def role(self, parts: Parts) -> Role:
        """Return the role."""

    def bootstrap_port(self) -> int | None:
        """Return where grants are taken, on prefill."""
        return None

    def close(self) -> None:  # noqa: B027 - a role that made nothing gives nothing back
        """Give back what `memory` and `role` made."""


def main(host: RoleHost) -> int:
    """Run an engine process to its end; return its exit status."""
    # Ctrl-C reaches the whole group, and so may SIGTERM; the parent drains, and decides what ends when.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = _Parent(claim_stdout())
    sys.setswitchinterval(SWITCH_S)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeConfig)
    logs.configure(config.log_level, config.log_format, role=config.role)
    allow_peers()
    process = _EngineProcess(config, host, parent)
    try:
        return process.run()
    except TandemError as error:
        parent.tell(Failed(error=error.info()))
        return 1
    finally:
        host.close()
        process.close()


def allow_peers() -> None:
    """Let this process have as many links as it may; warn when they will be few."""
    allow_descriptors(NUM_PEERS * DESCRIPTORS_PER_PEER, used_for=f"links to {NUM_PEERS} nodes")


class _Parent:
    """Standard output, where reports go."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def tell(self, message: Report) -> None:
        """Say what became of this process, or of an order."""
        self._out.write(msgspec.json.encode(message) + b"\n")
        self._out.flush()


class _EngineProcess:
    """From the config to the end of the loop."""

    def __init__(self, config: NodeConfig, host: RoleHost, parent: _Parent) -> None:
        self._config = config
        self._host = host
        self._parent = parent
        self._waker = Waker()
        self._loop: EngineLoop | None = None
        self._lost_rank: TandemError | None = None
        self._ranks = (
            Ranks(config, self._waker, self._rank_ended) if config.engine.tp_size > 1 else None
        )

    def run(self) -> int:
        """Serve; return the exit status."""
        config, host, epoch = self._config, self._host, new_epoch()
        key = cluster_key(config.host, is_insecure=config.is_insecure)
        engine = build_engine(config, host, self._waker, self._ranks)
        address, heartbeat = tcp_address(config.host, config.engine_port), config.heartbeat
        inbox: Inbox[ToEngine] = Inbox(address, ToEngine, key, heartbeat)
        others = () if self._ranks is None else self._ranks.others
        stack = open_tiers(config, engine.shape, host.region, self._waker, others)
        tiering = make_tiering(config.tiers, engine, stack)
        journals = {} if stack is None else stack.journals()
        answers = Answers(inbox, epoch, engine.cache.journal, journals)
        measures = Measures(engine.steps)
        measures.tier_seconds = tiering.seconds
        parts = Parts(config, epoch, engine, answers, self._waker, key, measures, tiering, others)
        role = host.role(parts)
        watch = StepWatch(config.step_timeout_s, engine.steps)
        loop = self._loop = EngineLoop(
            role,
            inbox,
            answers,
            self._waker,
            heartbeat=heartbeat,
            measures=measures,
            on_drained=self._tell_drained,
            wait_s=tiering.wait_s,
            turned=watch.turned,
        )
        threading.Thread(
            target=_take_orders, args=(loop,), name="parent-watch", daemon=True
        ).start()
        shape = engine.shape
        self._parent.tell(
            Ready(
                epoch=epoch,
                engine_port=inbox.port,
                bootstrap_port=host.bootstrap_port(),
                fingerprint=shape.fingerprint,
                context_length=shape.context_length,
                max_prompt_tokens=engine.max_tokens - 1,
                vocab_size=shape.vocab_size,
                eos_token_ids=sorted(shape.eos_token_ids),
            )
        )
        try:
            loop.run()
        except DeviceLost as lost:
            log.exception("device.lost", reason=str(lost), effect="the node ends")
            end_process_after(DEVICE_LOST_GRACE_S)
            return 1
        finally:
            watch.stop()
            inbox.close()
            if stack is not None:
                stack.close()  # while the pool's memory is there
        return int(self._lost_rank is not None)

    def close(self) -> None:
        """End the other ranks."""
        if self._ranks is not None:
            self._ranks.close()

    def _tell_drained(self, number: int) -> None:
        try:
            self._parent.tell(Drained(number=number))
        except OSError:  # the parent died: the end of standard input stops the loop
            log.debug("engine.parent_gone")

    def _rank_ended(self, error: TandemError) -> None:
        """A rank is gone: what it held of every request is, too. Called by the rank's reader."""
        log.error("rank.died", reason=str(error), effect="the node ends")
        self._lost_rank = error
        if self._loop is None:
            self._parent.tell(Failed(error=error.info()))
            # The main thread may wait for the dead rank for good, and the pool's file would outlive the process.
            end_process_after(RANK_LOST_GRACE_S)
            self._host.close()
            os._exit(1)
        # The loop answers its requests and ends, unless it waits for the dead rank: NCCL may for ever.
        end_process_after(RANK_LOST_GRACE_S)
        self._loop.stop()


def build_engine(
    config: NodeConfig, host: RoleHost, waker: Waker, ranks: Ranks | None = None
) -> Engine:
    """Make the engine that was asked for, and its pool in the memory that the role gives.

    Raises:
        ConfigInvalid: The model cannot be loaded, or no page fits.
    """
    # What one needs the other never loads: torch alone is 200 MB and a second.
    simulation = config.engine.simulation
    if simulation is not None:
        from tandem.node.simulated_engine import build_simulated

        return build_simulated(config, simulation, partial(host.memory, config))
    with uncollected():
        from tandem.node.model_engine import build_model

    return build_model(config, partial(host.memory, config), waker, ranks)


def _take_orders(loop: EngineLoop) -> None:
    # Not through `sys.stdin`, whose lock a thread that waits there would hold while the process ends.
    unread = b""
    while data := os.read(sys.stdin.fileno(), 4096):
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            loop.order(msgspec.json.decode(line, type=Order))
    loop.stop()
