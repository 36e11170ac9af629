"""A forward under way: who takes part in it, and what it will have produced."""

from dataclasses import dataclass

import torch

from engine.batcher import Chunk
from engine.logprobs import LogprobTensors
from engine.request import ActiveRequest
from engine.results import CompletePages
from engine.scheduler import Batch
from wire.generation import TokenLogprobs


class OnHost:
    """Tensors on their way to the host, so that reading them waits for nothing queued later."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = tensors
        if tensors and tensors[0].is_cuda:
            # Into pinned memory, or the copy would wait for the device here and now.
            self._copies = tuple(
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            )
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> tuple[torch.Tensor, ...]:
        """Wait until they have arrived, and return them."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of some rows of a forward.

    Attributes:
        num_top: How many of the likeliest each row's request wants.
    """

    num_top: list[int]
    tensors: OnHost

    @classmethod
    def start(cls, tensors: LogprobTensors, num_top: list[int]) -> "LogprobRows":
        """Send them on their way to the host."""
        return cls(num_top, OnHost(tensors.chosen, tensors.top_values, tensors.top_ids))

    def read(self) -> list[TokenLogprobs]:
        """Wait for them; return one entry a row."""
        return LogprobTensors(*self.tensors.read()).read(self.num_top)


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
    """A forward that was queued on the device.

    Attributes:
        pages: Pages of prompt-only requests that are complete after it.
        sampled: Requests whose next token it samples, in the order of its ids: those that decode,
            then those whose prompt ends.
        indexes: Of these tokens.
        ids: On the device. Shape (len(sampled),).
        host_ids: The same, on their way.
        told: Rows of `sampled` with log-probabilities, and these.
        prompt_told: Those of prompts, chunk by chunk.
    """

    batch: Batch
    chunks: list[ChunkEnd]
    pages: list[CompletePages]
    sampled: list[ActiveRequest]
    indexes: list[int]
    ids: torch.Tensor
    host_ids: OnHost
    told: tuple[list[int], LogprobRows] | None
    prompt_told: LogprobRows | None

    def participants(self) -> list[ActiveRequest]:
        """Return every request with a row in it, once."""
        return [*self.batch.decodes, *(chunk.request for chunk in self.batch.chunks)]

    def token_logprobs(self) -> dict[int, TokenLogprobs]:
        """Wait for log-probabilities of sampled tokens; by row of `sampled`."""
        if self.told is None:
            return {}
        rows, entries = self.told
        return dict(zip(rows, entries.read(), strict=True))
