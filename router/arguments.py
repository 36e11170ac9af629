"""The router's command line, read into a `RouterConfig`.

Takes both forms that people type (see `EXAMPLES`). argparse, since click has no flag that takes
several values at once. Reads its arguments and the files they name, and no environment.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import get_args

from typing_extensions import override

from tandem.frontend.flags import add_generation_config_flag, add_http_flags, read_http
from tandem.frontend.reply_flags import add_reply_flags
from tandem.router.admission_flags import add_admission_flags, read_admission
from tandem.router.config import (
    LOCAL_PREFILL_THRESHOLD,
    PolicyName,
    PrefillTarget,
    RouterConfig,
    node_url,
)
from tandem.router.discovery_flags import add_discovery_flags, read_dns, read_kubernetes
from tandem.telemetry.flags import add_format_flag, add_heartbeat_flag, add_level_flag
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import bare_host

EXAMPLES = """\
examples:
  one pair:
    tandem lb --prefill http://127.0.0.1:7000 --decode http://127.0.0.1:7001
  several of each, a bootstrap port for each prefill, four processes for HTTP and text:
    tandem lb --prefill http://a:7000 http://b:7000 --prefill-bootstrap-ports 8998 8998 \\
              --decode http://c:7001 http://d:7001 --host 0.0.0.0 --port 8000 --detokenizers 4
  as for SGLang's router:
    tandem lb --pd-disaggregation --prefill http://a:7000 8998 --prefill http://b:7000 none \\
              --decode http://c:7001 --policy round_robin
  nodes that announce themselves (--router of prefill and decode), or that a name has the addresses of:
    tandem lb --discover-announced
    tandem lb --discover-dns prefill=prefill.tandem:7000 decode=decode.tandem:7001

Nodes may be added and removed while it runs: POST /nodes, DELETE /nodes/ID, and GET /nodes to look.
GET /health answers 200 once a pair can serve, and says what is missing until then.
The secret that nodes and router share is read from TANDEM_CLUSTER_KEY.

More: tandem docs membership; tandem docs policies; tandem docs admission; tandem docs replay
"""

# Flags of other routers and servers that people have in their scripts. None of them means anything
# here: nodes are always apart, metrics are at /metrics.
IGNORED_FLAGS = (
    "--pd-disaggregation",
    "--vllm-pd-disaggregation",
    "--mini-lb",
    "--rust-lb",
    "--prometheus-port",
    "--prometheus-host",
    "--timeout",
    "--worker-startup-timeout-secs",
    "--worker-startup-check-interval",
    "--cache-threshold",
    "--balance-abs-threshold",
    "--balance-rel-threshold",
    "--eviction-interval",
    "--eviction-interval-secs",
    "--max-tree-size",
    "--log-dir",
    "--trust-remote-code",
    "--enable-metrics",
    "--insecure",
)
# Names that other routers have for policies.
POLICY_ALIASES = {
    "consistent_hash": "session",
    "consistent_hashing": "session",
    "manual": "session",
}


class _Ignored(argparse.Action):
    """Notes that a flag without meaning was given."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


