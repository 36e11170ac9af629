"""Remedies for errors over HTTP: the hand-written part of docs/reference/errors.md."""

# code -> remedy. scripts/reference.py fails if an error is missing here.
REMEDIES = {
    "invalid_request": "Change the request: the message names the field and its allowed values.",
    "context_length_exceeded": "Shorten the conversation, or start the nodes with a larger `--context-length` or KV pool.",
    "body_timeout": "Send the whole body within 60 s. Configure a proxy in front to buffer request bodies.",
    "unsupported_encoding": "Send the body as plain JSON, without `Content-Encoding`.",
    "unauthorized": "Send one of the server's keys (`--api-key`, `--api-key-file`) as `Authorization: Bearer KEY`. "
    "[Routes of operators](../threat-model.md#what-is-for-operators) need the key that `tandem operator-key` prints.",
    "forbidden": "Set `TANDEM_CLUSTER_KEY` and send the [operator key](../threat-model.md#what-is-for-operators).",
    "host_not_allowed": "Use `localhost`, or start the server with `--allowed-host` or API keys: [web pages](../http.md#web-pages).",
    "origin_not_allowed": "Start the server with `--cors-allow-origin` or API keys: [web pages](../http.md#web-pages).",
    "model_not_found": "Use a model that `GET /v1/models` lists, or set its name with `--served-model-name`.",
    "adapter_loaded": "Set `load_inplace` to replace the adapter, or use a different name.",
    "adapter_not_found": "Use a name that `GET /v1/models` lists, or a path that exists on every node: [adapters](../vllm.md#adapters).",
    "adapter_gone": "Send the request again: [adapters](../vllm.md#adapters).",
    "node_unknown": "Use an id or URL that `GET /nodes` lists.",
    "body_too_large": "Send less, or raise `--max-body-bytes`.",
    "overloaded": "Wait for `Retry-After`. If it persists, the cluster is too small for its load: see [tuning](../tuning.md) and "
    "[admission](../admission.md).",
    "rate_limit_exceeded": "Wait for `Retry-After`, or raise the key's limits: [admission](../admission.md#what-a-key-may-use).",
    "deadline_passed": "Raise the client's [deadline](../admission.md#deadlines) or `--request-timeout-s`, or add nodes.",
    "timeout": "Ask for fewer tokens, or raise `--request-timeout-s`.",
    "out_of_pages": "Shorten the prompt or `max_new_tokens`, or give the node a larger pool: `--max-total-tokens`, on a GPU "
    "`--mem-fraction-static`.",
    "aborted": "If the client did not cancel the request, a node lost its link to the edge worker: look for `edge` and `link` in the node's log.",
    "no_node_available": "The router's `GET /health` names the missing nodes, and `GET /nodes` the reason for each. The router "
    "waited `--node-wait-s` for a node: [replay](../replay.md#how-many-attempts).",
    "node_draining": "Send the request to a router, or to a different node: [draining](../operations.md#draining).",
    "peer_draining": "As `node_draining`.",
    "attempts_used_up": "The message names the last failure. If a request fails on every pair, the request itself may be the cause: read the "
    "nodes' logs first. `--max-attempts` limits the attempts.",
    "request_ended_engine": "In the router's log, `request.replay` and `prompt.refused` name the nodes. Read their logs, "
    "and report the prompt as a bug. The router "
    "accepts it again after five minutes: [replay](../replay.md#a-prompt-that-ends-engines).",
    "peer_lost": "No other node could continue the request. Look for `node.lost` and `kv_link.lost` in the logs: "
    "[replay](../replay.md#how-soon-a-loss-is-noticed).",
    "peer_behind": "The other process is stopped or lacks CPU time. Check the load of its machine.",
    "transfer_timeout": "Decode must reach prefill's `--bootstrap-port`. Without Tandem's router both halves need the same "
    "`bootstrap_room`. `tandem doctor` tests the [link](../doctor.md).",
    "transfer_refused": "One of the nodes restarted during the transfer. If it persists, compare `GET /server_info` of both nodes.",
    "transfer_failed": "The node's log has the library's message. `tandem doctor --transfer-backend NAME` tests one "
    "[transport](../transports.md).",
    "kv_corrupted": "The router computes the request again. If `tandem_corrupted_total` keeps rising, test the link and the memory of "
    "both hosts: [checksums](../architecture.md#how-bytes-are-checked).",
    "layout_mismatch": "Start both nodes with the same model files, `--dtype` and `--kv-cache-dtype`. `--tp` and `--page-size` may differ, except [with some models of vLLM](../vllm.md#unequal-tensor-parallel-sizes). "
    "`GET /server_info` of a node shows its `fingerprint`.",
    "protocol_mismatch": "Run the same release on both nodes; see [versions](../protocol.md#versions).",
    "engine_failed": "Read the traceback in the node's log. The node continues to serve. If a request always fails, report a bug.",
    "grammar_violated": "Run the same release on all nodes, or report a bug.",
    "not_now": "The message names the node's state. Drain a node before you change its role, and wait until it has loaded.",
    "message_invalid": "A program other than Tandem, or a much older release, connects to a node's port: see the server's log.",
    "message_too_large": "As `message_invalid`.",
}
# Errors that commands print, and internal errors. They are never sent over HTTP.
NOT_OVER_HTTP = frozenset(
    {
        *(
            "config_invalid",
            "drain_failed",
            "key_refused",
            "tier_failed",
            "query_failed",
        ),
        "unexpected_event",
    }
)
# Errors that the HTTP server sends and that have no error class: status, whether a retry helps, meaning, remedy.
OTHER_ERRORS = {
    "internal_error": (
        500,
        False,
        "A bug: an unexpected exception.",
        "Look for `request.crashed` or `stream.failed` in the server's log: it has the traceback.",
    ),
    "not_found": (
        404,
        False,
        "There is no such route.",
        "For a route of SGLang, vLLM or OpenAI, the message names the replacement. `/docs` lists the routes.",
    ),
    "method_not_allowed": (
        405,
        False,
        "The route does not support this method.",
        "The message and the header `Allow` name the supported methods.",
    ),
    "http_error": (
        400,
        False,
        "The bytes are not a valid HTTP request.",
        "Check the client and the proxies in front of the server.",
    ),
}
