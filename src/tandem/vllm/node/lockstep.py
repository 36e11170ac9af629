"""When the ranks of a data-parallel group step. Imports no vLLM.

A layer of experts exchanges tokens between all ranks, so a forward runs on every rank or on none: while one rank has
requests, ranks without requests run dummy batches. A sum over all ranks decides:

 - An idle group sums in every pass of its loops. It starts if a rank has requests.
 - A running group sums after every `interval` steps. It becomes idle if no rank has requests.

All ranks compute the same sums, so they are always in the same state. No rank needs a coordinator.
"""

from collections.abc import Callable, Sequence


class Lockstep:
    """The state of a group, as one of its ranks sees it.

    Args:
        sum_over_ranks: Returns the element-wise sum of a few integers over all ranks. Waits for the other ranks.
        num_ranks: Number of ranks.
        interval: Steps between two sums of a running group; equal on all ranks.

    Attributes:
        is_running: Whether every rank runs the next step.
        is_leaving: Whether this rank has no further use for the group. The rank sets it.
        can_leave: Whether all ranks are leaving.
    """

    def __init__(
        self,
        sum_over_ranks: Callable[[Sequence[int]], Sequence[int]],
        num_ranks: int,
        interval: int,
    ) -> None:
        self._sum, self._num_ranks, self._interval = sum_over_ranks, num_ranks, interval
        self._num_steps = 0
        self.is_running = self.is_leaving = self.can_leave = False

    def meet(self, *, has_requests: bool) -> None:
        """Start an idle group if a rank has requests; do nothing if it runs."""
        if not self.is_running:
            self._num_steps = 0
            self._agree(has_requests)

    def on_step(self, *, has_requests: bool) -> None:
        """Count a step of a running group. After every `interval` steps, stop the group if no rank has requests."""
        self._num_steps += 1
        if self._num_steps % self._interval == 0:
            self._agree(has_requests)

    def _agree(self, has_requests: bool) -> None:
        num_busy, num_leaving = self._sum([int(has_requests), int(self.is_leaving)])
        self.is_running = num_busy > 0
        self.can_leave = num_leaving == self._num_ranks
