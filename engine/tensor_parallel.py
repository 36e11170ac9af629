"""One model over several processes ("ranks"): each has a shard of the weights and of every page's heads.

```
 rank 0      engine ─▶ ShardedRunner.forward ─┬─▶ own shard ─▶ logits, complete
                             inputs           │       ║ all-reduce in every layer
 rank 1 … n  ◀─ Followers ────────────────────┴─▶ follow ─▶ own shard
```

Rank 0 alone schedules and samples; the others repeat its forwards, in its order. Page ids are the
same on every rank. How inputs get to the others is the caller's.

Ranks are processes of one host: gloo joins them on CPUs, NCCL on GPUs, where rank r has `cuda:r`
(not part of the tests: they have no two GPUs).
"""

import os
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from tandem.engine.config import EngineConfig
from tandem.engine.forward import ForwardInputs, Wrote
from tandem.engine.runner import Runner


class Followers(Protocol):
    """The other ranks."""

    def forward(self, inputs: ForwardInputs, num_sampled: int) -> None:
        """Have every one of them call `follow` with these, after what they were told before."""
        ...

    def abandon(self) -> None:
        """End them: they and rank 0 no longer compute the same."""
        ...


class ShardedRunner:
    """Rank 0's runner: a `Runner` whose forwards run on every rank."""

    def __init__(self, own: Runner, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    @property
    def device(self) -> torch.device:
        """Rank 0's."""
        return self._own.device

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        wrote: Wrote | None = None,
    ) -> torch.Tensor:
        """Run a forward on every rank; `wrote` is called for the layers of rank 0's shard.

        A forward that raises leaves the other ranks waiting: they are ended.
        """
        needs_sampled = sampled is not None and bool((inputs.sources >= 0).any())
        try:
            if sampled is not None and needs_sampled:
                self._followers.forward(inputs, len(sampled))
                dist.broadcast(sampled.contiguous(), src=0)
            else:
                self._followers.forward(inputs, 0)
            return self._own.forward(inputs, sampled, wrote)
        except BaseException:
            # Whatever it was, an interrupt too: the others wait in a collective that cannot end any more.
            self._followers.abandon()
            raise


def follow(
    runner: Runner, inputs: ForwardInputs, num_sampled: int, wrote: Wrote | None = None
) -> None:
    """Take part in one forward of rank 0.

    Args:
        num_sampled: Length of the `sampled` that rank 0 broadcasts first; 0 when it has none.
        wrote: Called for the layers of this rank's shard.
    """
    sampled = None
    if num_sampled:
        sampled = torch.empty(num_sampled, dtype=torch.int64, device=runner.device)
        dist.broadcast(sampled, src=0)
    runner.forward(inputs, sampled, wrote)


def join(config: EngineConfig, store: Path) -> None:
    """Meet the other ranks; returns when all are there. Each has taken its device before.

    Args:
        store: A file in a directory of this node's own, which does not exist before.
    """
    os.environ["LOCAL_RANK"] = str(config.tp_rank)  # where transformers looks for it
    dist.init_process_group(
        "nccl" if config.device.startswith("cuda") else "gloo",
        init_method=f"file://{store}",
        rank=config.tp_rank,
        world_size=config.tp_size,
    )


def least(value: int, config: EngineConfig) -> int:
    """Return the smallest value that any rank gave; every rank calls this once at a time."""
    if config.tp_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=config.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return int(shared.item())
