"""The router's command line, parsed into a `RouterConfig`. It accepts two notations (see `EXAMPLES`)."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.frontend.options import HttpOptions, check_files
from tandem.router.config import PrefillTarget, RouterConfig
from tandem.router.key_limits import read_limits
from tandem.settings.flags import add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.wire.errors import ConfigInvalid

EXAMPLES = """\
examples:
  one pair:
    tandem lb --prefill http://127.0.0.1:7000 --decode http://127.0.0.1:7001
  several nodes per role, a bootstrap port for each prefill, four edge workers:
    tandem lb --prefill http://a:7000 http://b:7000 --prefill-bootstrap-ports 8998 8998 \\
              --decode http://c:7001 http://d:7001 --host 0.0.0.0 --port 8000 --workers 4
  in the notation of SGLang's router:
    tandem lb --pd-disaggregation --prefill http://a:7000 8998 --prefill http://b:7000 none \\
              --decode http://c:7001 --policy round_robin
  nodes that announce themselves (start them with --router), or the addresses of a DNS name:
    tandem lb --discover-announced
    tandem lb --discover-dns prefill=prefill.tandem:7000 decode=decode.tandem:7001

Nodes can be added and removed while it runs: POST /nodes, DELETE /nodes/ID; GET /nodes lists them.
GET /health answers 200 once a pair can serve; until then it names what is missing.
TANDEM_CLUSTER_KEY holds the secret that nodes and router share.

More: docs/membership.md; docs/policies.md; docs/admission.md; docs/replay.md
"""

# Flags of other routers and servers, accepted because existing scripts pass them. None has an effect here:
# prefill and decode are always separate, and metrics are at /metrics.
IGNORED_FLAGS = (
    "--pd-disaggregation",
    "--vllm-pd-disaggregation",
    "--mini-lb",
    "--rust-lb",
    "--prometheus-port",
    "--prometheus-host",
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
# Flags of other routers that change what a router does. Ignoring them would mislead, so they are errors.
REFUSED_FLAGS = {
    "--timeout": "use --request-timeout-s for the longest time that a request may take",
    **dict.fromkeys(
        (
            "--service-discovery",
            "--service-discovery-namespace",
            "--service-discovery-port",
            "--selector",
            "--prefill-selector",
            "--decode-selector",
        ),
        "use --discover-dns ROLE=HOST:PORT with the name of a headless Service",
    ),
}
# Flags that `--help` shows; `--help-all` shows all.
COMMON = (
    "--prefill",
    "--prefill-bootstrap-ports",
    "--decode",
    "--policy",
    "--discover-announced",
    "--discover-dns",
    "--max-queued-requests",
    "--host",
    "--port",
    "--workers",
    "--api-key-file",
    "--ssl-certfile",
    "--log-level",
    "--tool-call-parser",
)


def build_parser(prog: str = "tandem lb") -> Parser:
    """Return the parser of `tandem lb`."""
    parser = Parser(
        prog,
        common=COMMON,
        description="Serve HTTP for a cluster: pair a prefill node with a decode node for each request.",
        epilog=EXAMPLES,
    )
    add_flags(parser, RouterConfig)
    parser.ignore(IGNORED_FLAGS)
    parser.refuse(REFUSED_FLAGS)
    return parser


def parse(argv: Sequence[str], prog: str = "tandem lb") -> RouterConfig:
    """Parse the command line, and read the files that it names.

    Raises:
        ConfigInvalid: A value is invalid; the message says what to use instead.
        SystemExit: A flag is unknown or malformed (status 2), or --help was passed (0).
    """
    args = build_parser(prog).parse_args(argv)
    config = read_flags(
        RouterConfig,
        args,
        http=check_files(read_flags(HttpOptions, args, prefix="http.")),
        ignored_flags=tuple(dict.fromkeys(args.ignored)),
    )
    if config.admission.key_limits:
        read_limits(config.admission.key_limits)
    return replace(config, prefills=_with_ports(config.prefills, config.bootstrap_ports))


def _with_ports(
    targets: tuple[PrefillTarget, ...], ports: Sequence[int | None]
) -> tuple[PrefillTarget, ...]:
    if not ports:
        return targets
    if len(ports) != len(targets):
        raise ConfigInvalid(
            f"--prefill-bootstrap-ports has {len(ports)} ports for {len(targets)} prefill nodes: "
            "pass one port for each node, or leave the flag out"
        )
    return tuple(PrefillTarget(t.url, port) for t, port in zip(targets, ports, strict=True))
