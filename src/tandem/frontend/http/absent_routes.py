"""Routes of SGLang, vLLM and OpenAI that do not exist here, with the remedy that their 404 contains."""

_TEXT_ONLY = "this server supports text only"
_NO_SCORES = (
    "this server does not support embeddings, classification or scores; run a separate server for them. "
    "/v1/completions with echo and logprobs scores a prompt"
)
_NO_SLEEP = "a node keeps its memory until it stops; POST /drain to the node, then stop it"
_NO_UPDATES = "POST /update_weights_from_disk to each node: docs/operations.md#updating-the-weights"
NOT_STORED = "responses are not stored; send the whole conversation as input each time"

# Path prefixes. The first match wins.
_REPLACEMENTS: dict[tuple[str, ...], str] = {
    (
        *("/v1/embeddings", "/embeddings", "/v2/embed", "/encode", "/pooling"),
        *("/classify", "/v1/classify", "/score", "/v1/score", "/generative_scoring"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/decisions", "/v1/moderations"),
    ): _NO_SCORES,
    ("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"): _TEXT_ONLY,
    ("/load_lora_adapter", "/unload_lora_adapter"): (
        "use /v1/load_lora_adapter and /v1/unload_lora_adapter"
    ),
    ("/v1/batches", "/v1/files"): "use `tandem batch` to run a file of requests",
    (
        *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"),
        *("/continue_generation", "/release_memory_occupation", "/release_kv_cache_memory"),
    ): _NO_SLEEP,
    (
        *("/update_weight", "/init_weight", "/start_weight_update", "/finish_weight_update"),
        *("/begin_weight_update", "/end_weight_update", "/destroy_weights", "/send_weights"),
        *("/get_weights", "/weights_checker", "/weight_checker", "/weight_info"),
    ): _NO_UPDATES,
    ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"): "use POST /flush_cache",
    ("/abort_requests", "/inference/v1/abort_requests"): "use POST /abort_request with rid",
    ("/load",): "use /get_load or /v1/loads",
    ("/version",): "the version is in /openapi.json",
    ("/ping", "/ready"): "use /health",
    ("/invocations", "/vertex_generate", "/api/chat", "/api/generate"): (
        "use /v1/chat/completions or /generate"
    ),
    ("/v1/chat/completions/render", "/v1/completions/render"): "use /tokenize",
    ("/v1/responses/",): NOT_STORED,
    ("/open_session", "/close_session"): (
        "send the whole conversation each time; nodes cache its prefix"
    ),
    ("/scale_elastic_ep", "/add_worker", "/remove_worker", "/list_workers", "/workers"): (
        "use the router's /nodes to list, add and remove nodes"
    ),
}


def replacement_for(path: str) -> str:
    """Return the remedy for a path that does not exist here. Empty: the path is unknown."""
    remedies = (remedy for prefixes, remedy in _REPLACEMENTS.items() if path.startswith(prefixes))
    return next(remedies, "")
