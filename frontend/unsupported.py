"""Fields of other servers' APIs that would change the answer and are not supported here.

A request that sets one is rejected: otherwise its answer would be wrong, and nobody would notice. Fields
that cannot change the answer, such as `user`, are ignored like unknown ones.
"""

from collections.abc import Mapping

from tandem.wire.errors import InvalidRequest

# What the model is asked, and which model.
_PROMPT = (
    *("audio_data", "image_data", "video_data", "input_embeds", "positional_embed_overrides"),
    *("prompt_embeds", "multi_item_delimiter_indices", "truncate_prompt_tokens", "suffix"),
    *("chat_template", "continue_final_message", "documents", "functions", "session_params"),
    *("reasoning", "task", "web_search_options", "lora_id", "lora_path"),
)
# How tokens are chosen, and where an answer ends.
_CHOICE = (
    *("allowed_token_ids", "bad_words", "custom_logit_processor", "custom_params"),
    *("logits_processors", "watermarking", "vllm_xargs", "structural_tag"),
    *("guided_whitespace_pattern", "moderation", "use_beam_search", "max_thinking_tokens"),
    "repetition_detection",
)
# What an answer has beside the text.
_TOLD = (
    *("audio", "logprob_token_ids", "prompt_logprobs", "token_ids_logprob", "return_entropy"),
    *("return_flat_raw_top_logprobs", "return_hidden_states", "return_indexer_topk"),
    *("return_meta_info", "return_prompt_text", "return_prompt_token_ids"),
    *("return_routed_experts", "return_sampling_mask", "return_token_ids"),
    "return_tokens_as_token_ids",
)
# Of SGLang, vLLM and OpenAI, each with the value by which it asks for nothing, beside null, false and empty.
UNSUPPORTED: Mapping[str, object] = dict.fromkeys((*_PROMPT, *_CHOICE, *_TOLD)) | {
    "beam_width": 1,
    "modalities": ["text"],
    "thinking_token_budget": -1,
}
# Supported on other routes.
UNSUPPORTED_IN_CHATS = frozenset({"echo", "input_ids"})


def refuse_unsupported(
    data: Mapping[str, object], prefix: str = "", also: frozenset[str] = frozenset()
) -> None:
    """Reject unsupported fields.

    Args:
        prefix: Put before the field's name in an error, such as `sampling_params.`.
        also: More names that are not supported.

    Raises:
        InvalidRequest: A field asks for something unsupported.
    """
    for name, value in data.items():
        is_unsupported = name in UNSUPPORTED or name in also
        if is_unsupported and value != UNSUPPORTED.get(name) and asks(value):
            raise InvalidRequest(f"{prefix}{name}: not supported here; leave it out")


def asks(value: object) -> bool:
    """Return whether a value asks for anything. Null, false, empty values and lists of these do not."""
    if isinstance(value, list):
        return any(map(asks, value))
    return value is not None and value is not False and value not in ("", {})
