"""Requests and answers, between our words and vLLM's."""

import json
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tandem.vllm.outputs import Apart, Output
from tandem.wire.errors import NoNodeAvailable
from tandem.wire.generation import Finish, GenerateRequest, Grammar, TokenLogprobs


def sampling_params(request: GenerateRequest, apart: Apart | None) -> SamplingParams:
    """Return a request's parameters for vLLM.

    Args:
        apart: Which half of it this is; None: all of it.

    Raises:
        NoNodeAvailable: The request was begun elsewhere, and vLLM cannot go on with it.
    """
    sampling, prior = request.sampling, request.num_prior_tokens
    if prior:
        _check_replay(request)
    wanted = request.logprobs
    is_decode = apart is not None and apart.is_decode
    is_prefill = apart is not None and not is_decode
    prompt_logprobs = None
    if wanted is not None and wanted.prompt_start >= 0 and not is_decode:
        prompt_logprobs = wanted.num_top
    # Tokens of the answer that stand in vLLM's prompt.
    before = prior + (apart is not None and is_decode and apart.draws_first)
    num_new = 1 if is_prefill else max(1, sampling.max_new_tokens - before)
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=num_new,
        min_tokens=max(0, min(sampling.min_new_tokens - before, num_new)),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=sampling.logit_bias or None,
        # A request that goes on elsewhere must not draw what it has drawn before.
        seed=None if sampling.seed is None else (sampling.seed + before) % (1 << 63),
        logprobs=None if wanted is None else wanted.num_top,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=None if sampling.grammar is None else _structured(sampling.grammar),
        detokenize=False,
        extra_args=None if apart is None else {"kv_transfer_params": apart.params()},
    )


def _check_replay(request: GenerateRequest) -> None:
    """Refuse to go on where vLLM would treat the tokens of the answer as the prompt's."""
    sampling = request.sampling
    has_penalty = (
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty != 1.0
    )
    if sampling.grammar is not None or has_penalty:
        what = "a grammar" if sampling.grammar is not None else "penalties"
        raise NoNodeAvailable(
            f"the node that ran this request was lost, and vLLM cannot go on with {what}: send it again"
        )


def _structured(grammar: Grammar) -> StructuredOutputsParams:
    match grammar.kind:
        case "json_schema":
            return StructuredOutputsParams(json=grammar.text)
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "regex":
            return StructuredOutputsParams(regex=grammar.text)
        case "ebnf":
            return StructuredOutputsParams(grammar=grammar.text)
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=json.dumps(json.loads(grammar.text)))


def output_of(output: EngineCoreOutput) -> Output:
    """Return vLLM's answer in our words."""
    finish, error = None, ""
    match output.finish_reason:
        case None:
            pass
        case FinishReason.STOP:
            last = output.new_token_ids[-1] if output.new_token_ids else None
            matched = output.stop_reason if isinstance(output.stop_reason, int) else last
            finish = Finish(reason="stop", matched=matched)
        case FinishReason.LENGTH:
            finish = Finish(reason="length")
        case reason:
            error = f"vLLM ended the request: {reason}"
    rows = output.new_logprobs
    prompt = output.new_prompt_logprobs_tensors
    stats = output.prefill_stats
    return Output(
        output.request_id,
        output.new_token_ids,
        [] if rows is None else _logprobs(rows.logprob_token_ids, rows.logprobs),
        0 if stats is None else stats.num_local_cached_tokens,
        finish,
        error,
        [] if prompt is None else _logprobs(prompt.logprob_token_ids, prompt.logprobs),
    )


def _logprobs(token_ids: Any, logprobs: Any) -> list[TokenLogprobs]:
    """Return rows of vLLM's: first the token that stands there, then the likeliest, in falling order."""
    return [
        TokenLogprobs(logprob=values[0], top=list(zip(ids[1:], values[1:], strict=True)))
        for ids, values in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
