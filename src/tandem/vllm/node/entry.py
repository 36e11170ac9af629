"""Brings requests into vLLM, also those whose answer another node has begun: their tokens so far are output.

vLLM's scheduler takes such a request for one that it has preempted. Penalties, grammar, stop conditions and seeded
draws then continue as if the request had always run here.

 - Model runner V2 (GPUs) builds its state of a preempted request from the scheduler's.
 - Model runner V1 (CPUs, and what V2 does not support) keeps that state itself: `install` gives it to the workers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override
from vllm.sampling_params import SamplingType
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from tandem.vllm.hand_offs import source_of


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

    def add(self, asked: EngineCoreRequest, prior_ids: Sequence[int]) -> None:
        """Add a request. `prior_ids`: the tokens of its answer so far."""
        request, _wave = self._core.preprocess_add_request(asked)
        if prior_ids:
            request.append_output_token_ids(list(prior_ids))
            # A request that was never preempted must not have more cached tokens than its prompt.
            request.num_preemptions = 1
        self._waiting[request.request_id] = request
        self.admit()

    def admit(self) -> None:
        """Give the scheduler the requests whose grammars have been compiled since the last call."""
        for request_id, request in list(self._waiting.items()):
            grammar = request.structured_output_request
            if grammar is None or grammar.grammar is not None:
                del self._waiting[request_id]
                self._admit(request)

    def abort(self, request_id: str) -> None:
        """Abort a request; an unknown id is ignored."""
        if self._waiting.pop(request_id, None) is None:
            self._core.abort_requests([request_id])

    def land(self, request_id: str, first_id: int) -> bool:
        """Append the first token, which prefill sampled. Call before the step that continues the request.

        Returns:
            False if the request's grammar does not allow the token.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return True
        request.append_output_token_ids(first_id)
        request.num_preemptions += 1
        if not self._accepts(request, [first_id]):
            return False
        self._install(request)
        return True

    def _admit(self, request: Request) -> None:
        prior_ids, grammar = list(request.output_token_ids), request.structured_output_request
        if grammar is not None and isinstance(grammar.grammar, Exception):
            pass  # the scheduler fails it
        elif not self._accepts(request, prior_ids):
            assert grammar is not None
            # The scheduler fails a request whose grammar could not be compiled.
            grammar.grammar = ValueError("the grammar does not allow the answer so far")
        elif source_of(request.kv_transfer_params) is None:
            # Otherwise prefill computes it, and `land` continues it.
            self._install(request)
        self._core.add_request(request)

    def _accepts(self, request: Request, token_ids: list[int]) -> bool:
        """Advance a request's grammar by these tokens; return whether it allows them."""
        return bool(self._scheduler.structured_output_manager.accept_tokens(request, token_ids))

    def _install(self, request: Request) -> None:
        """Mark a request as preempted if another node has begun it, and give V1's workers what they would have kept.

        Also a new seeded request on a CPU; see `CpuGenerator`.
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
        """Return a number that vLLM can subtract from."""
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
