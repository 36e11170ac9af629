"""`python -m prefill.engine`: the engine process of a prefill node, started by its HTTP process."""

import sys

from typing_extensions import override

from kvtransfer.region import MemoryRegion
from kvtransfer.sender import PrefillAgent
from node.engine_host import Parts, PoolPlan, RoleHost, main
from prefill.role import PrefillRole


class _Host(RoleHost):
    def __init__(self) -> None:
        self._region: MemoryRegion | None = None
        self._plan: PoolPlan | None = None
        self._agent: PrefillAgent | None = None

    @override
    def memory(self, plan: PoolPlan) -> memoryview:
        self._plan = plan
        self._region = MemoryRegion.private(plan.size_bytes)
        return self._region.buffer

    @override
    def role(self, parts: Parts) -> PrefillRole:
        raise NotImplementedError

    @override
    def bootstrap_port(self) -> int | None:
        return None if self._agent is None else self._agent.port

    @override
    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._region is not None:
            self._region.close()


if __name__ == "__main__":
    sys.exit(main(_Host()))
