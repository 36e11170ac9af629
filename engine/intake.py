"""Requests on their way in: checked against the model and its pool, and their grammars begun."""

import itertools
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.engine.kv_cache import KVCache
from tandem.engine.launched import Launcher
from tandem.engine.limits import absurdity
from tandem.engine.request import ActiveRequest
from tandem.engine.seen import seen_by
from tandem.engine.shape import ModelShape
from tandem.wire.errors import InvalidRequest, OutOfPages
from tandem.wire.generation import GenerateRequest

if TYPE_CHECKING:
    from tandem.engine.grammar_compiler import GrammarCompiler


class Intake:
    """Puts requests into the engine's terms.

    Args:
        max_tokens: Prompt plus generated tokens of one request, at most.
        launcher: Says whether what a request asks for can be had, and what its draws are keyed with.
        compiler: Of grammars; without one, requests with a grammar are refused.
        wake: Called from another thread when a request's grammar was compiled.
    """

    def __init__(
        self,
        shape: ModelShape,
        cache: KVCache,
        max_tokens: int,
        launcher: Launcher,
        *,
        compiler: "GrammarCompiler | None",
        wake: Callable[[], None],
    ) -> None:
        self._shape = shape
        self._cache = cache
        self._max_tokens = max_tokens
        self._launcher = launcher
        self._compiler = compiler
        self._wake = wake
        self._arrivals = itertools.count()

    def check(self, request: GenerateRequest, *, is_prompt_only: bool = False) -> ActiveRequest:
        """Return the request in this engine's terms, neither queued nor holding anything.

        Its grammar, if it has one, begins to be compiled.

        Raises:
            InvalidRequest: The prompt is empty, too long or holds ids that are not in the vocabulary; or
                it asks for what cannot be had here.
            OutOfPages: The prompt can never fit into the pool.
        """
        self._refuse_impossible(request)
        self._launcher.check(request)
        drawn = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
        new_tokens = request.sampling.max_new_tokens - request.num_prior_tokens
        active = ActiveRequest(
            request,
            arrival=next(self._arrivals),
            max_tokens=min(len(request.prompt_ids) + max(1, new_tokens), self._max_tokens),
            seed=self._launcher.seed(request, drawn),
            is_prompt_only=is_prompt_only,
            token_ids=list(request.prompt_ids),
            seen=seen_by(request),
        )
        if request.sampling.grammar is not None:
            if self._compiler is None:
                raise InvalidRequest("this node compiles no grammars")
            active.compiling = self._compiler.compile(request.sampling.grammar)
            active.compiling.add_done_callback(lambda _future: self._wake())
        return active

    def _refuse_impossible(self, request: GenerateRequest) -> None:
        prompt = request.prompt_ids
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        if fault := absurdity(request):
            raise InvalidRequest(fault)
        if min(prompt) < 0 or max(prompt) >= self._shape.vocab_size:
            raise InvalidRequest(f"prompt ids must be in 0 ... {self._shape.vocab_size - 1}")
        if any(not 0 <= i < self._shape.vocab_size for i in request.sampling.logit_bias):
            raise InvalidRequest(f"logit_bias ids must be in 0 ... {self._shape.vocab_size - 1}")
        if len(prompt) >= self._shape.context_length:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens and the context holds "
                f"{self._shape.context_length}, the answer included"
            )
        if len(prompt) >= self._max_tokens:
            raise OutOfPages(self._cache.num_pages_for(len(prompt) + 1), self._cache.num_pages)
