"""Remedies for errors over HTTP: the hand-written part of docs/reference/errors.md."""

# code -> remedy. scripts/reference.py fails if an error is missing here.
REMEDIES = {
    "response_not_found": "Send the whole conversation as `input`; see [responses](../features.md#responses).",
    "invalid_request": "Change the request: the message names the field and its allowed values.",
    "body_timeout": "Send the whole body within 60 s. A proxy in front must read the body before it connects.",
    "unsupported_encoding": "Send the body as plain JSON, without `Content-Encoding`.",
    "unauthorized": "Send one of the server's keys (`--api-key`, `--api-key-file`) as `Authorization: Bearer KEY`. "
    "[Routes of operators](../threat-model.md#what-is-for-operators) need the key that `tandem operator-key` prints.",
    "forbidden": "Set `TANDEM_CLUSTER_KEY` and send the [operator key](../threat-model.md#what-is-for-operators).",
    "model_not_found": "Use a model that `GET /v1/models` lists, or set its name with `--served-model-name`.",
    "node_unknown": "Use an id or URL that `GET /nodes` lists.",
    "body_too_large": "Send less, or raise `--max-body-bytes`.",
    "overloaded": "Wait for `Retry-After`. If it persists, the cluster is too small for its load: see [tuning](../tuning.md) and "
    "[admission](../admission.md).",
    "rate_limit_exceeded": "Wait for `Retry-After`, or raise the key's limits: [admission](../admission.md#what-a-key-may-use).",
    "deadline_passed": "Raise the client's [deadline](../admission.md#deadlines) or `--request-timeout-s`, or add nodes.",
    "timeout": "Ask for fewer tokens, or raise `--request-timeout-s`.",
    "out_of_pages": "Shorten the prompt or `max_new_tokens`, or give the node a larger pool: `--max-total-tokens`, on a GPU "
    "`--mem-fraction-static`.",
    "aborted": "If nobody cancelled it, a node lost the edge worker: look for `edge` and `link` in the node's log.",
    "no_node_available": "`GET /health` of the router names the missing nodes, and `GET /nodes` the reason of each. The router "
    "waited `--node-wait-s` for one: [replay](../replay.md#how-long-it-goes-on).",
    "node_draining": "Send it to a router, or to another node: [draining](../operations.md#draining).",
    "peer_draining": "As `node_draining`.",
    "attempts_used_up": "The message names the last failure. If one request fails on every pair, it may cause the failures: read the "
    "nodes' logs first. `--max-attempts` limits the attempts.",
    "peer_lost": "No other node was there to continue. Look for `node.lost` and `kv_link.lost` in the logs: "
    "[replay](../replay.md#how-soon-a-loss-is-noticed).",
    "peer_behind": "The other process is stopped or lacks CPU time. Check the load of its machine.",
    "transfer_timeout": "Decode must reach prefill's `--bootstrap-port`. Without Tandem's router both halves need the same "
    "`bootstrap_room`. `tandem doctor --node URL --node URL` checks a pair.",
    "transfer_refused": "One of the nodes restarted during the transfer. If it persists, run `tandem doctor --node URL --node URL`.",
    "transfer_failed": "The node's log has the library's message. `tandem doctor --transfer-backend NAME` tests one "
    "[transport](../transports.md).",
    "kv_corrupted": "The router computes the request again. If `tandem_corrupted_total` keeps rising, test the link and the memory of "
    "both hosts: [checksums](../architecture.md#how-bytes-are-checked).",
    "layout_mismatch": "Start both nodes with the same model files, `--dtype` and `--kv-cache-dtype`. `--tp` and `--page-size` may differ. "
    "`GET /server_info` of a node shows its `fingerprint`.",
    "protocol_mismatch": "Update the older node. Releases that are one apart [work together](../protocol.md#versions).",
    "engine_failed": "Read the traceback in the node's log. The node continues. Report a request that always fails.",
    "grammar_violated": "Run the same release on all nodes, or report a bug.",
    "not_now": "The message names the node's state. Drain a node before you change its role, and wait until it has loaded.",
    "message_invalid": "A program that is no node, or a node of a much older release, uses a node's port: see the server's log.",
    "message_too_large": "As `message_invalid`.",
}
# Printed by commands, or internal: never sent over HTTP.
NOT_OVER_HTTP = frozenset(
    {
        *(
            "config_invalid",
            "drain_failed",
            "key_refused",
            "router_away",
            "tier_failed",
            "unanswered",
        ),
        "unexpected_event",
    }
)
# Errors of the HTTP server without a class of their own: status, whether a retry helps, meaning, remedy.
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
        "The message names what to use instead of a route of SGLang, vLLM or OpenAI. `/docs` lists the routes.",
    ),
    "method_not_allowed": (
        405,
        False,
        "The route takes another method.",
        "The message and the header `Allow` name it.",
    ),
    "http_error": (
        400,
        False,
        "The bytes are no valid HTTP request.",
        "Check the client and the proxies in front of the server.",
    ),
}
