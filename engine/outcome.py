"""What a forward of a model computes, on its way from the device."""

import time
from dataclasses import dataclass

import torch

from tandem.engine.device import device_errors
from tandem.engine.forward import Ints
from tandem.engine.launched import ForwardTimes
from tandem.engine.logprobs import LogprobTensors
from tandem.wire.generation import TokenLogprobs


class OnHost:
    """Tensors on their way to the host, so that reading them waits for nothing queued later."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = tensors
        self._device = tensors[0].device if tensors else torch.device("cpu")
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
            with device_errors(self._device):
                self._event.synchronize()
        return self._copies


class Stopwatch:
    """Times what a device does between `Stopwatch(device)` and `stop`; the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._times = ForwardTimes(0.0)
        if device.type == "cuda":
            # Recorded on the stream that computes, where the copy to the host follows: who has read that
            # finds both events over.
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self._events = begin, end
        self._started_s, self._started_cpu_s = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        """What is to be timed was queued, or on a CPU done."""
        if self._events is not None:
            self._events[1].record()
        else:
            self._times = ForwardTimes(
                time.perf_counter() - self._started_s, time.thread_time() - self._started_cpu_s
            )

    def times(self) -> ForwardTimes:
        """Return what was timed. Only once something queued after `stop` was read."""
        if self._events is None:
            return self._times
        begin, end = self._events
        return ForwardTimes(begin.elapsed_time(end) / 1000)


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
class ModelOutcome:
    """An `Outcome` on a device.

    Attributes:
        ids: Tokens chosen.
        told: Rows with log-probabilities, and these.
        prompt_told: Those of prompts, chunk by chunk.
        stopwatch: Stopped before `ids` went on their way.
    """

    ids: OnHost
    told: tuple[list[int], LogprobRows] | None
    prompt_told: LogprobRows | None
    stopwatch: Stopwatch

    def token_ids(self) -> Ints:
        """See `Outcome.token_ids`."""
        (ids,) = self.ids.read()
        host: Ints = ids.numpy()
        return host

    def token_logprobs(self) -> dict[int, TokenLogprobs]:
        """See `Outcome.token_logprobs`."""
        if self.told is None:
            return {}
        rows, entries = self.told
        return dict(zip(rows, entries.read(), strict=True))

    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """See `Outcome.prompt_logprobs`."""
        return [] if self.prompt_told is None else self.prompt_told.read()

    def times(self) -> ForwardTimes:
        """See `Outcome.times`."""
        return self.stopwatch.times()
