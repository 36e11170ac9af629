"""The flags of `tandem profile`: read and checked, nothing done."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.node.checkpoint import model_name
from tandem.node.config import NodeConfig, check
from tandem.node.engine_flags import add_engine_flags, add_model_flags, read_engine
from tandem.node.flags import HelpFormatter
from tandem.wire.errors import ConfigInvalid

EXAMPLES = """\
examples:
  tandem profile -o smollm2.json                           the embedded model on this machine's CPU
  tandem profile --quick                                   half a minute, and only the table
  tandem profile --model /models/llama-8b --device cuda --chunked-prefill-size 8192 -o h100.json
  tandem profile --model /models/llama-70b --device cuda --tp 4 --chunked-prefill-size 8192 -o tp4.json

What is written:
  tandem plan --node h100.json --prompt 4000 --output 300 --rate 50 --ttft-ms 1000 --itl-ms 30
  tandem up --engine simulated --sim-profile h100.json

exit status: 0 done; 1 the profile does not describe what was measured, and was not written; 2 wrong
usage; 130 stopped by Ctrl-C.

More: tandem docs plan; tandem docs simulation
"""

DEFAULT_MAX_ERROR = 0.20
# Attention of one chunk over 4,096 tokens of the embedded model takes two cores a second or two; over all
# points that is what three minutes hold.
CPU_CONTEXT, QUICK_CPU_CONTEXT, GPU_CONTEXT = 4096, 1024, 32768


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """What `tandem profile` was told.

    Attributes:
        node: As `tandem serve` would run it; `model_dir` is what the user gave.
        longest_context: That is measured.
        max_error: Mean relative error of a part, above which no profile is written.
    """

    node: NodeConfig
    cache_dir: Path | None
    output: Path | None
    is_quick: bool
    longest_context: int
    max_error: float


def parse(argv: Sequence[str]) -> ProfileConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = build_parser().parse_args(argv)
    if not args.max_error > 0:
        raise ConfigInvalid(f"--max-error is {args.max_error:g}: give more than 0, such as 0.2")
    if args.longest_context < 0:
        raise ConfigInvalid(f"--longest-context is {args.longest_context}: give tokens, or 0")
    if args.disable_prefix_cache:
        raise ConfigInvalid(
            "--disable-prefix-cache: leave it out; what a context costs is measured through the prefix cache"
        )
    name = args.served_model_name or model_name(args.model)
    node = NodeConfig(role="colocated", served_model_name=name, engine=read_engine(args))
    return ProfileConfig(
        node=check(node),
        cache_dir=args.cache_dir,
        output=args.output,
        is_quick=args.quick,
        longest_context=args.longest_context or _longest_context(args),
        max_error=args.max_error,
    )


def _longest_context(args: argparse.Namespace) -> int:
    if args.device != "cpu":
        return GPU_CONTEXT
    return QUICK_CPU_CONTEXT if args.quick else CPU_CONTEXT


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="tandem profile",
        description="Measure the forwards of one node, in this process and without a cluster, and write "
        "the profile that describes them: what `tandem plan` and simulated engines reckon with.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    _add_measuring(parser.add_argument_group("measuring"))
    add_model_flags(parser.add_argument_group("model"))
    add_engine_flags(
        parser.add_argument_group("engine (as the nodes of the cluster will have them)")
    )
    parser.set_defaults(engine="model", sim_profile=None, sim_kv=None)
    return parser


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-o", "--output", type=Path, default=None, metavar="FILE", help="write the profile as JSON")
    add("--quick", action="store_true", help="fewer points, each for a shorter time")
    add(
        "--longest-context",
        type=int,
        default=0,
        metavar="N",
        help="tokens before those that are measured, at most; longer ones are extrapolated. 0: "
        f"{CPU_CONTEXT:,} on the CPU ({QUICK_CPU_CONTEXT:,} with --quick), else {GPU_CONTEXT:,}",
    )
    add(
        "--max-error",
        type=float,
        default=DEFAULT_MAX_ERROR,
        metavar="SHARE",
        help="write nothing where the profile is off by more, on average over the points of a part",
    )
