"""A forward under way, and the seam behind which it is computed and its tokens are chosen.

```
 engine ── batch ──▶ Launcher ─┬─ ModelLauncher (launcher.py)      a model on a device, a sampler
        ◀─ Launched ───────────┴─ SimulatedLauncher (simulated.py)  a clock, no model
```
"""

from dataclasses import dataclass
from typing import Protocol

from tandem.engine.batcher import Chunk
from tandem.engine.forward import Ints, Wrote
from tandem.engine.request import ActiveRequest
from tandem.engine.results import CompletePages
from tandem.engine.scheduler import Batch
from tandem.engine.slots import Slots
from tandem.wire.generation import GenerateRequest, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """How long one forward took.

    Attributes:
        device_s: From where the device began with it to where its tokens were chosen.
        host_cpu_s: How much of that was CPU time of the thread that launched it: of a device that is
            the CPU.
    """

    device_s: float
    host_cpu_s: float = 0.0


class Outcome(Protocol):
    """What a forward computes. It is read once, in the order of launches; reading waits for it."""

    def token_ids(self) -> Ints:
        """Return the tokens chosen, in the order of `Launched.sampled`."""
        ...

    def token_logprobs(self) -> dict[int, TokenLogprobs]:
        """Return log-probabilities of these, where wanted; by row of `Launched.sampled`."""
        ...

    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Return those of prompt positions, `ChunkEnd.told` of chunk after chunk."""
        ...

    def times(self) -> ForwardTimes:
        """Return how long it took. Only once its tokens were read."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkEnd:
    """One chunk of a forward, and what stands after it.

    Attributes:
        num_computed: Tokens of the request whose KV is then computed.
        told: Prompt positions whose log-probabilities it gives.
    """

    chunk: Chunk
    num_computed: int
    told: range


@dataclass(slots=True)
class Launched:
    """A forward that was begun.

    Attributes:
        pages: Pages of prompt-only requests that are complete after it.
        sampled: Requests whose next token it chooses: those that decode, then those whose prompt ends.
        indexes: Of these tokens.
    """

    batch: Batch
    chunks: list[ChunkEnd]
    pages: list[CompletePages]
    sampled: list[ActiveRequest]
    indexes: list[int]
    outcome: Outcome

    def participants(self) -> list[ActiveRequest]:
        """Return every request with a row in it, once."""
        return [*self.batch.decodes, *(chunk.request for chunk in self.batch.chunks)]


class Launcher(Protocol):
    """Computes forwards and chooses tokens. The engine is given one."""

    @property
    def is_beside_host(self) -> bool:
        """Whether forwards run while the host does other things."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Make sure that what a request asks for can be had.

        Raises:
            InvalidRequest: It cannot; the sentence says what.
        """
        ...

    def seed(self, request: GenerateRequest, drawn: int) -> int:
        """Return the key of a request's draws.

        Args:
            drawn: The client's seed, or one that was drawn where it gave none.
        """
        ...

    def launch(
        self, batch: Batch, slots: Slots, pages: list[CompletePages], wrote: Wrote | None
    ) -> Launched:
        """Begin a forward over `batch`; it may take tokens of the one launched before.

        Args:
            pages: Those it completes.
            wrote: Called with the numbers of layers, in order, as their K and V are in the pool;
                perhaps from another thread, perhaps not for all of them.
        """
        ...

    def warm_up(self) -> None:
        """Run what is compiled or allocated at its first use. Before the first request."""
        ...


def sampled_of(batch: Batch) -> list[ActiveRequest]:
    """Return the requests whose next token a forward over `batch` chooses, in order."""
    return batch.decodes + [chunk.request for chunk in batch.chunks if chunk.is_last]
