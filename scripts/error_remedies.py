"""What to do about each error that a client may be told: the part of docs/reference/errors.md that no code knows."""

# code -> what to do. An error that is missing here is an error of scripts/reference.py.
REMEDIES = {
    "invalid_request": "Change the request: the message names the field and what it may be. Sent again as it is, it fails again.",
    "body_timeout": "Send the whole body within 60 s. Behind a proxy, have the proxy read the body before it connects.",
    "unsupported_encoding": "Send the body as plain JSON, without `Content-Encoding`.",
    "unauthorized": "Send one of the server's keys (`--api-key`, `--api-key-file`) as `Authorization: Bearer KEY`. Routes of "
    "operators take the operator key: `tandem operator-key` prints it.",
    "forbidden": "Give the cluster a secret (`TANDEM_CLUSTER_KEY`) and send the operator key, which `tandem operator-key` prints. Where there are "
    "neither a secret nor API keys, ask from the machine of the router or node itself, without a proxy.",
    "model_not_found": "Ask for a model that `GET /v1/models` lists, or give nodes or router the name with `--served-model-name`.",
    "node_unknown": "`GET /nodes` lists the nodes with their ids; the URL is taken as well.",
    "body_too_large": "Send less, or raise `--max-body-bytes`.",
    "overloaded": "Wait as long as `Retry-After` says. If it stays so, the cluster is too small for its load: "
    "`tandem docs tuning` says which role lacks nodes, [admission](../admission.md) how long lines may be.",
    "rate_limit_exceeded": "Wait as long as `Retry-After` says. What a key may use is in the router's `--key-limits`: "
    "[admission](../admission.md#what-a-key-may-use).",
    "deadline_passed": "The client's own deadline, or `--request-timeout-s`, is shorter than the line. Give it more time, or the cluster more "
    "nodes: [deadlines](../admission.md#deadlines).",
    "timeout": "The answer took longer than `--request-timeout-s`. Ask for fewer tokens, or raise it.",
    "out_of_pages": "Shorten the prompt or `max_new_tokens`, or give the node a larger pool: `--max-total-tokens`, on a GPU "
    "`--mem-fraction-static`. `tandem doctor --no-measure --model M --max-total-tokens N` says whether it fits.",
    "aborted": "Nothing, where it was your own cancelling. Else a node took the edge worker for lost: look for `edge` and `link` in its log.",
    "no_node_available": "`GET /health` of the router says which nodes are missing and why, `GET /nodes` what it knows of each. Routers wait "
    "`--node-wait-s` for one before they say this: [replay](../replay.md#how-long-it-goes-on).",
    "node_draining": "Send it to a router, which takes another node. Asked directly, a node that drains takes nothing new: "
    "[operations](../operations.md#draining).",
    "peer_draining": "As `node_draining`.",
    "attempts_used_up": "The message names the last failure. One request that fails on every pair may be what kills the nodes: look at their "
    "logs before you send it again. `--max-attempts` says how often it is tried.",
    "peer_lost": "A node died, was cut off or restarted, and no router was there to try elsewhere, or it had no other node. Look at the "
    "logs for `node.lost` and `kv_link.lost`: [replay](../replay.md#how-soon-a-loss-is-noticed).",
    "peer_behind": "The far side is stopped or starved of processor time. Look at what else runs on its machine.",
    "transfer_timeout": "One half of a request came and the other did not. With a router of your own: both halves need the same "
    "`bootstrap_room`, and decode has to reach prefill's `--bootstrap-port`. `tandem doctor --node URL --node URL` tries that.",
    "transfer_refused": "The two nodes do not agree about what may be written. It happens when one restarted in the middle of it; if it "
    "stays so, `tandem doctor --node URL --node URL` says which pairs can pair.",
    "transfer_failed": "The library of the transport failed. The node's log has its words; `tandem doctor --transfer-backend NAME` tries it "
    "alone: [transports](../transports.md).",
    "kv_corrupted": "Nothing for one: the request was computed again, or will be. When `tandem_corrupted_total` keeps rising, a link or a "
    "memory of that pair of machines is broken: `tandem doctor --connect` between the two finds it. [How bytes are checked](../architecture.md#how-bytes-are-checked).",
    "layout_mismatch": "Start both with the same model files, `--dtype` and `--kv-cache-dtype` (`--tp` and `--page-size` may differ). The message "
    "names what each of the two serves; `GET /server_info` of a node shows its `fingerprint`.",
    "engine_failed": "Look for the traceback in the node's log. The node goes on; a request that fails each time is a bug to report.",
    "grammar_violated": "A bug, or nodes of two releases with different grammar libraries: give all nodes of a cluster the same release.",
    "not_now": "The message says what the node is doing. Drain it before it is turned; wait until it has loaded.",
    "message_invalid": "Something that is no node speaks to a node's port, or two releases too far apart: look at the server's log, and keep "
    "strangers from the ports.",
    "message_too_large": "As `message_invalid`.",
}
# Told on a command line, or to nobody: never over HTTP.
NOT_OVER_HTTP = frozenset(
    {
        *("config_invalid", "drain_failed", "key_refused", "router_away", "tier_failed"),
        "unexpected_event",
    }
)
# What the HTTP server says without a class of its own: status, whether a retry helps, meaning, what to do.
OTHER_ERRORS = {
    "internal_error": (
        500,
        False,
        "Something raised that nothing expected: a bug.",
        "Look for `request.crashed` or `stream.failed` in the log of the server that answered: it has the traceback.",
    ),
    "not_found": (
        404,
        False,
        "There is no such route.",
        "The message lists the routes that there are; so does `/docs`.",
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
        "The bytes are no HTTP request that can be answered.",
        "Look at what is between client and server.",
    ),
}
