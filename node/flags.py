"""The flags of a node, with the names that users of SGLang and vLLM know.

argparse, not a library above it: one flag has up to three names, three commands share them all, and
`--prefill URL PORT` takes several values. Reads arguments and the files they name; the environment is read
in `command`.
"""

import argparse
from collections.abc import Sequence

import msgspec
from typing_extensions import override

from tandem.frontend.flags import add_generation_config_flag, add_http_flags, read_http
from tandem.frontend.reply_flags import add_reply_flags
from tandem.frontend.reply_parser import reply_formats
from tandem.node.checkpoint import model_name
from tandem.node.config import (
    DRAIN_TIMEOUT_S,
    STEP_TIMEOUT_S,
    NodeConfig,
    NodeRole,
    TransferConfig,
    check,
)
from tandem.node.engine_flags import (
    add_engine_flags,
    add_model_flags,
    add_simulation_flags,
    read_engine,
)
from tandem.node.tier_flags import add_tier_flags, read_tiers
from tandem.telemetry.flags import add_format_flag, add_heartbeat_flag, add_level_flag
from tandem.wire.hosts import bare_host, checked_url

# Known elsewhere, without meaning here: accepted, said once. Value: why.
MEANINGLESS = {
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-p2p-check": "the transport checks its own link",
    "--enable-metrics": "metrics are always at /metrics",
    "--disaggregation-ib-device": "--transfer-interface names the device",
    "--tokenizer-worker-num": "the router's edge workers tokenize",
    "--detokenizer-worker-num": "the router's edge workers detokenize",
    "--stream-interval": "a request asks for it: sampling_params.stream_interval",
}


# What a router leaves to a decode node by default fits into one step.
LOCAL_PREFILL_TOKENS = 128

EXAMPLES: dict[NodeRole, str] = {
    "prefill": """\
examples:
  tandem prefill --model /models/llama --port 7000 --bootstrap-port 8998
  tandem prefill --host 10.0.0.5 --transfer-backend tcp      (with TANDEM_CLUSTER_KEY set)
  tandem prefill --kv-tier host:8GiB --kv-tier disk:/var/cache/tandem:200GiB

More: tandem docs transports; tandem docs tiers; tandem docs operations
""",
    "decode": """\
examples:
  tandem decode --model /models/llama --port 7001
  tandem decode --max-total-tokens 100000 --page-size 32

More: tandem docs tuning; tandem docs operations
""",
    "colocated": """\
examples:
  tandem serve --model /models/llama --port 8000
  tandem serve --dtype float32 --num-threads 2

More: tandem docs tuning; tandem docs http
""",
}


def build_parser(
    prog: str, role: NodeRole, summary: str, default_port: int
) -> argparse.ArgumentParser:
    """Return the parser of one node command."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=summary,
        epilog=EXAMPLES[role],
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_model_flags(parser.add_argument_group("model"))
    _add_server_flags(parser.add_argument_group("server"), default_port)
    add_engine_flags(parser.add_argument_group("engine"))
    add_tier_flags(parser.add_argument_group("tiers"))
    add_simulation_flags(parser.add_argument_group("simulation"))
    if role != "colocated":
        _add_announce_flags(parser.add_argument_group("routers"))
        _add_transfer_flags(parser.add_argument_group("transfer"))
    for flag in MEANINGLESS:
        parser.add_argument(
            flag, nargs="*", action=_Meaningless, dest="meaningless", help=argparse.SUPPRESS
        )
    return parser


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the examples' lines, and shows a default where there is something to show."""

    @override
    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, [], ""):
            return action.help
        return super()._get_help_string(action)


class _Meaningless(argparse.Action):
    """Collects the names of flags that were given and mean nothing here."""

    @override
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        del parser, values
        namespace.meaningless = [*(namespace.meaningless or []), option_string]


def _add_server_flags(group: argparse._ArgumentGroup, default_port: int) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=default_port, help="of HTTP")
    add(
        "--zone",
        default="",
        metavar="NAME",
        help="where this node stands; routers pair nodes of one zone before those of two",
    )
    add("--engine-port", type=int, default=0, help="of the token plane; 0: any free port")
    add_heartbeat_flag(group)
    add(
        "--drain-timeout-s",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="SECONDS",
        help="how long running requests may take to finish after SIGTERM or POST /drain, before they are "
        "handed over to other nodes; 0 hands over at once",
    )
    add(
        "--step-timeout-s",
        type=float,
        default=STEP_TIMEOUT_S,
        metavar="SECONDS",
        help="how long one step of the engine may take; a longer one hangs and ends the node. The first steps, "
        "which may compile, are not limited",
    )
    add_http_flags(group)
    add_level_flag(group)
    add_format_flag(group)
    add(
        "--incremental-streaming-output",
        action="store_true",
        help="/generate streams what is new instead of all so far",
    )
    add_reply_flags(group)
    add_generation_config_flag(group)
    add(
        "--insecure",
        action="store_true",
        help="listen beyond loopback without TANDEM_CLUSTER_KEY, trusting the network",
    )


