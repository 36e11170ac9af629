"""The transfer agent of one rank: made alike on every rank of a node."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.kvtransfer.bootstrap import SenderEnd
from tandem.kvtransfer.layout import KVLayout
from tandem.kvtransfer.receiver import DecodeAgent, ReceiverTimeouts
from tandem.kvtransfer.region import MemoryRegion
from tandem.kvtransfer.sender import PrefillAgent, SenderTimeouts
from tandem.kvtransfer.sharding import Shard
from tandem.kvtransfer.transports.base import Transport, TransportConfig
from tandem.kvtransfer.transports.registry import transports
from tandem.node.config import NodeConfig
from tandem.wire.channel import Waker, tcp_address
from tandem.wire.ids import Epoch
from tandem.wire.keys import ChannelKey


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What one rank is to the ranks of other nodes.

    Attributes:
        model_kv_heads: Of the whole model; `layout` has this rank's.
    """

    epoch: Epoch
    fingerprint: str
    layout: KVLayout
    region: MemoryRegion
    model_kv_heads: int


def _transports(config: NodeConfig) -> list[Transport]:
    told = TransportConfig(
        host=config.host,
        interface=config.transfer.interface,
        directory=config.transfer.directory,
    )
    return transports(config.transfer.backend, told, config.engine.device)


def make_sender(
    config: NodeConfig,
    end: RankEnd,
    waker: Waker,
    key: ChannelKey | None,
    *,
    port: int,
    rank_ports: Sequence[int] = (),
) -> PrefillAgent:
    """Return a rank's prefill agent.

    Args:
        port: Where it takes grants; 0 takes any free one.
        rank_ports: Where the other ranks do, on rank 0.
    """
    return PrefillAgent(
        tcp_address(config.host, port),
        SenderEnd(
            end.epoch,
            end.fingerprint,
            end.layout,
            end.region,
            _transports(config),
            rank_ports=tuple(rank_ports),
            shard=_shard(config, end),
        ),
        waker=waker,
        key=key,
        timeouts=SenderTimeouts(
            grant_s=config.transfer.grant_timeout_s,
            early_grant_s=config.transfer.early_grant_timeout_s,
            heartbeat=config.heartbeat,
        ),
        verify=config.transfer.verify,
    )


def make_receiver(
    config: NodeConfig,
    end: RankEnd,
    waker: Waker,
    key: ChannelKey | None,
) -> DecodeAgent:
    """Return a rank's decode agent."""
    return DecodeAgent(
        epoch=end.epoch,
        fingerprint=end.fingerprint,
        layout=end.layout,
        region=end.region,
        transports=_transports(config),
        waker=waker,
        key=key,
        timeouts=ReceiverTimeouts(
            landed_s=config.transfer.landed_timeout_s, heartbeat=config.heartbeat
        ),
        verify=config.transfer.verify,
        shard=_shard(config, end),
    )


def _shard(config: NodeConfig, end: RankEnd) -> Shard:
    return Shard(config.engine.tp_rank, config.engine.tp_size, end.model_kv_heads)
