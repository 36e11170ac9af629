"""Collecting a forward: what it computed becomes tokens, complete pages and log-probabilities.

Who ends by it is ended through the engine, which knows whose pages may go back.
"""

from collections.abc import Callable

import numpy as np

from tandem.engine.errors import GrammarViolated
from tandem.engine.forward import Ints
from tandem.engine.launched import Launched
from tandem.engine.request import ActiveRequest, Stage
from tandem.engine.results import Computed, Failure, PromptLogprobs, StepResult, Token
from tandem.engine.scheduler import Scheduler
from tandem.engine.shape import ModelShape
from tandem.wire.generation import Finish, TokenLogprobs


class Collector:
    """Reads forwards that were launched, in the order of their launch.

    Args:
        end: Ends a request and gives back what nobody reads or writes any more.

    Attributes:
        num_tokens: Generated so far, those that another node chose included.
    """

    def __init__(
        self, scheduler: Scheduler, shape: ModelShape, end: Callable[[ActiveRequest], None]
    ) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = shape.eos_token_ids
        self._is_eos = np.zeros(shape.vocab_size, np.bool_)
        self._is_eos[[i for i in shape.eos_token_ids if i < shape.vocab_size]] = True
        self._end = end
        self.num_tokens = 0

    def collect(self, launched: Launched, result: StepResult) -> None:
        """Wait for a forward and add what it produced to `result`."""
        try:
            tokens = launched.outcome.token_ids()
            told = launched.outcome.token_logprobs()
        finally:
            # Also of a forward that failed: it writes no more, and its pages are to go back.
            for request in launched.participants():
                request.num_launched -= 1
        self._collect_chunks(result, launched)
        self._collect_tokens(result, launched, tokens, told)

    def accept(self, active: ActiveRequest, token: int) -> Finish | None:
        """Append a token to a request, and end it when that was its last here.

        Raises:
            GrammarViolated: The grammar does not allow it; nothing was appended.
        """
        active.accept(token)
        finish = active.finish_at(token, self._eos_token_ids)
        self.num_tokens += 1
        if finish is not None or active.is_prompt_only:
            self._end(active)
        return finish

    def _collect_tokens(
        self,
        result: StepResult,
        launched: Launched,
        tokens: Ints,
        told: dict[int, TokenLogprobs],
    ) -> None:
        slots, out = self._scheduler.slots, result.tokens
        rows = np.array([request.slot for request in launched.sampled], np.int64)
        slots.last_token[rows] = tokens
        slots.num_pending[rows] -= 1
        may_end = slots.num_tokens[rows] >= slots.max_tokens[rows]
        may_end |= self._is_eos[tokens] & slots.stops_at_eos[rows]
        may_end |= slots.ends_specially[rows]
        columns = zip(launched.indexes, tokens.tolist(), may_end.tolist(), strict=True)
        for row, (request, (index, token, is_end)) in enumerate(
            zip(launched.sampled, columns, strict=True)
        ):
            if request.stage is Stage.ENDED:
                continue  # it ended while this forward ran
            finish = None
            try:
                if is_end or request.is_prompt_only:
                    finish = self.accept(request, token)
                else:
                    request.accept(token)
                    self.num_tokens += 1
            except GrammarViolated as error:
                self._end(request)
                result.failures.append(Failure(request, error))
                continue
            out.append(Token(request, index, token, finish, told.get(row) if told else None))

    def _collect_chunks(self, result: StepResult, launched: Launched) -> None:
        entries = launched.outcome.prompt_logprobs()
        for end in launched.chunks:
            mine, entries = entries[: len(end.told)], entries[len(end.told) :]
            active = end.chunk.request
            active.num_collected = end.num_computed
            if active.stage is Stage.ENDED:
                continue
            result.chunks.append(Computed(active, end.chunk.num_tokens))
            if mine or (end.chunk.is_last and _wants_only_position_0(active)):
                result.prompt_logprobs.append(_run(active, end.told.start, mine))
            if end.chunk.is_last:
                self._scheduler.computed(active)
        result.pages += [
            pages for pages in launched.pages if pages.request.stage is not Stage.ENDED
        ]


def _wants_only_position_0(active: ActiveRequest) -> bool:
    wanted = active.request.logprobs
    is_asked = wanted is not None and wanted.prompt_start == 0
    return is_asked and active.num_prompt == 1 and len(active.token_ids) == 1


def _run(active: ActiveRequest, start: int, entries: list[TokenLogprobs]) -> PromptLogprobs:
    """Return a run of prompt positions; position 0, which has no probability, goes with the first."""
    wanted = active.request.logprobs
    if start == 1 and wanted is not None and wanted.prompt_start == 0:
        return PromptLogprobs(active, 0, [TokenLogprobs(logprob=None), *entries])
    return PromptLogprobs(active, start, entries)
