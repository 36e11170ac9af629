"""What every role says of its engine's load, and the parts of log lines that roles share."""

from collections.abc import Sequence

from tandem.engine.core import Engine
from tandem.wire.messages import NodeLoad, TierLoad


def engine_load(
    engine: Engine,
    *,
    max_running: int = 0,
    num_waiting: int = 0,
    queued_tokens: int = 0,
    num_transferring: int = 0,
    pushed_bytes: int = 0,
    received_bytes: int = 0,
    saved_bytes: int = 0,
    num_corrupted: int = 0,
    num_refused_transfers: int = 0,
    num_strangers: int = 0,
    num_failed: int = 0,
    num_aborted: int = 0,
    tiers: Sequence[TierLoad] = (),
) -> NodeLoad:
    """Return the load of a node whose role adds these to what its engine counts."""
    pages = engine.counts()
    return NodeLoad(
        max_running=max_running,
        num_running=engine.num_running,
        num_waiting=engine.num_waiting + num_waiting,
        queued_tokens=engine.num_queued_tokens + queued_tokens,
        num_transferring=num_transferring,
        num_pages=pages.total,
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_held=pages.held,
        pages_granted=pages.granted,
        pages_quarantined=pages.quarantined,
        page_size=engine.cache.page_size,
        prompt_tokens=engine.num_prompt_tokens,
        cached_tokens=engine.num_cached_tokens,
        generated_tokens=engine.num_generated_tokens,
        num_retracted=engine.num_retracted,
        pushed_bytes=pushed_bytes,
        received_bytes=received_bytes,
        saved_bytes=saved_bytes,
        num_corrupted=num_corrupted,
        num_refused_transfers=num_refused_transfers,
        num_strangers=num_strangers,
        num_failed=num_failed,
        num_aborted=num_aborted,
        tiers=list(tiers),
    )


def token_usage(load: NodeLoad) -> float:
    """Return the share of pages that are neither free nor cached."""
    return 1 - (load.pages_free + load.pages_cached) / load.num_pages


def hit_rate(now: NodeLoad, before: NodeLoad) -> float:
    """Return the share of prompt tokens that came from the prefix cache, between two loads."""
    num_prompt = now.prompt_tokens - before.prompt_tokens
    return (now.cached_tokens - before.cached_tokens) / num_prompt if num_prompt else 0.0


def tier_hits(now: NodeLoad, before: NodeLoad) -> str:
    """Return the end of a log line: prompt tokens that came from each tier between two loads."""
    known = {tier.name: tier.hit_tokens for tier in before.tiers}
    return "".join(
        f", #{tier.name}-token: {tier.hit_tokens - known.get(tier.name, 0)}" for tier in now.tiers
    )
