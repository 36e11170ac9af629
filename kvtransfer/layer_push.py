"""Pushing the layers of pages while the forward that fills them still runs.

```
 forward begins ─▶ begin(runs) ─▶ wrote(0) wrote(1) ... ─▶ forward ends ─▶ push(run): what is left
                                  └─ every so many layers: push(run, layers)
```

Nothing depends on `wrote` being called: what it did not tell of is pushed at the end, so a forward
that cannot tell (a recorded one, say) is pushed as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.kvtransfer.layout import KVLayout
from tandem.wire.ids import Room

Wrote = Callable[[int], None]
"""Called with a layer's number once its K and V are in the pool; layers come in order."""

# Layers are put together until a push has as much: what a push costs beside the copy (two threads
# are woken, copies planned, ...) is then small beside the copy: with 4 MiB on two busy cores pushes of
# a 1k prompt fell behind its layers, with 8 MiB they do not. The last pushes of a forward halve, down
# to a quarter of it: nothing is computed any more beside the very last.
LEAST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PageRun:
    """Own pages of a room that a forward completes: the prompt's pages `first_page_index` on."""

    room: Room
    page_ids: Sequence[int]
    first_page_index: int


class LayerPush(Protocol):
    """See `PrefillAgent.push`."""

    def __call__(
        self, room: Room, page_ids: Sequence[int], first_page_index: int, layers: range | None
    ) -> None:
        """Queue the layers that are computed and were not pushed yet."""
        ...


def layers_at_a_time(runs: Sequence[PageRun], layout: KVLayout, least_bytes: int) -> int:
    """Return how many layers have that many bytes."""
    num_pages = sum(len(run.page_ids) for run in runs)
    if not num_pages:
        return layout.num_layers
    return min(
        layout.num_layers, -(-least_bytes * layout.num_layers // (num_pages * layout.page_bytes))
    )


def push_by_layer(
    push: LayerPush, runs: Sequence[PageRun], layout: KVLayout, least_bytes: int = LEAST_BYTES
) -> Wrote:
    """Return what a forward that completes `runs` calls. Any one thread may."""
    enough = layers_at_a_time(runs, layout, least_bytes)
    least = layers_at_a_time(runs, layout, least_bytes // 4)
    num_pushed = 0

    def wrote(layer: int) -> None:
        nonlocal num_pushed
        num_written = layer + 1
        num_left = layout.num_layers - num_written
        if num_written - num_pushed >= min(enough, max(num_left, least)) or not num_left:
            num_pushed = num_written
            for run in runs:
                push(run.room, run.page_ids, run.first_page_index, range(num_written))

    return wrote
