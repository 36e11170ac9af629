"""Routes of SGLang, vLLM and OpenAI that are not here, and what their users do instead. They answer 404."""

_TEXT_ONLY = "this server reads and writes text only"
_NO_SCORES = (
    "this server generates text, and has no embeddings, classes or scores: serve a model for these "
    "beside it; /v1/completions with echo and logprobs scores a prompt"
)
_NO_ADAPTERS = "adapters are not served: merge one into its model, and start nodes with that"
_NO_SLEEP = "a node keeps its memory while it runs: POST /drain to it, then stop it"
_NO_UPDATES = (
    "POST /update_weights_from_disk to each node: `tandem docs operations#updating-the-weights`"
)

# By the beginning of the path: the first that fits counts.
_INSTEAD: dict[tuple[str, ...], str] = {
    (
        *("/v1/embeddings", "/embeddings", "/v2/embed", "/encode", "/pooling"),
        *("/classify", "/v1/classify", "/score", "/v1/score", "/generative_scoring"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/decisions", "/v1/moderations"),
    ): _NO_SCORES,
    ("/v1/audio", "/v1/images", "/v1/videos", "/v1/realtime"): _TEXT_ONLY,
    ("/v1/batches", "/v1/files"): "`tandem batch` runs a file of requests",
    (
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/load_lora_adapter", "/unload_lora_adapter"),
    ): _NO_ADAPTERS,
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
    ("/version",): "/openapi.json has the version",
    ("/ping", "/ready"): "use /health",
    ("/invocations", "/vertex_generate", "/api/chat", "/api/generate"): (
        "use /v1/chat/completions or /generate"
    ),
    ("/v1/chat/completions/render", "/v1/completions/render"): "use /tokenize",
    ("/open_session", "/close_session"): (
        "send the whole conversation each time: nodes keep its prefix in their cache"
    ),
    ("/scale_elastic_ep", "/add_worker", "/remove_worker", "/list_workers", "/workers"): (
        "the router's /nodes lists, adds and removes nodes"
    ),
}


def instead_of(path: str) -> str:
    """Return what to do instead of asking for a path that is not here; empty for an unknown one."""
    fitting = (told for begins, told in _INSTEAD.items() if path.startswith(begins))
    return next(fitting, "")
