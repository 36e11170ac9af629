"""`python -m prefill.engine`: the engine process of a prefill node, started by its HTTP process."""

import sys

import torch
from typing_extensions import override

from kvtransfer.group import PrefillGroup
from kvtransfer.region import MemoryRegion
from kvtransfer.sender import PrefillAgent
from node.config import NodeConfig
from node.engine_host import Parts, PoolPlan, RoleHost, main
from node.pool_memory import bytes_of, make_region
from node.rank_agent import RemoteSender
from node.transfer import RankEnd, make_sender
from prefill.role import PrefillRole


class _Host(RoleHost):
    _plan: PoolPlan
    _region: MemoryRegion | None = None
    _agent: PrefillAgent | None = None

    @override
    def memory(self, config: NodeConfig, plan: PoolPlan) -> torch.Tensor:
        self._plan = plan
        self._region = make_region(config, plan.memory_bytes)
        return bytes_of(self._region)

    @override
    def role(self, parts: Parts) -> PrefillRole:
        assert self._region is not None
        shape, layout = parts.engine.shape, self._plan.layout
        self._agent = make_sender(
            parts.config,
            RankEnd(parts.epoch, shape.fingerprint, layout, self._region, shape.model_kv_heads),
            parts.waker,
            parts.key,
            port=parts.config.transfer.bootstrap_port,
            rank_ports=[rank.bootstrap_port for rank in parts.others],
        )
        others = [RemoteSender(rank) for rank in parts.others]
        agent = PrefillGroup(self._agent, others) if others else self._agent
        return PrefillRole(
            parts.engine,
            agent,
            parts.answers,
            parts.config.engine.max_waiting_requests,
            pushes_layers=parts.config.transfer.push_granularity == "layer",
        )

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
