"""`python -m prefill.engine`: the engine process of a prefill node, started by its HTTP process."""

import sys

from typing_extensions import override

from kvtransfer.bootstrap import SenderEnd
from kvtransfer.region import MemoryRegion
from kvtransfer.sender import PrefillAgent, SenderTimeouts
from kvtransfer.transports.base import TransportConfig
from kvtransfer.transports.registry import transports
from node.config import NodeConfig
from node.engine_host import Parts, PoolPlan, RoleHost, main
from prefill.role import PrefillRole
from wire.channel import tcp_address


class _Host(RoleHost):
    _plan: PoolPlan
    _region: MemoryRegion | None = None
    _agent: PrefillAgent | None = None

    @override
    def memory(self, config: NodeConfig, plan: PoolPlan) -> memoryview:
        self._plan = plan
        self._region = MemoryRegion.private(plan.layout.pool_bytes)
        return self._region.buffer

    @override
    def role(self, parts: Parts) -> PrefillRole:
        assert self._region is not None
        config = parts.config
        end = SenderEnd(
            parts.epoch,
            parts.engine.shape.fingerprint,
            self._plan.layout,
            self._region,
            transports(config.transfer.backend, TransportConfig(host=config.host)),
        )
        self._agent = PrefillAgent(
            tcp_address(config.host, config.transfer.bootstrap_port),
            end,
            waker=parts.waker,
            key=parts.key,
            timeouts=SenderTimeouts(
                grant_s=config.transfer.grant_timeout_s,
                early_grant_s=config.transfer.early_grant_timeout_s,
            ),
            has_checksums=config.transfer.is_verified,
        )
        limit = config.engine.max_waiting_requests
        return PrefillRole(parts.engine, self._agent, parts.answers, limit)

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
