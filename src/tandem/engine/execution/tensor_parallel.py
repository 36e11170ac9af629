"""Runs a model on several processes ("ranks"). Each has a shard of the weights and of the KV heads of every page.

```
 rank 0      engine ─▶ ShardedRunner.forward ─┬─▶ own shard ─▶ logits, complete
                             inputs           │       ║ all-reduce in every layer
 rank 1 … n  ◀─ Followers ────────────────────┴─▶ follow ─▶ own shard
```

Only rank 0 schedules and samples. The other ranks repeat its forwards in the same order, with the same page ids.
The caller sends the inputs to the other ranks.

All ranks run on one host. They communicate through gloo on CPUs and through NCCL on GPUs, where rank r uses
`cuda:r`. The tests do not cover NCCL, which needs two GPUs.
"""

import os
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from tandem.engine.config import EngineOptions
from tandem.engine.execution.runner import Runner
from tandem.engine.scheduling.forward import ForwardInputs, OnLayerWritten


class Followers(Protocol):
    """The other ranks."""

    def forward(self, inputs: ForwardInputs, num_sampled: int) -> None:
        """Make every other rank call `follow` with these arguments, in the order of these calls."""
        ...

    def abandon(self) -> None:
        """Terminate the other ranks, which are out of step with rank 0."""
        ...


class ShardedRunner:
    """The `Runner` of rank 0, whose forwards run on every rank."""

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
        on_layer_written: OnLayerWritten | None = None,
    ) -> torch.Tensor:
        """Run a forward on every rank. `on_layer_written` is called for rank 0's shard.

        An exception terminates the other ranks, because it would leave them waiting.
        """
        needs_sampled = sampled is not None and bool((inputs.sources >= 0).any())
        try:
            if sampled is not None and needs_sampled:
                self._followers.forward(inputs, len(sampled))
                dist.broadcast(sampled.contiguous(), src=0)
            else:
                self._followers.forward(inputs, 0)
            return self._own.forward(inputs, sampled, on_layer_written)
        except BaseException:
            # Any exception, even an interrupt, leaves the other ranks in a collective that never completes.
            self._followers.abandon()
            raise


def follow(
    runner: Runner,
    inputs: ForwardInputs,
    num_sampled: int,
    on_layer_written: OnLayerWritten | None = None,
) -> None:
    """Take part in one forward of rank 0.

    Args:
        num_sampled: Length of the `sampled` that rank 0 broadcasts first; 0 if it broadcasts none.
        on_layer_written: Called for this rank's shard.
    """
    sampled = None
    if num_sampled:
        sampled = torch.empty(num_sampled, dtype=torch.int64, device=runner.device)
        dist.broadcast(sampled, src=0)
    runner.forward(inputs, sampled, on_layer_written)


def join(config: EngineOptions, store: Path) -> None:
    """Join the process group, and return when all ranks have joined. The rank's device must be set.

    Args:
        store: Path of a file to create, in a directory private to this node.
    """
    os.environ["LOCAL_RANK"] = str(config.tp_rank)  # transformers reads it
    dist.init_process_group(
        "nccl" if config.device.startswith("cuda") else "gloo",
        init_method=f"file://{store}",
        rank=config.tp_rank,
        world_size=config.tp_size,
    )


def min_over_ranks(value: int, config: EngineOptions) -> int:
    """Return the minimum of `value` over all ranks. This is a collective, so every rank must call it."""
    if config.tp_size == 1:
        return value
    shared = torch.tensor([value], dtype=torch.int64, device=config.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return int(shared.item())
