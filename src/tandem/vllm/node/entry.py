"""Brings requests into vLLM, also those whose answer another node has begun: their tokens so far are output.

vLLM's scheduler takes such a request for one that it has preempted. Penalties, grammar, stop conditions and seeded
draws then continue as if the request had always run here.

 - Model runner V2 (GPUs) builds its state of a preempted request from the scheduler's.
 - Model runner V1 (CPUs, and what V2 does not support) keeps that state itself: `install` gives it to the workers.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from typing_extensions import override
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from tandem.vllm.hand_offs import source_of
from tandem.vllm.node.requests import finish_of
from tandem.wire.errors import EngineFailed
from tandem.wire.generation import Finish

# The first token of a handed-off answer until it has landed, so that vLLM reserves a block for it.
PLACEHOLDER = 0


class Entry:
    """Adds requests to an `EngineCore`; one with a grammar waits until the grammar is compiled."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._scheduler: Any = core.scheduler
        self._is_v1 = not self._scheduler.use_v2_model_runner
        self._is_cpu = core.vllm_config.device_config.device_type == "cpu"
        self._waiting: dict[str, Request] = {}

    def __len__(self) -> int:
        """Return how many requests wait for their grammars."""
        return len(self._waiting)

    def waiting(self) -> Collection[Request]:
        """Return the requests that wait for their grammars."""
        return self._waiting.values()

    def add(self, asked: EngineCoreRequest, prior_ids: Sequence[int]) -> None:
        """Add a request. `prior_ids`: the tokens of its answer so far."""
        request, _wave = self._core.preprocess_add_request(asked)
        output_ids = [*prior_ids, PLACEHOLDER] if _is_handed_over(request) else list(prior_ids)
        if output_ids:
            request.append_output_token_ids(output_ids)
            # vLLM asserts that a request that it never preempted has at most its prompt in the cache.
            request.num_preemptions = 1
        self._waiting[request.request_id] = request
        self._admit_if_ready(request)

    def admit(self) -> None:
        """Give the scheduler the requests whose grammars have been compiled since the last call."""
        for request in list(self._waiting.values()):
            self._admit_if_ready(request)

    def _admit_if_ready(self, request: Request) -> None:
        grammar = request.structured_output_request
        if grammar is None or grammar.grammar is not None:
            del self._waiting[request.request_id]
            self._admit(request)

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""
        if self._waiting.pop(request_id, None) is None:
            self._core.abort_requests([request_id])

    def land(self, request_id: str, first_id: int) -> Finish | None:
        """Give a request its first token, which prefill sampled. Call before the step that continues the request.

        Returns:
            How the token ends the answer; None if the answer goes on.

        Raises:
            EngineFailed: The request's grammar does not allow the token.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        request._output_token_ids[-1] = request._all_token_ids[-1] = first_id  # noqa: SLF001 - vLLM has no public setter
        request.block_hashes.clear()
        request.update_block_hashes()
        if (finish := self._end_of(request)) is not None:
            return finish
        if not self._accepts(request, [first_id]):
            raise EngineFailed("the grammar does not allow the token that prefill sampled")
        self._install(request)
        return None

    def _end_of(self, request: Request) -> Finish | None:
        """Return how vLLM would end the answer after its last token."""
        status = request.status
        if not check_stop(request, self._scheduler.max_model_len):
            return None
        reason = request.get_finished_reason()
        request.status = status  # the role aborts it
        return finish_of(reason, request.stop_reason, request.output_token_ids[-1])

    def _admit(self, request: Request) -> None:
        prior_ids, grammar = list(request.output_token_ids), request.structured_output_request
        is_handed_over = _is_handed_over(request)
        if is_handed_over:
            prior_ids.pop()  # the placeholder
        if grammar is not None and isinstance(grammar.grammar, Exception):
            pass  # the scheduler fails it
        elif not self._accepts(request, prior_ids):
            assert grammar is not None
            # The scheduler fails a request whose grammar could not be compiled.
            grammar.grammar = ValueError("the grammar does not allow the answer so far")
        elif not is_handed_over:  # else `land` continues it
            self._install(request)
        self._core.add_request(request)

    def _accepts(self, request: Request, token_ids: list[int]) -> bool:
        """Advance a request's grammar by these tokens, one by one as vLLM does; return whether it allows them."""
        accept = self._scheduler.structured_output_manager.accept_tokens
        return all(accept(request, [token_id]) for token_id in token_ids)

    def _install(self, request: Request) -> None:
        """Mark a request as preempted, and give V1's workers what they would have kept of it.

        A new request needs this only if it is seeded and runs on a CPU; see `CpuGenerator`.
        """
        params = request.sampling_params
        assert params is not None
        is_seeded_on_cpu = self._is_cpu and params.sampling_type == SamplingType.RANDOM_SEED
        if not request.num_output_tokens and not (self._is_v1 and is_seeded_on_cpu):
            return
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.status = RequestStatus.PREEMPTED
        if self._is_v1:
            kept = {
                "req_id": request.request_id,
                "prompt_token_ids": request.prompt_token_ids,
                "mm_features": [],
                "sampling_params": params,
                "generator": None,
                "block_ids": (),  # set when the request is scheduled
                "num_computed_tokens": 0,
                "output_token_ids": list(request.output_token_ids),
                "lora_request": request.lora_request,
            }
            self._core.model_executor.collective_rpc(install, args=(kept,))


