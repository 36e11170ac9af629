"""The flags of `prefill`, `decode` and `serve`, named as in SGLang and vLLM where possible."""

import argparse
from collections.abc import Collection, Sequence

import msgspec

from tandem.frontend.options import HttpOptions, with_files
from tandem.frontend.reply_parser import reply_formats
from tandem.node.checkpoint import model_name
from tandem.node.config import NodeConfig, NodeRole, check
from tandem.node.machine import DEFAULTS, fitted
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import add_flags, read_flags

# Flags that are accepted with a warning, and why they have no effect.
MEANINGLESS = {
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-p2p-check": "the transport checks its own link",
    "--enable-metrics": "metrics are always at /metrics",
    "--disaggregation-ib-device": "--transfer-interface names the device",
    "--tokenizer-worker-num": "the router's edge workers tokenize",
    "--detokenizer-worker-num": "the router's edge workers detokenize",
    "--stream-interval": "a request asks for it: sampling_params.stream_interval",
}


# Flags in `--help`; `--help-all` shows the rest.
COMMON = (
    "--model",
    "--served-model-name",
    "--context-length",
    "--dtype",
    "--host",
    "--port",
    "--device",
    "--tensor-parallel-size",
    "--mem-fraction-static",
    "--max-total-tokens",
    "--max-running-requests",
    "--kv-tier",
    "--router",
    "--transfer-backend",
    "--bootstrap-port",
    "--engine",
)

# Default limit per step beside decodes: the prompts that a router leaves to a decode node by default fit into one step.
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


def build_parser(prog: str, role: NodeRole, summary: str, default_port: int) -> Parser:
    """Return the parser of one node command."""
    parser = Parser(
        prog,
        common=COMMON,
        description=summary,
        epilog=EXAMPLES[role],
    )
    defaults = DEFAULTS | {
        "port": default_port,
        "engine.local_prefill_tokens": LOCAL_PREFILL_TOKENS,
    }
    alone = ("transfer", "routers", "advertise_url", "engine.local_prefill_tokens")
    without = alone if role == "colocated" else ()
    add_flags(parser, NodeConfig, defaults=defaults, without=without)
    add_hidden_flags(parser)
    if role != "colocated":
        parser.add_argument(
            "--disaggregation-mode", choices=["prefill", "decode"], help=argparse.SUPPRESS
        )
    return parser


def add_hidden_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add hidden flags for compatibility with SGLang, except those in `without`."""
    parser.add_argument("--enable-hierarchical-cache", action="store_true", help=argparse.SUPPRESS)
    parser.ignore(sorted(MEANINGLESS.keys() - set(without)))


def read_config(
    parser: argparse.ArgumentParser, role: NodeRole, argv: Sequence[str]
) -> tuple[NodeConfig, list[str]]:
    """Read the command line and the files that it names.

    Return the config and the flags that have no effect. `engine.model_dir` is still the user's `--model`.
    """
    own, vllm_args = split_argv(argv)
    args = parser.parse_args(own)
    if getattr(args, "disaggregation_mode", None) not in (None, role):
        parser.error(f"--disaggregation-mode {args.disaggregation_mode} given to a {role} node")
    read = read_flags(
        NodeConfig, args, role=role, http=with_files(read_flags(HttpOptions, args, prefix="http."))
    )
    # An invalid parser name is reported now, before the model is loaded.
    reply_formats(read.tool_call_parser, read.reasoning_parser)
    if args.enable_hierarchical_cache and not read.tiers.specs:
        raise ConfigInvalid(
            "--enable-hierarchical-cache needs a size: give --kv-tier host:SIZE, such as host:8GiB",
            topic="tiers",
        )
    engine = fitted(
        msgspec.structs.replace(
            read.engine,
            model_dir=read.model or "",
            has_tiers=bool(read.tiers.specs),
            simulation=read.simulation.simulation(),
        )
    )
    name = read.served_model_name or model_name(read.model)
    config = msgspec.structs.replace(
        read, engine=engine, served_model_name=name, vllm_args=tuple(vllm_args)
    )
    return check(config), list(dict.fromkeys(args.ignored))


def split_argv(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return our own flags, and those behind `--`, which are vLLM's."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]
