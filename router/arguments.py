"""The router's command line, read into a `RouterConfig`.

Takes both forms that people type (see `EXAMPLES`).
"""

from collections.abc import Sequence

from tandem.frontend.options import HttpOptions, with_files
from tandem.router.config import (
    KubernetesTarget,
    PrefillTarget,
    RouterConfig,
    prefill_targets,
    read_bootstrap_ports,
)
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import add_flags, read_flags

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
# What `--help` shows; `--help-all` shows the rest.
COMMON = (
    "--prefill",
    "--prefill-bootstrap-ports",
    "--decode",
    "--policy",
    "--discover-announced",
    "--discover-dns",
    "--discover-kubernetes",
    "--max-queued-requests",
    "--host",
    "--port",
    "--detokenizers",
    "--api-key-file",
    "--ssl-certfile",
    "--log-level",
    "--tool-call-parser",
)


def build_parser(prog: str = "tandem lb") -> Parser:
    """Return the parser, help included."""
    parser = Parser(
        prog,
        common=COMMON,
        description="Serve HTTP for a cluster: pair a prefill with a decode node for each request.",
        epilog=EXAMPLES,
    )
    add_flags(parser, RouterConfig)
    parser.ignore(IGNORED_FLAGS)
    return parser


def parse(argv: Sequence[str], prog: str = "tandem lb") -> RouterConfig:
    """Read the command line, and the files that it names.

    Raises:
        ConfigInvalid: A value cannot work; the sentence reports what to give instead.
        SystemExit: A wrong flag (2), or --help (0).
    """
    args = build_parser(prog).parse_args(argv)
    pods = read_flags(KubernetesTarget, args, prefix="kubernetes.")
    if pods.is_on != bool(pods.prefill_selector or pods.decode_selector):
        raise ConfigInvalid(
            "--discover-kubernetes goes with --kubernetes-prefill-selector or "
            "--kubernetes-decode-selector: give the labels of the pods that are nodes",
            topic="membership#kubernetes",
        )
    return read_flags(
        RouterConfig,
        args,
        kubernetes=pods if pods.is_on else None,
        prefills=_with_ports(
            prefill_targets(args.prefills), read_bootstrap_ports(args.bootstrap_ports)
        ),
        http=with_files(read_flags(HttpOptions, args, prefix="http.")),
        ignored_flags=tuple(dict.fromkeys(args.ignored)),
    )


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
