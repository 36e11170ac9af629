"""Fields of other servers' APIs: each is supported, rejected by name, or cannot change the answer."""

import typing

import pytest
from openai.types.chat import completion_create_params as chat_params
from openai.types.completion_create_params import CompletionCreateParamsBase

from tandem.frontend.apis import inference, native
from tandem.frontend.apis.inference import InferenceBody
from tandem.frontend.apis.native import GenerateBody
from tandem.frontend.chat.body import UNSUPPORTED, UNSUPPORTED_IN_CHATS, UNSUPPORTED_IN_INFERENCE
from tandem.frontend.chat.grammars import OpenAIGrammar
from tandem.frontend.chat.openai_body import ChatBody, CompletionBody
from tandem.frontend.chat.sampling import CompletionSampling, OpenAISampling
from tests.frontend.fakes import length, say
from tests.frontend.helpers import ROUTES, post
from tests.frontend.peer_fields import FIELDS, PARAMETERS

# What SGLang's GenerateReqInput and SamplingParams, and its and vLLM's OpenAI requests, have beside what is taken
# here, and cannot change the answer. Names that others share stand once.
WITHOUT_EFFECT = (
    # Identification, logging, metrics, routing and billing.
    "background conversation_id custom_labels external_trace_header log_metrics metadata no_logs received_time "
    "routing_key safety_identifier service_tier session_id store user "
    "data_parallel_rank disagg_prefill_dp_rank routed_dp_rank decode_tp_size bootstrap_pair_key http_worker_ipc "
    "kv_hints ec_transfer_params encoder_urls need_wait_for_mm_inputs "
    "num_items_assigned "
    # Latency and storage.
    "prediction prompt_cache_key prompt_cache_options prompt_cache_retention "
    "stream_reasoning "
    # Options of images and audio, which are rejected themselves.
    "image_max_dynamic_patch images_config max_dynamic_patch media_io_kwargs min_dynamic_patch mm_content_hashes "
    "mm_hashes mm_processor_kwargs use_audio_in_video video_config video_max_dynamic_patch return_bytes "
    # Options of other fields, which are rejected themselves.
    "function_call length_penalty return_flat_raw_top_logprobs_b64 routed_experts_prompt_start "
    "routed_experts_start_len truncation_side "
    # No effect on existing tokenizers or on these routes, or only a hint.
    "mm_payload reasoning_parser_kwargs require_reasoning return_mm_kwargs return_token_offsets "
    "spaces_between_special_tokens token_offsets verbosity "
    # Additional output in separate fields.
    "return_cached_tokens_details"
)
IGNORED = frozenset(WITHOUT_EFFECT.split())
# Fields of the installed client and of other servers.
THEIRS = {
    "/generate": FIELDS["/generate"],
    "/v1/completions": FIELDS["/v1/completions"]
    | set(typing.get_type_hints(CompletionCreateParamsBase)),
    "/v1/chat/completions": FIELDS["/v1/chat/completions"]
    | set(typing.get_type_hints(chat_params.CompletionCreateParamsBase)),
    "/inference/v1/generate": FIELDS["/inference/v1/generate"],
}
GRAMMARS = OpenAIGrammar.names()
TAKEN = {
    "/generate": GenerateBody.names(),
    "/v1/completions": CompletionBody.names() | CompletionSampling.names() | GRAMMARS | {"best_of"},
    "/v1/chat/completions": ChatBody.names() | OpenAISampling.names() | GRAMMARS,
    "/inference/v1/generate": InferenceBody.names(),
}
REFUSED = {path: frozenset(UNSUPPORTED) for path in TAKEN} | {
    "/v1/chat/completions": UNSUPPORTED.keys() | UNSUPPORTED_IN_CHATS,
    "/inference/v1/generate": UNSUPPORTED.keys() | UNSUPPORTED_IN_INFERENCE,
}
ALL_ROUTES = ROUTES | {"/inference/v1/generate": {"token_ids": [5]}}
# Names in `sampling_params` may be misspelled: unknown ones are rejected.
PARAMETERS_TAKEN = {
    "/generate": native.PARAMETERS,
    "/inference/v1/generate": inference.PARAMETERS,
}


@pytest.mark.parametrize("path", THEIRS)
def test_every_peer_field_is_supported_rejected_or_without_effect(path):
    assert THEIRS[path] - TAKEN[path] - REFUSED[path] - IGNORED == set()
    assert not REFUSED[path] & IGNORED
    assert not TAKEN[path] & REFUSED[path]
    assert not TAKEN[path] & IGNORED


def test_ignored_field_list_has_no_unknown_names():
    assert frozenset().union(*THEIRS.values()) >= IGNORED


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path in PARAMETERS
        for name in sorted(PARAMETERS[path] - PARAMETERS_TAKEN[path])
    ],
)
async def test_unknown_sampling_parameter_is_rejected_by_name(client, path, name):
    body = ALL_ROUTES[path] | {"sampling_params": {name: 5}}
    status, answer = await post(client, path, body)
    assert status == 400
    assert answer["error"]["message"].startswith(f"sampling_params.{name}: ")


@pytest.mark.parametrize("path", ALL_ROUTES)
async def test_unknown_field_is_ignored(client, backend, path):
    backend.script = say(length(5))
    assert (await post(client, path, ALL_ROUTES[path] | {"litellm_extra": {"a": 1}}))[0] == 200


@pytest.mark.parametrize("path", ALL_ROUTES)
@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_unsupported_field_is_rejected_by_name(client, backend, path, name):
    for value in ("x", 5, 0, True, ["x"], [None, "x"], {"a": 1}):
        if value == UNSUPPORTED[name]:
            continue
        status, answer = await post(client, path, ALL_ROUTES[path] | {name: value})
        assert (status, answer["error"]["message"].split(":")[0]) == (400, name)
    assert backend.requests == []


@pytest.mark.parametrize("path", ALL_ROUTES)
async def test_unsupported_field_without_effect_is_accepted(client, backend, path):
    backend.script = say(length(5))
    for value in (None, False, "", [], {}, [None], [False, None]):
        body = ALL_ROUTES[path] | dict.fromkeys(UNSUPPORTED, value)
        assert (await post(client, path, body))[0] == 200, value
    assert (await post(client, path, ALL_ROUTES[path] | UNSUPPORTED))[0] == 200


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_IN_CHATS))
async def test_field_unsupported_in_chats_is_rejected(client, name):
    body = ROUTES["/v1/chat/completions"] | {name: [5]}
    status, answer = await post(client, "/v1/chat/completions", body)
    assert (status, answer["error"]["message"].split(":")[0]) == (400, name)


@pytest.mark.parametrize("path", ALL_ROUTES)
async def test_field_without_effect_is_ignored(client, backend, path):
    backend.script = say(length(5))
    assert (await post(client, path, dict.fromkeys(IGNORED, "x") | ALL_ROUTES[path]))[0] == 200


async def test_unsupported_sampling_parameter_is_rejected(client):
    body = ROUTES["/generate"] | {"sampling_params": {"custom_params": {"a": 1}}}
    status, answer = await post(client, "/generate", body)
    assert (status, "sampling_params.custom_params: not" in answer["error"]["message"]) == (
        400,
        True,
    )
