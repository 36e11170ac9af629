"""What the engine processes of prefill and decode have in common: the pool's memory, and an agent over it."""

from typing import Protocol

from typing_extensions import override

from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig
from tandem.node.engine_host import Parts, RoleHost
from tandem.node.pool_memory import make_region
from tandem.node.pool_plan import PoolPlan
from tandem.node.transfer import RankEnd


class Agent(Protocol):
    """An end of transfers."""

    def close(self) -> None:
        """Cut every peer off; nothing reads or writes the memory any more."""
        ...


class TransferHost(RoleHost):
    """Owns the memory, and the agent that `role` makes over it.

    Attributes:
        agent: Set by `role`.
    """

    agent: Agent | None = None
    _plan: PoolPlan

    @override
    def memory(self, config: NodeConfig, plan: PoolPlan) -> MemoryRegion:
        self._plan = plan
        self.region = make_region(config, plan.memory_bytes)
        return self.region

    def end(self, parts: Parts) -> RankEnd:
        """Return what this rank is to those of other nodes."""
        assert self.region is not None
        shape = parts.engine.shape
        return RankEnd(
            parts.epoch, shape.fingerprint, self._plan.layout, self.region, shape.model_kv_heads
        )

    @override
    def close(self) -> None:
        if self.agent is not None:
            self.agent.close()
        if self.region is not None:
            self.region.close()
