"""Runs one model on several processes ("ranks"). Each has a shard of the weights and of every page's heads.

```
 rank 0      engine ─▶ ShardedRunner.forward ─┬─▶ own shard ─▶ logits, complete
                             inputs           │       ║ all-reduce in every layer
 rank 1 … n  ◀─ Followers ────────────────────┴─▶ follow ─▶ own shard
```

Only rank 0 schedules and samples. The other ranks repeat its forwards in the same order. Page ids are the
same on every rank. The caller sends the inputs to the other ranks.

Ranks are processes on one host. They communicate by gloo on CPUs and by NCCL on GPUs, where rank r uses
`cuda:r`. The tests do not cover NCCL, because they have no two GPUs.
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
        """Make every other rank call `follow` with these arguments, in the order of these calls."""
        ...

    def abandon(self) -> None:
        """Terminate the other ranks, because they are out of step with rank 0."""
        ...


class ShardedRunner:
    """Rank 0's runner: a `Runner` whose forwards run on every rank."""

    def __init__(self, own: Runner, followers: Followers) -> None:
        self._own = own
        self._followers = followers

    @property
    def device(self) -> torch.device:
        """Rank 0's device."""
        return self._own.device

    def forward(
        self,
        inputs: ForwardInputs,
        sampled: torch.Tensor | None = None,
        wrote: Wrote | None = None,
    ) -> torch.Tensor:
        """Run a forward on every rank; `wrote` is called for the layers of rank 0's shard.

        An exception would leave the other ranks waiting, so it terminates them.
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
            # Any exception, even an interrupt, leaves the other ranks in a collective that cannot complete.
            self._followers.abandon()
            raise


def follow(
    runner: Runner, inputs: ForwardInputs, num_sampled: int, wrote: Wrote | None = None
) -> None:
    """Take part in one forward of rank 0.

    Args:
        num_sampled: Length of the `sampled` that rank 0 broadcasts first; 0 if it broadcasts none.
        wrote: Called for the layers of this rank's shard.
    """
    sampled = None
    if num_sampled:
        sampled = torch.empty(num_sampled, dtype=torch.int64, device=runner.device)
        dist.broadcast(sampled, src=0)
    runner.forward(inputs, sampled, wrote)


def join(config: EngineConfig, store: Path) -> None:
    """Join the process group; returns when all ranks have joined. Each rank must have set its device.

    Args:
        store: Path of a file that does not exist yet, in a directory private to this node.
    """
    os.environ["LOCAL_RANK"] = str(config.tp_rank)  # transformers reads it
    dist.init_process_group(
        "nccl" if config.device.startswith("cuda") else "gloo",
        init_method=f"file://{store}",
        rank=config.tp_rank,
        world_size=config.tp_size,
    )


def least(value: int, config: EngineConfig) -> int:
    """Return the minimum of `value` over all ranks. Collective: every rank must call it."""
    if config.tp_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=config.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return int(shared.item())