def _add_announce_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--router",
        action="append",
        default=[],
        metavar="URL",
        help="tell this router, every 3 s, that the node is there, so that it need not be listed there; may "
        "be repeated",
    )
    add(
        "--advertise-url",
        default="",
        metavar="URL",
        help="by which routers reach this node; nothing: its --host and --port and, where --host is all "
        "addresses, the one that this machine reaches the router from",
    )


def _add_transfer_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    defaults = TransferConfig()
    add(
        "--transfer-backend",
        "--disaggregation-transfer-backend",
        default=defaults.backend,
        help="how KV moves: auto, shm, tcp, cuda_ipc, nixl, ucx, mooncake, nccl, file; `tandem docs transports` says which for what",
    )
    add(
        "--transfer-directory",
        default=defaults.directory,
        metavar="DIR",
        help="what --transfer-backend file goes through: writable from both sides",
    )
    add(
        "--transfer-interface",
        default=defaults.interface,
        metavar="NAME",
        help="network interface that tcp listens on and sends from, by its IPv4 or IPv6 address as in --host",
    )
    add(
        "--bootstrap-port",
        "--disaggregation-bootstrap-port",
        type=int,
        default=defaults.bootstrap_port,
        help="where prefill takes grants, also one that was started as decode; on decode: the port taken when "
        "a request names none",
    )
    add(
        "--grant-timeout",
        type=float,
        default=defaults.grant_timeout_s,
        metavar="SECONDS",
        help="how long prefill waits for decode to grant pages",
    )
    add(
        "--local-prefill-tokens",
        type=int,
        default=LOCAL_PREFILL_TOKENS,
        metavar="N",
        help="on decode: tokens of new prompts computed in one step beside answers, of those that a router "
        "leaves to it; 0: as many as --chunked-prefill-size",
    )
    _add_push_flags(group)


def _add_push_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    defaults = TransferConfig()
    add(
        "--push-granularity",
        choices=["layer", "chunk"],
        default=defaults.push_granularity,
        help="on prefill, when KV leaves: as layers are computed, or after each chunk of a prompt",
    )
    add(
        "--verify-kv",
        choices=["off", "sample", "always"],
        default=defaults.verify,
        help="how much of each page is hashed on both sides; sample: K or V of one layer in 32",
    )
    add(
        "--no-kv-checksum",
        action="store_const",
        const="off",
        dest="verify_kv",
        help=argparse.SUPPRESS,
    )
    add(
        "--disaggregation-mode",
        choices=["prefill", "decode"],
        default=None,
        help=argparse.SUPPRESS,
    )


def read_config(
    parser: argparse.ArgumentParser, role: NodeRole, argv: Sequence[str]
) -> tuple[NodeConfig, argparse.Namespace]:
    """Read the command line.

    Returns:
        The config, its `engine.model_dir` still what the user gave, and the raw flags.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = parser.parse_args(argv)
    if getattr(args, "disaggregation_mode", None) not in (None, role):
        parser.error(f"--disaggregation-mode {args.disaggregation_mode} given to a {role} node")
    # Told of here, not when the model is loaded.
    reply_formats(args.tool_call_parser, args.reasoning_parser)
    tiers = read_tiers(args)
    config = NodeConfig(
        role=role,
        served_model_name=args.served_model_name or model_name(args.model),
        engine=msgspec.structs.replace(read_engine(args), has_tiers=bool(tiers.specs)),
        tiers=tiers,
        transfer=TransferConfig() if role == "colocated" else _transfer(args),
        host=bare_host("--host", args.host),
        port=args.port,
        zone=args.zone,
        engine_port=args.engine_port,
        heartbeat_interval_ms=args.heartbeat_interval_ms,
        http=read_http(args),
        is_incremental_output=args.incremental_streaming_output,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        log_level=args.log_level,
        log_format=args.log_format,
        is_insecure=args.insecure,
        drain_timeout_s=args.drain_timeout_s,
        step_timeout_s=args.step_timeout_s,
        routers=tuple(checked_url("--router", url) for url in getattr(args, "router", [])),
        advertise_url=_advertise_url(args),
    )
    return check(config), args


def _advertise_url(args: argparse.Namespace) -> str:
    url: str = getattr(args, "advertise_url", "")
    return checked_url("--advertise-url", url) if url else ""


def _transfer(args: argparse.Namespace) -> TransferConfig:
    return TransferConfig(
        backend=args.transfer_backend,
        directory=args.transfer_directory,
        interface=args.transfer_interface,
        bootstrap_port=args.bootstrap_port,
        grant_timeout_s=args.grant_timeout,
        push_granularity=args.push_granularity,
        verify=args.verify_kv,
    )
