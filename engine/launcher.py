"""Launching a forward: inputs, the model, the choice of tokens; all queued on the device, nothing read.

Masks of grammars are built while the model runs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.device import device_errors
from tandem.engine.forward import ForwardInputs, Wrote
from tandem.engine.grammar import GrammarMasks, apply_masks
from tandem.engine.inputs import forward_inputs, prompt_rows
from tandem.engine.launched import ChunkEnd, Launched, sampled_of
from tandem.engine.logprobs import logprobs
from tandem.engine.outcome import LogprobRows, ModelOutcome, OnHost, Stopwatch
from tandem.engine.request import ActiveRequest
from tandem.engine.results import CompletePages
from tandem.engine.runner import Runner
from tandem.engine.sampler import SamplingColumns, adjustments, sample
from tandem.engine.scheduler import Batch
from tandem.engine.shape import ModelShape
from tandem.engine.slots import Slots
from tandem.wire.generation import GenerateRequest


class ModelLauncher:
    """Turns batches into forwards of a model under way; a `Launcher`.

    Args:
        runner: Computes over the pages that the engine counts.
        page_size: Of these.
    """

    def __init__(self, runner: Runner, shape: ModelShape, page_size: int) -> None:
        self._runner = runner
        self._eos_token_ids = shape.eos_token_ids
        self._page_size = page_size
        self._masks = GrammarMasks(shape.vocab_size)
        # What the newest forward chose, which the host may not know yet.
        self._newest: torch.Tensor | None = None

    @property
    def is_beside_host(self) -> bool:
        """See `Launcher.is_beside_host`."""
        return self._runner.device.type != "cpu"

    def check(self, request: GenerateRequest) -> None:
        """A model computes all that a request can ask for."""

    def seed(self, request: GenerateRequest, drawn: int) -> int:
        """See `Launcher.seed`."""
        del request
        return drawn

    def launch(
        self, batch: Batch, slots: Slots, pages: list[CompletePages], wrote: Wrote | None
    ) -> Launched:
        """See `Launcher.launch`."""
        with device_errors(self._runner.device):
            return self._launch(batch, slots, pages, wrote)

    def _launch(
        self, batch: Batch, slots: Slots, pages: list[CompletePages], wrote: Wrote | None
    ) -> Launched:
        sampled = sampled_of(batch)
        pending = self._masks.begin([request.grammar for request in sampled])
        inputs = forward_inputs(batch, slots, self._page_size)
        stopwatch = Stopwatch(self._runner.device)
        logits = self._runner.forward(inputs, self._newest, wrote)
        masks = pending.wait()
        chunks = [
            ChunkEnd(chunk, chunk.request.num_computed + chunk.num_tokens, prompt_rows(chunk))
            for chunk in batch.chunks
        ]
        rows = np.array([request.slot for request in sampled], np.int64)
        columns = SamplingColumns.of(slots, rows)
        is_special = slots.is_special[rows]
        ids, told = self._sample(logits[: len(sampled)], sampled, columns, is_special, masks)
        stopwatch.stop()
        self._newest = ids
        prompt_told = _prompt_logprobs(logits[len(sampled) :], chunks)
        outcome = ModelOutcome(OnHost(ids), told, prompt_told, stopwatch)
        return Launched(batch, chunks, pages, sampled, columns.indexes.tolist(), outcome)

    def warm_up(self) -> None:
        """See `Launcher.warm_up`."""
        one = np.zeros(1, np.int64)
        inputs = ForwardInputs(
            token_ids=np.zeros(3, np.int64),
            sources=np.full(3, -1),
            positions=np.array([0, 0, 1]) % self._page_size,
            query_starts=np.array([0, 1, 3], np.int32),
            kv_lens=np.array([1, 2], np.int32),
            page_table=np.zeros((2, 2), np.int32),  # what it leaves in page 0 is never read
            num_decodes=1,
            logit_rows=one,
        )
        self._runner.forward(inputs)

    def _sample(
        self,
        logits: torch.Tensor,
        sampled: Sequence[ActiveRequest],
        columns: SamplingColumns,
        is_special: npt.NDArray[np.bool_],
        masks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[list[int], LogprobRows] | None]:
        """Choose the tokens, and the log-probabilities of those rows that want them."""
        raw = logits
        if is_special.any():
            special = np.flatnonzero(is_special).tolist()
            logits = raw.to(torch.float32, copy=True)
            requests = [sampled[i] for i in special]
            if masks is not None:
                apply_masks(logits, masks)
            adjustments(special, requests, self._eos_token_ids, masks).apply(logits)
        ids = sample(logits, columns)
        rows = [i for i, request in enumerate(sampled) if request.request.logprobs is not None]
        if not rows:
            return ids, None
        num_top = [_num_top(sampled[i]) for i in rows]
        where = torch.tensor(rows, device=raw.device)
        found = logprobs(raw[where], ids[where], max(num_top))
        return ids, (rows, LogprobRows.start(found, num_top))


def _num_top(active: ActiveRequest) -> int:
    return 0 if active.request.logprobs is None else active.request.logprobs.num_top


def _prompt_logprobs(logits: torch.Tensor, chunks: Sequence[ChunkEnd]) -> LogprobRows | None:
    """Start reading the log-probabilities of prompt positions. Logits: one row for each."""
    if not len(logits):
        return None
    ids = [
        token
        for end in chunks
        for token in end.chunk.request.token_ids[end.told.start : end.told.stop]
    ]
    num_top = [_num_top(end.chunk.request) for end in chunks for _ in end.told]
    found = logprobs(logits, torch.tensor(ids, device=logits.device), max(num_top))
    return LogprobRows.start(found, num_top)
