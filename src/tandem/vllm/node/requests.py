"""Converts requests to vLLM's types, and vLLM's outputs to ours."""

import json
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tandem.vllm.node.outputs import HandOffParams, StepOutput
from tandem.wire.errors import NoNodeAvailable
from tandem.wire.generation import Finish, GenerateRequest, Grammar, TokenLogprobs


def sampling_params(request: GenerateRequest, hand_off: HandOffParams | None) -> SamplingParams:
    """Return a request's parameters for vLLM.

    Args:
        hand_off: Which half of the request this is; None: a whole request.

    Raises:
        NoNodeAvailable: An answer has begun, but not all log-probabilities of its prompt were received.
    """
    sampling, logprobs = request.sampling, request.logprobs
    is_decode = hand_off is not None and hand_off.is_decode
    max_tokens = sampling.max_new_tokens
    if hand_off is not None and not is_decode:
        max_tokens = request.num_prior_tokens + 1
    prompt_logprobs = None
    if logprobs is not None and logprobs.prompt_start >= 0 and not is_decode:
        if request.num_prior_tokens:  # vLLM would end with an assertion
            raise NoNodeAvailable(
                "the node with this prompt's log-probabilities was lost; send the request again"
            )
        prompt_logprobs = logprobs.num_top
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=max_tokens,
        min_tokens=min(sampling.min_new_tokens, max_tokens),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=sampling.logit_bias or None,
        seed=sampling.seed,
        logprobs=None if logprobs is None else logprobs.num_top,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=None if sampling.grammar is None else _structured(sampling.grammar),
        detokenize=False,
        extra_args=None if hand_off is None else {"kv_transfer_params": hand_off.params()},
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


def output_of(output: EngineCoreOutput) -> StepOutput:
    """Convert an output of vLLM."""
    reason = output.finish_reason
    last_id = output.new_token_ids[-1] if output.new_token_ids else None
    finish = finish_of(reason, output.stop_reason, last_id)
    error = "" if reason is None or finish is not None else f"vLLM ended the request: {reason}"
    rows = output.new_logprobs
    prompt = output.new_prompt_logprobs_tensors
    stats = output.prefill_stats
    return StepOutput(
        output.request_id,
        output.new_token_ids,
        [] if rows is None else _logprobs(rows.logprob_token_ids, rows.logprobs),
        0 if stats is None else stats.num_cached_tokens,
        finish,
        error,
        [] if prompt is None else _logprobs(prompt.logprob_token_ids, prompt.logprobs),
    )


def finish_of(
    reason: FinishReason | None, stop_reason: int | str | None, last_id: int | None
) -> Finish | None:
    """Convert vLLM's reason of an end; None: the answer goes on, or failed."""
    match reason:
        case FinishReason.STOP:
            matched = stop_reason if isinstance(stop_reason, int) else last_id
            return Finish(reason="stop", matched=matched)
        case FinishReason.LENGTH:
            return Finish(reason="length")
        case _:
            return None


def _logprobs(token_ids: Any, logprobs: Any) -> list[TokenLogprobs]:
    """Convert vLLM's rows: first the sampled token, then the most likely ones, in descending order."""
    return [
        TokenLogprobs(logprob=values[0], top=list(zip(ids[1:], values[1:], strict=True)))
        for ids, values in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
