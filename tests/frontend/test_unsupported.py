"""Fields of other servers' APIs: each is taken, refused by its name, or cannot change the answer."""

import typing

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from tandem.frontend.grammars import NativeGrammar, OpenAIGrammar
from tandem.frontend.native import GenerateBody
from tandem.frontend.openai_body import ChatBody, CompletionBody
from tandem.frontend.sampling import CompletionSampling, NativeSampling, OpenAISampling
from tandem.frontend.unsupported import UNSUPPORTED, UNSUPPORTED_IN_CHATS
from tests.frontend.fakes import length, say
from tests.frontend.helpers import post

BODIES = {
    "/generate": {"input_ids": [5]},
    "/v1/completions": {"prompt": [5]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}

# What SGLang's GenerateReqInput and SamplingParams, and its and vLLM's OpenAI requests, have beside what is taken
# here, and cannot change the answer. Names that others share stand once.
WITHOUT_EFFECT = (
    # How a request is told apart, logged, measured, routed or paid for.
    "background conversation_id custom_labels external_trace_header log_metrics metadata no_logs received_time "
    "request_id rid routing_key safety_identifier service_tier session_id store user "
    "data_parallel_rank disagg_prefill_dp_rank routed_dp_rank decode_tp_size bootstrap_pair_key http_worker_ipc "
    "kv_router_hint kv_transfer_params ec_transfer_params encoder_urls need_wait_for_mm_inputs "
    "num_items_assigned "
    # How soon it comes, and what is kept of it.
    "extra_key ngram_corpus_id prediction prompt_cache_key prompt_cache_options prompt_cache_retention "
    "stream_reasoning "
    # Of images and sound, which are refused themselves.
    "image_max_dynamic_patch images_config max_dynamic_patch media_io_kwargs min_dynamic_patch mm_content_hashes "
    "mm_hashes mm_processor_kwargs use_audio_in_video video_config video_max_dynamic_patch return_bytes "
    # Of other fields, which are refused themselves.
    "function_call length_penalty return_flat_raw_top_logprobs_b64 routed_experts_prompt_start "
    "routed_experts_start_len truncation_side "
    # Without effect on the tokenizers that there are, on these routes, or but a wish.
    "require_reasoning return_mm_kwargs return_token_offsets spaces_between_special_tokens verbosity "
    # More is told than was wanted, in fields of its own.
    "include_reasoning return_cached_tokens_details"
)
IGNORED = frozenset(WITHOUT_EFFECT.split())
SGLANG_BOTH = (
    "model n stop seed stream stream_options user temperature top_p top_k min_p min_tokens logit_bias logprobs "
    "frequency_penalty presence_penalty repetition_penalty response_format regex ebnf stop_token_ids stop_regex "
    "no_stop_trim ignore_eos skip_special_tokens max_tokens lora_path session_id session_params custom_params "
    "custom_logit_processor images_config return_hidden_states return_routed_experts routed_experts_start_len "
    "return_cached_tokens_details return_token_ids bootstrap_host bootstrap_port bootstrap_room routed_dp_rank "
    "disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority "
)
VLLM_BOTH = (
    "model n stop seed stream stream_options user temperature top_p top_k min_p min_tokens logit_bias logprobs "
    "frequency_penalty presence_penalty repetition_penalty response_format structured_outputs stop_token_ids "
    "max_tokens echo include_stop_str_in_output ignore_eos skip_special_tokens spaces_between_special_tokens "
    "use_beam_search watermarking length_penalty truncate_prompt_tokens truncation_side prompt_logprobs "
    "logprob_token_ids allowed_token_ids bad_words add_special_tokens priority request_id session_id "
    "return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_mm_kwargs "
    "cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval "
    "thinking_token_budget guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern "
)
# By route. SGLang and vLLM are not installed here: these are the fields that they had in the autumn of 2026.
THEIRS = {
    "/generate": (
        "rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes "
        "use_audio_in_video video_config sampling_params return_logprob logprob_start_len top_logprobs_num "
        "token_ids_logprob return_sampling_mask return_text_in_logprobs return_flat_raw_top_logprobs "
        "return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states return_routed_experts "
        "routed_experts_start_len return_indexer_topk modalities session_params lora_path lora_id "
        "custom_logit_processor positional_embed_overrides bootstrap_host bootstrap_port bootstrap_room "
        "bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank disagg_prefill_dp_rank "
        "kv_router_hint routing_key conversation_id http_worker_ipc background require_reasoning "
        "max_thinking_tokens priority extra_key no_logs custom_labels return_bytes return_entropy "
        "return_prompt_token_ids external_trace_header received_time need_wait_for_mm_inputs "
        "num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch image_max_dynamic_patch "
        "video_max_dynamic_patch images_config multi_item_delimiter_indices cache_salt "
    ),
    "sampling_params": (
        "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty "
        "presence_penalty repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos "
        "skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params stream_interval "
        "logit_bias sampling_seed beam_width "
    ),
    "/v1/completions": f"{SGLANG_BOTH} {VLLM_BOTH} prompt best_of echo suffix json_schema prompt_embeds "
    + " ".join(typing.get_type_hints(CompletionCreateParamsBase)),
    "/v1/chat/completions": (
        f"{SGLANG_BOTH} {VLLM_BOTH} messages top_logprobs max_completion_tokens tools tool_choice "
        "parallel_tool_calls return_prompt_token_ids return_meta_info reasoning_effort reasoning task "
        "continue_final_message separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch "
        "min_dynamic_patch use_audio_in_video input_ids include_reasoning add_generation_prompt documents "
        "chat_template media_io_kwargs mm_processor_kwargs return_prompt_text "
    )
    + " ".join(typing.get_type_hints(chat_params.CompletionCreateParamsBase)),
}
GRAMMARS = OpenAIGrammar.names()
TAKEN = {
    "/generate": GenerateBody.names() | NativeSampling.names() | NativeGrammar.names(),
    "sampling_params": NativeSampling.names() | NativeGrammar.names(),
    "/v1/completions": CompletionBody.names() | CompletionSampling.names() | GRAMMARS | {"best_of"},
    "/v1/chat/completions": ChatBody.names() | OpenAISampling.names() | GRAMMARS,
}


@pytest.mark.parametrize("place", THEIRS)
def test_every_field_of_others_is_taken_refused_or_without_effect(place):
    refused = UNSUPPORTED.keys() | (UNSUPPORTED_IN_CHATS if "chat" in place else set())
    assert set(THEIRS[place].split()) - TAKEN[place] - refused - IGNORED == set()
    assert not refused & IGNORED
    assert not TAKEN[place] & refused


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_what_would_change_the_answer_is_refused_by_its_name(client, backend, path, name):
    for value in ("x", 5, 0, True, ["x"], [None, "x"], {"a": 1}):
        if value == UNSUPPORTED[name]:
            continue
        status, answer = await post(client, path, BODIES[path] | {name: value})
        assert (status, answer["error"]["message"].split(":")[0]) == (400, name)
    assert backend.requests == []


@pytest.mark.parametrize("path", BODIES)
async def test_what_asks_for_nothing_is_passed_over(client, backend, path):
    backend.script = say(length(5))
    for value in (None, False, "", [], {}, [None], [False, None]):
        body = BODIES[path] | dict.fromkeys(UNSUPPORTED, value)
        assert (await post(client, path, body))[0] == 200, value
    assert (await post(client, path, BODIES[path] | UNSUPPORTED))[0] == 200


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_IN_CHATS))
async def test_what_is_no_part_of_a_chat_is_refused_in_one(client, name):
    body = BODIES["/v1/chat/completions"] | {name: [5]}
    status, answer = await post(client, "/v1/chat/completions", body)
    assert (status, answer["error"]["message"].split(":")[0]) == (400, name)


@pytest.mark.parametrize("path", BODIES)
async def test_what_has_no_effect_is_passed_over(client, backend, path):
    backend.script = say(length(5))
    assert (await post(client, path, dict.fromkeys(IGNORED, "x") | BODIES[path]))[0] == 200


async def test_what_is_unsupported_is_refused_among_sampling_parameters_too(client):
    body = BODIES["/generate"] | {"sampling_params": {"custom_params": {"a": 1}}}
    status, answer = await post(client, "/generate", body)
    assert (status, "sampling_params.custom_params: not" in answer["error"]["message"]) == (
        400,
        True,
    )
