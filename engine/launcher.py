"""Launching a forward: inputs, the model, the choice of tokens; all queued on the device, nothing read.

Masks of grammars are built while the model runs.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.grammar import GrammarMasks, apply_masks
from engine.inputs import forward_inputs, prompt_rows
from engine.launched import ChunkEnd, Launched, LogprobRows, OnHost
from engine.layer_events import Wrote
from engine.logprobs import logprobs
from engine.model import ModelShape
from engine.request import ActiveRequest
from engine.results import CompletePages
from engine.runner import Runner
from engine.sampler import SamplingColumns, adjustments, sample
from engine.scheduler import Batch
from engine.slots import Slots


class Launcher:
    """Turns batches into forwards under way."""

    def __init__(self, runner: Runner, shape: ModelShape, slots: Slots, page_size: int) -> None:
        self._runner = runner
        self._eos_token_ids = shape.eos_token_ids
        self._slots = slots
        self._page_size = page_size
        self._masks = GrammarMasks(shape.vocab_size)

    def launch(
        self,
        batch: Batch,
        before: Launched | None,
        pages: list[CompletePages],
        wrote: Wrote | None,
    ) -> Launched:
        """Queue a forward over `batch`.

        Args:
            before: The forward under way, whose tokens this one may take from the device.
            pages: Those it completes.
            wrote: See `Runner.forward`.
        """
        slots = self._slots
        sampled = batch.decodes + [chunk.request for chunk in batch.chunks if chunk.is_last]
        pending = self._masks.begin([request.grammar for request in sampled])
        inputs = forward_inputs(batch, slots, self._page_size)
        logits = self._runner.forward(inputs, None if before is None else before.ids, wrote)
        masks = pending.wait()
        chunks = [
            ChunkEnd(chunk, chunk.request.num_computed + chunk.num_tokens, prompt_rows(chunk))
            for chunk in batch.chunks
        ]
        rows = np.array([request.slot for request in sampled], np.int64)
        columns = SamplingColumns.of(slots, rows)
        ids, told = self._sample(logits[: len(sampled)], sampled, columns, masks)
        return Launched(
            batch=batch,
            chunks=chunks,
            pages=pages,
            sampled=sampled,
            indexes=columns.indexes.tolist(),
            ids=ids,
            host_ids=OnHost(ids),
            told=told,
            prompt_told=_prompt_logprobs(logits[len(sampled) :], chunks),
        )

    def _sample(
        self,
        logits: torch.Tensor,
        sampled: Sequence[ActiveRequest],
        columns: SamplingColumns,
        masks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[list[int], LogprobRows] | None]:
        """Choose the tokens, and the log-probabilities of those rows that want them."""
        slots = self._slots
        raw = logits
        is_special = slots.is_special[[request.slot for request in sampled]]
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
