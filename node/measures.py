"""What an engine process counts and times for the `/metrics` of its own node, and for nobody else.

`NodeLoad`, which routers steer by, goes to every edge worker five times a second and stays small. This is
told to whoever pings for it: the node's HTTP process.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from typing_extensions import override

from tandem.engine.step import StepCounts
from tandem.kvtransfer.events import ReceiverTimes, SenderTimes
from tandem.telemetry.histogram import Histogram, Spread
from tandem.wire.errors import TandemError
from tandem.wire.ids import Epoch
from tandem.wire.messages import Measured

# From a step of a few requests to one that compiles something.
_CPU_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5, 1)


class Measures:
    """What one engine process did.

    Args:
        steps: Of its engine; None where there is none to look at.

    Attributes:
        transfers: Of its transfer agent, which the role's host sets.
        tier_seconds: Tells how long requests waited for tiers; set where there are some.
        num_lost_edges: Edge workers whose connection broke or that fell silent.
    """

    def __init__(self, steps: StepCounts | None = None) -> None:
        self._steps = steps or StepCounts()
        self._step_cpu = Histogram(_CPU_SECONDS)
        self._cpu_s = 0.0  # since the last forward was collected
        self._refused: Counter[str] = Counter()
        self.transfers: SenderTimes | ReceiverTimes | None = None
        self.tier_seconds: Callable[[], Mapping[str, Spread]] = dict
        self.num_lost_edges = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time what the loop's own thread does in a step: all but the forward of a device that is the CPU.

        It is counted with the next forward that is collected, as its launch may be a step earlier.
        """
        steps, started_s = self._steps, time.thread_time()
        num_before, device_s = steps.num_collected, steps.host_cpu_s
        yield
        self._cpu_s += time.thread_time() - started_s - (steps.host_cpu_s - device_s)
        if steps.num_collected > num_before:
            self._step_cpu.observe(max(0.0, self._cpu_s))
            self._cpu_s = 0.0

    def refused(self, error: TandemError) -> None:
        """Count a request that is not taken."""
        self._refused[error.code] += 1

    def report(self, epoch: Epoch) -> Measured:
        """Return all of it. Names are those of `node/metrics.py`."""
        transfers = self.transfers
        return Measured(
            epoch=epoch,
            pid=os.getpid(),
            spreads={
                "step_cpu_seconds": self._step_cpu.spread(),
                "step_device_seconds": self._steps.device_seconds.spread(),
                "step_requests": self._steps.requests.spread(),
                "step_tokens": self._steps.tokens.spread(),
                **_spreads(transfers),
            },
            counts={
                "lost_edges": self.num_lost_edges,
                "lost_links": 0 if transfers is None else transfers.num_lost_links,
            },
            refused=dict(self._refused),
            tier_seconds=dict(self.tier_seconds()),
        )

    @override
    def __repr__(self) -> str:
        return f"Measures({self._steps!r}, {self.transfers!r})"


def _spreads(transfers: SenderTimes | ReceiverTimes | None) -> dict[str, Spread]:
    match transfers:
        case SenderTimes():
            return {
                "bootstrap_seconds": transfers.bootstrap_seconds.spread(),
                "push_seconds": transfers.push_seconds.spread(),
                "push_exposed_seconds": transfers.push_exposed_seconds.spread(),
            }
        case ReceiverTimes():
            return {"granted_seconds": transfers.granted_seconds.spread()}
        case None:
            return {}
