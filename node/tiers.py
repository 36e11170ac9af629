"""Opens the tiers that the command line names, behind a pool that is there."""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.engine.core import Engine
from tandem.engine.shape import ModelShape
from tandem.kvtier.spec import make_tier, parse_tiers
from tandem.kvtier.stack import TierStack
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.config import NodeConfig, TierConfig
from tandem.node.pool_bytes import pool_pages
from tandem.node.rank_messages import FromTiers
from tandem.node.rank_tiers import RankTiers, RankTiersThread, RemoteTiers
from tandem.node.ranks import RankProcess
from tandem.node.tier_group import TierGroup, Tiers
from tandem.node.tiering import LOOKING_SHARE, Tiering
from tandem.telemetry.log import get_logger
from tandem.wire.channel import Waker

log = get_logger(__name__)


def open_tiers(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    waker: Waker,
    others: Sequence[RankProcess],
) -> Tiers | None:
    """Return what stands behind the pool of a node; None when there are no tiers.

    The caller closes it before the region. The other ranks open theirs by `open_rank_tiers`.

    Args:
        shape: Of rank 0's shard.
        region: Its pool.

    Raises:
        ConfigInvalid: A tier cannot be had so; the sentence says what to do.
    """
    own = _open_stack(config, shape, region, waker, rank=0)
    if own is None or not others:
        return own
    return TierGroup(own, [RemoteTiers(rank) for rank in others])


def open_rank_tiers(
    config: NodeConfig,
    shape: ModelShape,
    region: MemoryRegion | None,
    send: Callable[[FromTiers], None],
) -> RankTiersThread | None:
    """Return what stands behind the pool of this rank, which is not rank 0; see `open_tiers`.

    Args:
        send: Tells rank 0.

    Raises:
        ConfigInvalid: As there.
    """
    engine, waker = config.engine, Waker()
    stack = _open_stack(config, shape, region, waker, rank=engine.tp_rank)
    if stack is None:
        waker.close()
        return None
    space = shape.page_space(engine.page_size, engine.tp_rank, engine.tp_size)
    return RankTiersThread(RankTiers(stack, space.shard), waker, send)


def make_tiering(config: TierConfig, engine: Engine, stack: Tiers | None) -> Tiering[Any]:
    """Return what brings prefixes from a stack, or from nowhere."""
    return Tiering(
        engine,
        stack,
        timeout_s=config.timeout_s,
        min_tokens=config.min_tokens,
        # What only this node reads is worth a copy when it would be lost; others' prompts come at any time.
        saves_at_once=any(spec.kind != "host" for spec in parse_tiers(config.specs)),
    )


def _open_stack(
    config: NodeConfig, shape: ModelShape, region: MemoryRegion | None, waker: Waker, *, rank: int
) -> TierStack | None:
    engine, tiers = config.engine, config.tiers
    if not tiers.specs:
        return None
    assert region is not None, "a node with tiers has made its pool's memory itself"
    pages = pool_pages(region, shape.kv_bytes_per_token * engine.page_size)
    space = shape.page_space(engine.page_size, rank, engine.tp_size)
    opened = []
    for spec in parse_tiers(tiers.specs):
        opened.append(make_tier(spec, pages, space))
        log.info("kv_tier.opened", tier=spec.name, spec=spec.text)
    return TierStack(
        opened,
        pages,
        waker,
        timeout_s=LOOKING_SHARE * tiers.timeout_s,
        max_staged_bytes=tiers.staging_bytes // engine.tp_size,
        page_size=engine.page_size,
    )
