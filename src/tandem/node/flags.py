"""The flags of `prefill`, `decode` and `serve`, named as in SGLang and vLLM where possible."""

import argparse
from collections.abc import Collection, Sequence

import msgspec

from tandem.frontend.options import HttpOptions, check_files
from tandem.frontend.replies.parser import reply_formats
from tandem.node.config import NodeOptions, NodeRole, check
from tandem.node.machine import DEFAULTS, with_machine_defaults
from tandem.node.models.checkpoint import model_name
from tandem.settings.flags import add_flags, read_flags
from tandem.settings.parser import Parser
from tandem.wire.errors import ConfigInvalid

# Flags that are accepted with a warning, and the reason why they have no effect.
FLAGS_WITHOUT_EFFECT = {
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-p2p-check": "the transport checks its own link",
    "--enable-metrics": "metrics are always at /metrics",
    "--tokenizer-worker-num": "the router's edge workers tokenize",
    "--detokenizer-worker-num": "the router's edge workers detokenize",
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

# Default limit of prompt tokens in a step that also decodes. They make such a step four times as long with the embedded
# model, and less than twice as long with a large model on GPUs: docs/benchmarks.md has the measurements.
LOCAL_PREFILL_TOKENS = 128

EXAMPLES: dict[NodeRole, str] = {
    "prefill": """\
examples:
  tandem prefill --model /models/llama --port 7000 --bootstrap-port 8998
  tandem prefill --host 10.0.0.5 --transfer-backend tcp      (with TANDEM_CLUSTER_KEY set)
  tandem prefill --kv-tier host:8GiB --kv-tier disk:/var/cache/tandem:200GiB

More: docs/transports.md; docs/tiers.md; docs/operations.md
""",
    "decode": """\
examples:
  tandem decode --model /models/llama --port 7001
  tandem decode --max-total-tokens 100000 --page-size 32

More: docs/tuning.md; docs/operations.md
""",
    "colocated": """\
examples:
  tandem serve --model /models/llama --port 8000
  tandem serve --dtype float32 --num-threads 2

More: docs/tuning.md; docs/http.md
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
    transfer_flags = ("transfer", "routers", "advertise_url", "engine.local_prefill_tokens")
    without = transfer_flags if role == "colocated" else ()
    add_flags(parser, NodeOptions, defaults=defaults, without=without)
    add_hidden_flags(parser)
    if role != "colocated":
        parser.add_argument(
            "--disaggregation-mode", choices=["prefill", "decode"], help=argparse.SUPPRESS
        )
    return parser


def add_hidden_flags(parser: Parser, without: Collection[str] = ()) -> None:
    """Add hidden flags for compatibility with SGLang, except those in `without`."""
    parser.add_argument("--enable-hierarchical-cache", action="store_true", help=argparse.SUPPRESS)
    parser.ignore(sorted(FLAGS_WITHOUT_EFFECT.keys() - set(without)))


def read_options(
    parser: argparse.ArgumentParser, role: NodeRole, argv: Sequence[str]
) -> tuple[NodeOptions, list[str]]:
    """Read the command line and the files that it names.

    Return the options and the flags that have no effect.
    """
    own, vllm_args = split_argv(argv)
    args = parser.parse_args(own)
    if getattr(args, "disaggregation_mode", None) not in (None, role):
        parser.error(
            f"--disaggregation-mode is {args.disaggregation_mode}, but this is a {role} node"
        )
    parsed = read_flags(
        NodeOptions,
        args,
        role=role,
        http=check_files(read_flags(HttpOptions, args, prefix="http.")),
    )
    # An invalid parser name is reported now, before the model is loaded.
    reply_formats(parsed.tool_call_parser, parsed.reasoning_parser)
    if args.enable_hierarchical_cache and not parsed.tiers.specs:
        raise ConfigInvalid(
            "--enable-hierarchical-cache needs a size; set --kv-tier host:SIZE, such as host:8GiB",
            topic="docs/tiers.md",
        )
    engine = with_machine_defaults(
        msgspec.structs.replace(
            parsed.engine,
            has_tiers=bool(parsed.tiers.specs),
            simulation=parsed.simulation.simulation(),
        )
    )
    names = parsed.served_model_names or (model_name(parsed.model),)
    config = msgspec.structs.replace(
        parsed, engine=engine, served_model_names=names, vllm_args=tuple(vllm_args)
    )
    return check(config), list(dict.fromkeys(args.ignored))


def split_argv(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the command line into our own flags and those after `--`, which are vLLM's."""
    end = argv.index("--") if "--" in argv else len(argv)
    return argv[:end], argv[end + 1 :]
