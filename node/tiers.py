"""Opens the tiers that the command line names, behind a pool that is there."""

from typing import Any

from engine.core import Engine
from kvtier.spec import make_tier, parse_tiers
from kvtier.stack import TierStack
from kvtransfer.region import MemoryRegion
from node.config import TierConfig
from node.pool_bytes import pool_pages
from node.tiering import LOOKING_SHARE, Tiering
from telemetry.log import get_logger
from wire.channel import Waker

log = get_logger(__name__)


def open_tiers(
    config: TierConfig, engine: Engine, region: MemoryRegion | None, waker: Waker
) -> TierStack | None:
    """Return the stack, which the caller closes before the region; None when there are no tiers.

    Raises:
        ConfigInvalid: A tier cannot be had so; the sentence says what to do.
    """
    if not config.specs:
        return None
    assert region is not None, "a node with tiers has made its pool's memory itself"
    cache = engine.cache
    assert cache.space is not None
    pages = pool_pages(region, engine.shape.kv_bytes_per_token * cache.page_size)
    tiers = []
    for spec in parse_tiers(config.specs):
        tiers.append(make_tier(spec, pages, cache.space))
        log.info("kv_tier.opened", tier=spec.name, spec=spec.text)
    return TierStack(
        tiers,
        pages,
        waker,
        timeout_s=LOOKING_SHARE * config.timeout_s,
        max_staged_bytes=config.staging_bytes,
        page_size=cache.page_size,
    )


def make_tiering(config: TierConfig, engine: Engine, stack: TierStack | None) -> Tiering[Any]:
    """Return what brings prefixes from a stack, or from nowhere."""
    return Tiering(
        engine,
        stack,
        timeout_s=config.timeout_s,
        min_tokens=config.min_tokens,
        # What only this node reads is worth a copy when it would be lost; others' prompts come at any time.
        saves_at_once=any(spec.kind != "host" for spec in parse_tiers(config.specs)),
    )
