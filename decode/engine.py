"""`python -m decode.engine`: the engine process of a decode node, started by its HTTP process."""

import sys

from typing_extensions import override

from decode.role import DecodeRole
from kvtransfer.receiver import DecodeAgent, ReceiverTimeouts
from kvtransfer.region import MemoryRegion
from kvtransfer.transports.base import TransportConfig
from kvtransfer.transports.registry import transports
from node.config import NodeConfig
from node.engine_host import Parts, PoolPlan, RoleHost, main


class _Host(RoleHost):
    _plan: PoolPlan
    _region: MemoryRegion | None = None
    _agent: DecodeAgent | None = None

    @override
    def memory(self, config: NodeConfig, plan: PoolPlan) -> memoryview:
        self._plan = plan
        # Only memory in a file can be mapped by a prefill of this host.
        is_shared = config.transfer.backend in ("auto", "shm")
        make = MemoryRegion.shared if is_shared else MemoryRegion.private
        self._region = make(plan.layout.pool_bytes)
        return self._region.buffer

    @override
    def role(self, parts: Parts) -> DecodeRole:
        assert self._region is not None
        config = parts.config
        self._agent = DecodeAgent(
            epoch=parts.epoch,
            fingerprint=parts.engine.shape.fingerprint,
            layout=self._plan.layout,
            region=self._region,
            transports=transports(config.transfer.backend, TransportConfig(host=config.host)),
            waker=parts.waker,
            key=parts.key,
            timeouts=ReceiverTimeouts(landed_s=config.transfer.landed_timeout_s),
        )
        return DecodeRole(
            parts.engine,
            self._agent,
            parts.answers,
            max_running=config.engine.max_running_requests,
            max_waiting=config.engine.max_waiting_requests,
        )

    @override
    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._region is not None:
            self._region.close()


if __name__ == "__main__":
    sys.exit(main(_Host()))
