"""The KV heads of each rank of a node, and the heads copied between the ranks of two nodes. Pure.

```
 heads of the model   0 1 2 3 4 5 6 7
 prefill, --tp 2     │0 0 0 0│1 1 1 1│        0 → 0  heads 0-1      1 → 2  heads 4-5
 decode,  --tp 4     │0 0│1 1│2 2│3 3│        0 → 1  heads 2-3      1 → 3  heads 6-7
```

The nodes may have any number of ranks. If the heads do not divide evenly, the first ranks hold one more each. If
there are more ranks than heads, several ranks hold a copy of the same head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.kvtransfer.plan import HeadRange


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of the heads of its node.

    Attributes:
        model_kv_heads: KV heads of the whole model; 0 means as many as in the rank's own layout.
    """

    tp_rank: int = 0
    tp_size: int = 1
    model_kv_heads: int = 0


class RankPair(NamedTuple):
    """The heads that a prefill rank copies to a decode rank, as indices within each rank.

    A pair without heads connects a prefill rank that has nothing to push, so that the rank still learns when a
    room is over.
    """

    source: int
    destination: int
    heads: HeadRange


def held_heads(shard: Shard, own_kv_heads: int) -> list[range]:
    """Return the model's heads that each rank of a node holds, derived from one of its ranks.

    Args:
        own_kv_heads: KV heads of that rank; if it holds all of the model's, every rank does.

    Raises:
        ValueError: Rank and number of heads contradict each other.
    """
    num_heads, size = shard.model_kv_heads or own_kv_heads, shard.tp_size
    if not 0 <= shard.tp_rank < size:
        raise ValueError(f"rank {shard.tp_rank} is not one of {size} ranks")
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
    """Return pairs of ranks such that each head of each destination is written exactly once.

    Sources that hold the same heads share the copies, in order: two nodes with equal splits pair rank r with
    rank r. Rank 0 always copies to rank 0.

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
    """Split the copies of the heads `held`, which each of `ranks` holds, evenly among those ranks."""
    runs = [range(max(held.start, d.start), min(held.stop, d.stop)) for d in destinations]
    num_heads = sum(len(run) for run in runs)
    cuts = [-(-i * num_heads // len(ranks)) for i in range(len(ranks) + 1)]
    pairs = []
    first = 0  # index of the run's first head in the sequence of all runs
    for destination, run in enumerate(runs):
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
