"""`python -m decode.engine`: the engine process of a decode node, started by its HTTP process."""

import sys

import torch
from typing_extensions import override

from decode.role import DecodeRole
from kvtransfer.group import DecodeGroup
from kvtransfer.receiver import DecodeAgent
from kvtransfer.region import MemoryRegion
from node.config import NodeConfig
from node.engine_host import Parts, PoolPlan, RoleHost, main
from node.pool_memory import bytes_of, make_region
from node.rank_agent import RemoteReceiver
from node.transfer import RankEnd, make_receiver


class _Host(RoleHost):
    _plan: PoolPlan
    _region: MemoryRegion | None = None
    _agent: DecodeAgent | None = None

    @override
    def memory(self, config: NodeConfig, plan: PoolPlan) -> torch.Tensor:
        self._plan = plan
        self._region = make_region(config, plan.memory_bytes)
        return bytes_of(self._region)

    @override
    def role(self, parts: Parts) -> DecodeRole:
        assert self._region is not None
        shape, layout = parts.engine.shape, self._plan.layout
        end = RankEnd(parts.epoch, shape.fingerprint, layout, self._region, shape.model_kv_heads)
        self._agent = make_receiver(parts.config, end, parts.waker, parts.key)
        others = [RemoteReceiver(rank) for rank in parts.others]
        return DecodeRole(
            parts.engine,
            DecodeGroup(self._agent, others) if others else self._agent,
            parts.answers,
            max_running=parts.config.engine.max_running_requests,
            max_waiting=parts.config.engine.max_waiting_requests,
        )

    @override
    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._region is not None:
            self._region.close()


if __name__ == "__main__":
    sys.exit(main(_Host()))
