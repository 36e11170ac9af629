"""Which KV heads each rank of a node holds, and which ranks of two nodes copy which heads. Pure.

```
 heads of the model   0 1 2 3 4 5 6 7
 prefill, --tp 2     │0 0 0 0│1 1 1 1│        0 → 0  heads 0-1      1 → 2  heads 4-5
 decode,  --tp 4     │0 0│1 1│2 2│3 3│        0 → 1  heads 2-3      1 → 3  heads 6-7
```

The two nodes may be of any two sizes. Heads that do not divide evenly go to the first ranks, one more
each; where there are more ranks than heads, several ranks hold a copy of the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.kvtransfer.plan import HeadRange


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of its node a rank is.

    Attributes:
        model_kv_heads: Of the whole model; 0 means as many as the rank's own layout has.
    """

    tp_rank: int = 0
    tp_size: int = 1
    model_kv_heads: int = 0


class RankPair(NamedTuple):
    """What one rank of prefill copies to one rank of decode; heads are counted within each rank.

    No heads at all means a rank of prefill that none is wanted of: a rank of decode speaks to it all
    the same, so that it hears when a room is over.
    """

    source: int
    destination: int
    heads: HeadRange


def held_heads(shard: Shard, own_kv_heads: int) -> list[range]:
    """Return which of the model's heads each rank of a node holds, given one of its ranks.

    Args:
        own_kv_heads: Held by that rank; all of the model's means that no rank's heads were split.

    Raises:
        ValueError: There can be no such rank.
    """
    num_heads, size = shard.model_kv_heads or own_kv_heads, shard.tp_size
    if not 0 <= shard.tp_rank < size:
        raise ValueError(f"there is no rank {shard.tp_rank} among {size}")
    if own_kv_heads == num_heads:
        return [range(num_heads)] * size
    held = _split(num_heads, size)
    if len(held[shard.tp_rank]) != own_kv_heads:
        raise ValueError(
            f"rank {shard.tp_rank} of {size} holds {own_kv_heads} of {num_heads} KV heads; "
            f"its share is {len(held[shard.tp_rank])}"
        )
    return held


def pair_ranks(sources: Sequence[range], destinations: Sequence[range]) -> list[RankPair]:
    """Return who copies what, so that each head of each destination is written exactly once.

    Where several sources hold the same heads they share the copies, in order: nodes that are split
    alike pair rank r with rank r. Rank 0 always copies to rank 0.

    Args:
        sources: The heads of each rank; any two are equal or have none in common.
        destinations: The heads of each rank; at least one rank.
    """
    replicas: dict[range, list[int]] = {}
    for rank, held in enumerate(sources):
        replicas.setdefault(held, []).append(rank)
    pairs = [pair for held, ranks in replicas.items() for pair in _share(held, ranks, destinations)]
    idle = set(range(len(sources))) - {pair.source for pair in pairs}
    pairs += [RankPair(rank, rank % len(destinations), HeadRange(0, 0, 0)) for rank in idle]
    return sorted(pairs)


def _split(num_heads: int, size: int) -> list[range]:
    if size > num_heads:
        copied = [rank * num_heads // size for rank in range(size)]
        return [range(head, head + 1) for head in copied]
    share, num_larger = divmod(num_heads, size)
    begins = [rank * share + min(rank, num_larger) for rank in range(size + 1)]
    return [range(begins[rank], begins[rank + 1]) for rank in range(size)]


def _share(held: range, ranks: Sequence[int], destinations: Sequence[range]) -> list[RankPair]:
    """Deal what is wanted of the heads `held` by each of `ranks` out to them, run after run."""
    wanted = [range(max(held.start, d.start), min(held.stop, d.stop)) for d in destinations]
    num_wanted = sum(len(run) for run in wanted)
    cuts = [-(-i * num_wanted // len(ranks)) for i in range(len(ranks) + 1)]
    pairs = []
    first = 0  # of a run, in the sequence of all that is wanted
    for destination, run in enumerate(wanted):
        for i, rank in enumerate(ranks):
            begin, end = max(first, cuts[i]), min(first + len(run), cuts[i + 1])
            if begin < end:
                head = run.start + begin - first
                heads = HeadRange(
                    head - held.start, head - destinations[destination].start, end - begin
                )
                pairs.append(RankPair(rank, destination, heads))
        first += len(run)
    return pairs
