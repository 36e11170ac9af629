"""What each route answers, as JSON schemas: what the server writes by hand, not by a model."""

from typing import Any

Schema = dict[str, Any]


def _object(required: Schema, optional: Schema | None = None) -> Schema:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_BOOLEAN: Schema = {"type": "boolean"}
_ANYTHING: Schema = {}
_SOME_OBJECT: Schema = {"type": ["object", "null"]}
_REASON: Schema = {
    "type": ["string", "null"],
    "enum": ["stop", "length", "tool_calls", "abort", None],
}

_USAGE = _object(
    {"prompt_tokens": _INTEGER, "completion_tokens": _INTEGER, "total_tokens": _INTEGER},
    {"prompt_tokens_details": _SOME_OBJECT},
)
_META = _object(
    {
        "id": _STRING,
        "finish_reason": _SOME_OBJECT,
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "cached_tokens": _INTEGER,
    },
    {
        "e2e_latency": {"type": "number"},
        "cached_tokens_details": {"type": "object"},
        "input_token_logprobs": _list(_ANYTHING),
        "output_token_logprobs": _list(_ANYTHING),
        "input_top_logprobs": _list(_ANYTHING),
        "output_top_logprobs": _list(_ANYTHING),
    },
)
_HEAD = {"id": _STRING, "object": _STRING, "created": _INTEGER, "model": _STRING}
_COMPLETION_CHOICE = _object(
    {"index": _INTEGER, "text": _STRING, "logprobs": _SOME_OBJECT, "finish_reason": _REASON}
)


def _chat_choice(part: str) -> Schema:
    return _object(
        {"index": _INTEGER, part: {"type": "object"}, "finish_reason": _REASON},
        {"logprobs": _SOME_OBJECT},
    )


def _answer(choice: Schema) -> Schema:
    return _object(_HEAD | {"choices": _list(choice), "usage": _USAGE})


def _chunk(choice: Schema) -> Schema:
    return _object(_HEAD | {"choices": _list(choice)}, {"usage": _ANYTHING, "error": _ANYTHING})


_CARD = _object(
    {"id": _STRING, "object": _STRING, "created": _INTEGER, "owned_by": _STRING},
    {"root": _STRING, "max_model_len": _INTEGER},
)

# Named in `components.schemas`; the rest of the document refers to them.
ANSWERS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {"message": _STRING, "type": _STRING, "param": _ANYTHING, "code": _STRING}
            )
        }
    ),
    "Generated": _object({"text": _STRING, "output_ids": _list(_INTEGER), "meta_info": _META}),
    "GeneratedOrList": {"anyOf": [_ref("Generated"), _list(_ref("Generated"))]},
    "GenerateEvent": {"allOf": [_ref("Generated"), _object({}, {"index": _INTEGER})]},
    "Completion": _answer(_COMPLETION_CHOICE),
    "CompletionChunk": _chunk(_COMPLETION_CHOICE),
    "ChatCompletion": _answer(_chat_choice("message")),
    "ChatCompletionChunk": _chunk(_chat_choice("delta")),
    "Model": _CARD,
    "ModelList": _object({"object": _STRING, "data": _list(_ref("Model"))}),
    "ModelInfo": _object(
        {
            "model_path": _STRING,
            "served_model_name": _STRING,
            "is_generation": _BOOLEAN,
            "context_length": _INTEGER,
            "max_prompt_tokens": _INTEGER,
            "vocab_size": _INTEGER,
            "eos_token_ids": _list(_INTEGER),
            "default_sampling_params": {"type": "object"},
        },
        {"tokenizer_path": {"type": ["string", "null"]}},
    ),
    "Health": _object({"status": _STRING, "detail": _STRING}),
    "Live": _object({"status": _STRING}),
    "Anything": {"type": "object"},
    "Flushed": _object({"success": _BOOLEAN, "message": _STRING}),
    "Aborted": _object({"aborted": _BOOLEAN}),
    "TokenizerFiles": _object(
        {"hash": _STRING, "files": {"type": "object", "additionalProperties": _STRING}}
    ),
}
