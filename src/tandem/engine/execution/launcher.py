"""Launches forwards of a model. Inputs, model and sampling are all queued on the device.

The host reads no results until the engine collects the forward.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import xgrammar

from tandem.engine.device import device_errors, to_device
from tandem.engine.execution.runner import Runner
from tandem.engine.grammar.processes import Constraint
from tandem.engine.sampling.penalties import Penalties
from tandem.engine.sampling.sampler import sample
from tandem.engine.scheduling.forward import (
    Batch,
    Chunk,
    ForwardInputs,
    Ints32,
    OnLayerWritten,
    Slots,
    forward_inputs,
)
from tandem.engine.scheduling.request import ActiveRequest
from tandem.engine.scheduling.step import Outcome
from tandem.engine.shape import ModelShape
from tandem.wire.generation import GenerateRequest, TokenLogprobs


class ModelLauncher:
    """A `Launcher` that runs a model. Its runner must use the same pages as the engine."""

    def __init__(self, runner: Runner, shape: ModelShape, page_size: int) -> None:
        self._runner = runner
        self._page_size = page_size
        self._penalties = Penalties(shape.vocab_size, shape.eos_token_ids, runner.device)
        # Ids that the newest forward sampled, on the device. The host may not have read them yet.
        self._newest: torch.Tensor | None = None

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device is not the CPU."""
        return self._runner.device.type != "cpu"

    def seed(self, request: GenerateRequest, drawn: int) -> int:
        """Return `drawn`."""
        del request
        return drawn

    def warm_up(self) -> None:
        """Run a forward with one decoding row and one chunk."""
        inputs = ForwardInputs(
            token_ids=np.zeros(3, np.int64),
            sources=np.full(3, -1),
            positions=np.array([0, 0, 1]) % self._page_size,
            query_starts=np.array([0, 1, 3], np.int32),
            kv_lens=np.array([1, 2], np.int32),
            page_table=np.zeros((2, 2), np.int32),  # the KV written to page 0 is never read
            num_decodes=1,
            logit_rows=np.zeros(1, np.int64),
        )
        self._runner.forward(inputs)

    def launch(
        self, batch: Batch, slots: Slots, on_layer_written: OnLayerWritten | None
    ) -> Callable[[], Outcome]:
        """Queue a forward and the sampling of its tokens.

        Raises:
            DeviceLost: The device is no longer usable.
        """
        with device_errors(self._runner.device):
            return self._launch(batch, slots, on_layer_written)

    def _launch(
        self, batch: Batch, slots: Slots, on_layer_written: OnLayerWritten | None
    ) -> Callable[[], Outcome]:
        sampled, rows = batch.sampled(), batch.sampled_rows()
        inputs = forward_inputs(batch, slots, self._page_size)
        stopwatch = _Stopwatch(self._runner.device)
        logits = self._runner.forward(inputs, self._newest, on_layer_written)
        masks = _stack_masks([request.grammar for request in sampled])
        raw = logits[: len(sampled)]
        is_changed = masks is not None or (slots.penalty_row[rows] >= 0).any()
        changed = raw
        if is_changed:
            changed = raw.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if masks is not None:
            xgrammar.apply_token_bitmask_inplace(changed, to_device(masks, changed.device))
        count = self._penalties.apply(changed, slots, rows, sampled)
        self._newest = ids = sample(changed, slots, rows)
        count(ids)
        token_logprobs = _token_logprobs(raw, ids, sampled)
        stopwatch.stop()
        prompt_logprobs = _prompt_logprobs(logits[len(sampled) :], batch.chunks)
        chosen = OnHost(ids)

        def read() -> Outcome:
            (tokens,) = chosen.read()
            return Outcome(
                tokens.numpy(), *stopwatch.times_s(), token_logprobs(), prompt_logprobs()
            )

        return read


def _stack_masks(constraints: Sequence[Constraint | None]) -> Ints32 | None:
    """Return a row of allowed tokens for each request; None if no request has a grammar."""
    masks = {
        row: constraint.mask.result()
        for row, constraint in enumerate(constraints)
        if constraint is not None
    }
    if not masks:
        return None
    stacked = np.full((len(constraints), len(next(iter(masks.values())))), -1, np.int32)
    for row, mask in masks.items():
        stacked[row] = mask
    return stacked


# ── log-probabilities of the model's distribution, before sampling parameters apply ──────────────


@torch.inference_mode()
def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: list[int]
) -> Callable[[], list[TokenLogprobs]]:
    """Start reading the log-probabilities of each row's token and of its `num_top` most likely tokens."""
    scores = logits.float().log_softmax(dim=-1)
    top = scores.topk(min(max(num_top), scores.shape[1]), dim=-1)
    on_host = OnHost(scores.gather(1, tokens.unsqueeze(1)).squeeze(1), top.values, top.indices)

    def read() -> list[TokenLogprobs]:
        columns = (tensor.tolist() for tensor in on_host.read())
        return [
            TokenLogprobs(logprob=own, top=list(zip(ids[:num], values[:num], strict=True)))
            for num, own, values, ids in zip(num_top, *columns, strict=True)
        ]

    return read


def _token_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, sampled: Sequence[ActiveRequest]
) -> Callable[[], dict[int, TokenLogprobs]]:
    rows = [row for row, request in enumerate(sampled) if request.request.logprobs is not None]
    if not rows:
        return dict
    where = to_device(np.array(rows), logits.device)
    read = _logprobs(logits[where], ids[where], [_num_top(sampled[row]) for row in rows])
    return lambda: dict(zip(rows, read(), strict=True))


def _prompt_logprobs(
    logits: torch.Tensor, chunks: Sequence[Chunk]
) -> Callable[[], list[TokenLogprobs]]:
    if not len(logits):
        return list
    positions = [
        (chunk.request, position) for chunk in chunks for position in chunk.logprob_positions
    ]
    ids = [request.token_ids[position] for request, position in positions]
    num_top = [_num_top(request) for request, _ in positions]
    return _logprobs(logits, to_device(np.array(ids), logits.device), num_top)


def _num_top(active: ActiveRequest) -> int:
    return 0 if active.request.logprobs is None else active.request.logprobs.num_top


# ── copies from the device ───────────────────────────────────────────────────────────────────────


class OnHost:
    """Copies of tensors to the host, started at once so that reading them does not wait for work queued later."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = tensors
        self._device = tensors[0].device
        if tensors[0].is_cuda:
            # A copy into pageable memory would wait for the device here.
            self._copies = tuple(
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in tensors
            )
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> tuple[torch.Tensor, ...]:
        """Wait for the copies and return them."""
        if self._event is not None:
            with device_errors(self._device):
                self._event.synchronize()
        return self._copies


class _Stopwatch:
    """Measures the device time from its creation to `stop`, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._times_s = 0.0, 0.0
        if device.type == "cuda":
            # The events are recorded on the compute stream, and the copy to the host follows on that stream. Once
            # the host has read the copy, both events are complete.
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self._events = begin, end
        self._started_s, self._started_cpu_s = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        """Stop the measurement. Call it after the work was queued or, on a CPU, done."""
        if self._events is not None:
            self._events[1].record()
        else:
            self._times_s = (
                time.perf_counter() - self._started_s,
                time.thread_time() - self._started_cpu_s,
            )

    def times_s(self) -> tuple[float, float]:
        """Return device time and CPU time in seconds. Call it only after reading a copy queued after `stop`."""
        if self._events is None:
            return self._times_s
        begin, end = self._events
        return begin.elapsed_time(end) / 1000, 0.0