def _is_handed_over(request: Request) -> bool:
    """Whether prefill computes the prompt and samples the first token."""
    return source_of(request.kv_transfer_params) is not None


def install(worker: Any, kept: dict[str, Any]) -> None:
    """Give a worker with model runner V1 the state that it would have kept of a request. Runs in the worker.

    Args:
        kept: The fields of vLLM's `CachedRequestState`.
    """
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    runner = getattr(worker, "worker", worker).model_runner
    state, params = CachedRequestState(**kept), kept["sampling_params"]
    runner.requests[state.req_id] = state
    if params.sampling_type == SamplingType.RANDOM_SEED:
        state.generator = _generator(runner, state)
    if params.prompt_logprobs is not None:
        runner.num_prompt_logprobs[state.req_id] = params.prompt_logprobs
    if runner.uses_mrope:
        runner._init_mrope_positions(state)  # noqa: SLF001 - as vLLM does for a new request


def _generator(runner: Any, state: Any) -> torch.Generator:
    """Return a seeded request's generator after the draws of its tokens so far."""
    if runner.device.type == "cpu":
        return CpuGenerator.of(state, runner.input_batch.vocab_size)
    generator = torch.Generator(device=runner.device)
    generator.manual_seed(state.sampling_params.seed)
    # vLLM draws a token with one kernel, which advances Philox's offset by 4.
    generator.set_offset(4 * len(state.output_token_ids))
    return generator


class CpuGenerator(torch.Generator):
    """A generator whose last draw can be taken back.

    vLLM draws a token after each chunk of a prompt, and takes the draw back unless the chunk was the last. It does so by
    the generator's offset, which a CPU's generator does not have: the error would end the engine.
    """

    _state: Any
    _vocab_size: int

    @classmethod
    def of(cls, state: Any, vocab_size: int) -> "CpuGenerator":
        """Return the generator of a request; `state` is its `CachedRequestState`."""
        generator = cls()  # torch.Generator's `__new__` takes no other arguments
        generator._state, generator._vocab_size = state, vocab_size
        generator.set_offset(0)
        return generator

    @override
    def get_offset(self) -> int:
        """Return any number: `set_offset` ignores it."""
        return 4

    @override
    def set_offset(self, _offset: int) -> torch.Generator:
        """Return to the state after the draws of the request's tokens."""
        num_draws = len(self._state.output_token_ids)
        self.manual_seed(self._state.sampling_params.seed)
        if hasattr(torch.ops._C, "fused_gumbel_argmax"):  # noqa: SLF001 - vLLM's kernels
            torch.randint(0, 2**31, (num_draws,), generator=self, dtype=torch.long)
        else:  # vLLM 0.31
            for _ in range(num_draws):
                torch.empty(self._vocab_size).exponential_(generator=self)
        return self
