"""The fields of SGLang 0.5.23's and vLLM 0.32's requests, by the route that serves them here. Tests compare them with our fields."""

SGLANG_GENERATE = """
    rid session_id text input_ids input_embeds image_data video_data audio_data mm_hashes mm_content_hashes
    use_audio_in_video video_config sampling_params watermark return_logprob logprob_start_len
    top_logprobs_num token_ids_logprob return_sampling_mask sampling_logprobs_mode return_text_in_logprobs
    return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 stream
    log_metrics return_hidden_states return_routed_experts routed_experts_start_len return_indexer_topk
    modalities session_params lora_path lora_id custom_logit_processor positional_embed_overrides
    bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank
    data_parallel_rank disagg_prefill_dp_rank routing_key conversation_id http_worker_ipc background
    require_reasoning max_thinking_tokens priority extra_key no_logs custom_labels return_bytes
    return_entropy return_prompt_token_ids external_trace_header received_time need_wait_for_mm_inputs
    num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch image_max_dynamic_patch
    video_max_dynamic_patch images_config mm_processor_kwargs multi_item_delimiter_indices
    token_indices_to_pool cache_salt kv_hints
"""
SGLANG_SAMPLING = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
    presence_penalty repetition_penalty min_new_tokens n beam_width json_schema regex ebnf structural_tag
    ignore_eos skip_special_tokens spaces_between_special_tokens no_stop_trim stream_interval logit_bias
    sampling_seed custom_params watermark stop_strs stop_regex_strs stop_str_max_len stop_regex_max_len
    is_normalized ebnf_full_assistant
"""
SGLANG_COMPLETION = """
    bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank model prompt best_of
    echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options
    suffix temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_spec_tokens_details return_token_ids top_k min_p min_tokens
    json_schema regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos
    skip_special_tokens lora_path session_id session_params response_format custom_params
    custom_logit_processor watermark images_config mm_processor_kwargs data_parallel_rank rid extra_key
    cache_salt priority custom_labels
"""
SGLANG_CHAT = """
    bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank messages model
    frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
    response_format seed stop stream stream_options temperature top_p user tools tool_choice
    parallel_tool_calls return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_spec_tokens_details return_prompt_token_ids return_token_ids
    return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask
    sampling_logprobs_mode return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
    reasoning_effort thinking task top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids
    stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens lora_path session_id
    session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
    min_dynamic_patch use_audio_in_video images_config video_config mm_processor_kwargs
    custom_logit_processor custom_params watermark input_ids rid extra_key cache_salt priority
    data_parallel_rank
"""
VLLM_COMPLETION = """
    model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
    length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
    logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
    request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
    return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval
"""
VLLM_CHAT = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
    presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
    reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k
    min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt
    continue_final_message add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs
    mm_processor_kwargs structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text mm_payload
    return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
    stream_interval
"""
VLLM_GENERATE = """
    request_id token_ids token_offsets features content_parts sampling_params model reasoning_ended
    reasoning_parser_kwargs return_token_ids output_mode stream stream_options cache_salt priority
    kv_transfer_params ec_transfer_params
"""
VLLM_SAMPLING = """
    n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p seed
    stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
    prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
    spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
    output_text_buffer_length structured_outputs logit_bias allowed_token_ids extra_args bad_words
    skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
    trace_decode_token_ids
"""
VLLM_RESPONSES = """
    background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
    parallel_tool_calls previous_response_id prompt reasoning include_reasoning service_tier store stream
    temperature text tool_choice tools top_logprobs top_p top_k min_p truncation user skip_special_tokens
    include_stop_str_in_output presence_penalty frequency_penalty prompt_cache_key watermarking request_id
    session_id media_io_kwargs mm_processor_kwargs priority mm_payload return_mm_kwargs cache_salt
    enable_response_messages previous_input_messages structured_outputs repetition_penalty seed stop
    stop_token_ids ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs
"""
SGLANG_RESPONSES = """
    background include input instructions max_output_tokens max_tool_calls metadata model
    parallel_tool_calls previous_response_id reasoning service_tier store stream temperature text
    tool_choice tools top_logprobs top_p truncation user chat_template_kwargs request_id session_id priority
    extra_key cache_salt data_parallel_rank frequency_penalty presence_penalty stop top_k min_p
    repetition_penalty
"""

FIELDS = {
    "/generate": {*SGLANG_GENERATE.split()},
    "/v1/completions": {*SGLANG_COMPLETION.split(), *VLLM_COMPLETION.split()},
    "/v1/chat/completions": {*SGLANG_CHAT.split(), *VLLM_CHAT.split()},
    "/inference/v1/generate": {*VLLM_GENERATE.split()},
    "/v1/responses": {*SGLANG_RESPONSES.split(), *VLLM_RESPONSES.split()},
}
# Fields of `sampling_params`.
PARAMETERS = {
    "/generate": {*SGLANG_SAMPLING.split()},
    "/inference/v1/generate": {*VLLM_SAMPLING.split()},
}