def build_parser(prog: str = "tandem lb") -> argparse.ArgumentParser:
    """Return the parser, help included."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve HTTP for a cluster: pair a prefill with a decode node for each request.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(ignored=[])
    _add_cluster_flags(parser.add_argument_group("the cluster"))
    add_discovery_flags(parser.add_argument_group("nodes that come and go"))
    add_admission_flags(parser.add_argument_group("who may start"))
    _add_server_flags(parser.add_argument_group("the server"))
    _add_model_flags(parser.add_argument_group("the model"))
    for flag in IGNORED_FLAGS:
        parser.add_argument(flag, action=_Ignored, nargs="*", help=argparse.SUPPRESS)
    return parser


def _add_cluster_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prefill",
        action="append",
        nargs="+",
        default=[],
        metavar="URL|PORT",
        help="prefill nodes; a bootstrap port or `none` may follow each URL; may be repeated",
    )
    group.add_argument(
        "--prefill-bootstrap-ports",
        action="extend",
        nargs="+",
        default=[],
        metavar="PORT",
        help="bootstrap ports, in the order of the prefills (default: asked from each node)",
    )
    group.add_argument(
        "--decode",
        action="append",
        nargs="+",
        default=[],
        metavar="URL",
        help="decode nodes; may be repeated",
    )
    _add_pairing_flags(group)
    group.add_argument(
        "--node-ca-certs",
        default="",
        metavar="FILE",
        help="authorities of the certificates of https:// nodes (default: this system's)",
    )


def _add_pairing_flags(group: argparse._ArgumentGroup) -> None:
    policies = [*get_args(PolicyName), *POLICY_ALIASES]
    group.add_argument(
        "--policy",
        choices=policies,
        default="least_load",
        metavar="NAME",
        help=f"how a pair is chosen: {', '.join(get_args(PolicyName))}; cache_aware sends a prompt to "
        "where the beginning of it is cached, session each X-Session-Id to one pair "
        "(default: least_load)",
    )
    for role in ("prefill", "decode"):
        group.add_argument(
            f"--{role}-policy",
            choices=policies,
            default="",
            metavar="NAME",
            help=f"how {role} nodes are compared (default: as --policy says)",
        )
    group.add_argument(
        "--local-prefill-threshold",
        type=int,
        default=LOCAL_PREFILL_THRESHOLD,
        metavar="N",
        help="a decode node computes a prompt by itself while that leaves it no more than N prompt tokens to "
        "compute, cached ones not counted, and any prompt while no prefill node is up; 0: never "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--max-attempts",
        type=int,
        default=3,
        metavar="N",
        help="tries of one request when nodes die under it (default: 3)",
    )
    group.add_argument(
        "--node-wait-s",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long requests wait when a role has no node left, as while its only one restarts; "
        "0 refuses them at once (default: 10)",
    )


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=int, default=8000, help="port, 0 for any (default: %(default)s)"
    )
    group.add_argument(
        "--detokenizers",
        "--detokenizer-worker-num",
        "--tokenizer-worker-num",
        dest="num_workers",
        type=int,
        default=1,
        metavar="N",
        help="processes for HTTP, tokenizing and detokenizing; a connection goes to the least loaded. "
        "More pay when one keeps a core busy and others are idle (default: 1)",
    )
    group.add_argument(
        "--shutdown-delay-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="on SIGTERM, how long everything that comes is still served while /health is 503 and answers "
        "close their connections, so that balancers take this router out first (default: 0)",
    )
    group.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="on SIGTERM, how long running streams go on before they are cut; Ctrl-C gives them 3 s "
        "(default: 30)",
    )
    add_heartbeat_flag(group)
    add_http_flags(group)
    add_level_flag(group)
    add_format_flag(group)


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name",
        default="",
        metavar="NAME",
        help="the model's name for clients (default: what the nodes say)",
    )
    group.add_argument(
        "--tokenizer",
        "--tokenizer-path",
        "--model-path",
        dest="tokenizer_dir",
        default="",
        metavar="DIR",
        help="directory with the tokenizer (default: asked from the nodes)",
    )
    add_reply_flags(group)
    add_generation_config_flag(group)


def parse(argv: Sequence[str], prog: str = "tandem lb") -> RouterConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give instead.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = build_parser(prog).parse_args(argv)
    ports = [_bootstrap_port(text) for text in args.prefill_bootstrap_ports]
    return RouterConfig(
        prefills=_with_ports(prefill_targets(args.prefill), ports),
        decodes=tuple(node_url(text) for group in args.decode for text in group),
        dns=read_dns(args),
        kubernetes=read_kubernetes(args),
        takes_announced=args.discover_announced,
        host=bare_host("--host", args.host),
        port=args.port,
        num_workers=args.num_workers,
        policy=POLICY_ALIASES.get(args.policy, args.policy),
        prefill_policy=POLICY_ALIASES.get(args.prefill_policy, args.prefill_policy),
        decode_policy=POLICY_ALIASES.get(args.decode_policy, args.decode_policy),
        max_attempts=args.max_attempts,
        node_wait_s=args.node_wait_s,
        shutdown_delay_s=args.shutdown_delay_s,
        drain_timeout_s=args.drain_timeout_s,
        heartbeat_interval_ms=args.heartbeat_interval_ms,
        admission=read_admission(args),
        local_prefill_threshold=args.local_prefill_threshold,
        node_ca_certs=args.node_ca_certs,
        http=read_http(args),
        tokenizer_dir=args.tokenizer_dir,
        served_model_name=args.served_model_name,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        generation_config=args.generation_config,
        log_level=args.log_level,
        log_format=args.log_format,
        ignored_flags=tuple(dict.fromkeys(args.ignored)),
    )


def prefill_targets(groups: Iterable[Sequence[str]]) -> tuple[PrefillTarget, ...]:
    """Read what followed each `--prefill`: URLs, each with a bootstrap port or `none` behind it.

    Raises:
        ConfigInvalid: A port without a URL before it, or neither a URL nor a port.
    """
    targets: list[PrefillTarget] = []
    for group in groups:
        url: str | None = None
        for text in group:
            if "://" in text or not (text.isdigit() or text.lower() == "none"):
                url = node_url(text)
                targets.append(PrefillTarget(url))
            elif url is None:
                raise ConfigInvalid(f"--prefill {text}: a bootstrap port follows the URL it is of")
            else:
                targets[-1], url = PrefillTarget(url, _bootstrap_port(text)), None
    return tuple(targets)


def _bootstrap_port(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    raise ConfigInvalid(f"bootstrap port {text!r} is neither 1 to 65535 nor `none`")


def _with_ports(
    targets: tuple[PrefillTarget, ...], ports: Sequence[int | None]
) -> tuple[PrefillTarget, ...]:
    if not ports:
        return targets
    if len(ports) != len(targets):
        raise ConfigInvalid(
            f"--prefill-bootstrap-ports names {len(ports)} ports for {len(targets)} prefill nodes: "
            "give one for each, or none at all"
        )
    return tuple(PrefillTarget(t.url, port) for t, port in zip(targets, ports, strict=True))
