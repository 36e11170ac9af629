"""The transfer agents of a rank and of a node. Every rank makes its agent from the node's role."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

from tandem.kvtransfer.agents.group import DecodeGroup, PrefillGroup
from tandem.kvtransfer.agents.receiver import DecodeAgent
from tandem.kvtransfer.agents.sender import PrefillAgent
from tandem.kvtransfer.agents.sender_links import SenderEnd
from tandem.kvtransfer.agents.sender_rooms import OnLayerWritten, PageRun
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.registry import transports
from tandem.node.config import NodeConfig
from tandem.node.ranks.pool import PoolPlan
from tandem.node.ranks.ranks import RankProcess
from tandem.wire.channel import Waker, tcp_address
from tandem.wire.generation import Epoch
from tandem.wire.hand_off import RankAddress
from tandem.wire.keys import ChannelKey

RankAgent = PrefillAgent | DecodeAgent
NodeAgent = RankAgent | PrefillGroup | DecodeGroup


def open_agent(
    config: NodeConfig,
    plan: PoolPlan,
    region: MemoryRegion | None,
    *,
    epoch: Epoch,
    waker: Waker,
    key: ChannelKey | None,
    port: int = 0,
    other_ports: Sequence[int] = (),
) -> RankAgent | None:
    """Return this rank's transfer agent, or None on a colocated node.

    `port`: port on which a prefill agent accepts grants. `other_ports`: those of ranks 1 and up; only rank 0 knows them.
    """
    if config.role == "colocated":
        return None
    assert region is not None, "a node that transfers has allocated its pool's memory itself"
    engine, transfer = config.engine, config.transfer
    shard = Shard(engine.tp_rank, engine.tp_size, plan.shape.model_kv_heads)
    settings = transfer.of_transports(config.host, engine.tp_rank, engine.tp_size)
    allowed = transports(transfer.backend, settings, engine.device)
    if config.role == "prefill":
        return PrefillAgent(
            tcp_address(config.host, port),
            SenderEnd(
                epoch,
                plan.shape.fingerprint,
                plan.layout,
                region,
                allowed,
                ranks=[RankAddress(each) for each in (port, *other_ports)] if other_ports else (),
                shard=shard,
            ),
            waker=waker,
            key=key,
            timeouts=transfer.of_sender(config.heartbeat),
            verify=transfer.verify,
        )
    return DecodeAgent(
        epoch=epoch,
        fingerprint=plan.shape.fingerprint,
        layout=plan.layout,
        region=region,
        transports=allowed,
        waker=waker,
        key=key,
        timeouts=transfer.of_receiver(config.heartbeat),
        verify=transfer.verify,
        shard=shard,
    )


class RemoteAgent:
    """Rank 0's proxy for the transfer agent of another rank.

    It replaces a `PrefillAgent` or `DecodeAgent` and forwards each method call to the rank.
    """

    def __init__(self, rank: RankProcess) -> None:
        self._rank = rank

    def __getattr__(self, method: str) -> Callable[..., None]:
        return partial(self._rank.call, "agent", method)

    def push_by_layer(self, runs: Sequence[PageRun]) -> OnLayerWritten:
        """Push the layers of the rank's next forward as they are written."""
        self._rank.call("rank", "push_by_layer", runs)
        return lambda _layer: None

    def events(self) -> Iterator[Any]:
        """Yield the events that the agent reported since the last call."""
        return self._rank.take_events("agent")


def join_ranks(own: RankAgent | None, others: Sequence[RankProcess]) -> NodeAgent | None:
    """Combine the agents of all ranks; a single rank's agent is returned as it is."""
    remote = [RemoteAgent(rank) for rank in others]
    match own:
        case PrefillAgent() if remote:
            return PrefillGroup(own, cast("list[PrefillAgent]", remote))
        case DecodeAgent() if remote:
            return DecodeGroup(own, cast("list[DecodeAgent]", remote))
        case _:
            return own
