"""`tandem plan`: from the command line to the files and tables of a plan."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from tandem.bench.workload import TraceRow, read_trace
from tandem.plan.load import LENGTH_EXAMPLES, Load, draw, replay
from tandem.plan.models import KNOWN
from tandem.plan.nodes import CARDS, SIZES, NodeKind, node_kind
from tandem.plan.report import Plan, as_json, render, write_check
from tandem.plan.sizing import Goals, size_decode, size_prefill
from tandem.telemetry import log as logs
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid

EXAMPLES = f"""\
examples:
  tandem plan --model llama-8b --node h100 --prompt 3000 --output 300 --rate 40 --ttft-ms 500 --itl-ms 20
  tandem plan --node measured.json --trace mooncake_trace.jsonl --ttft-ms 2000 --itl-ms 50 --check check/
  tandem plan --model llama-70b --node h100-tp4 --node h100-tp8 --prompt lognormal:1500:12000 \\
              --output lognormal:200:1000 --rate 30 --system-prompt 2048 --ttft-ms 1000 --itl-ms 40
  tandem plan --model llama-8b --prefill-node h100 --decode-node l40s-tp2 --cost h100=2.9 --cost l40s-tp2=1.8 \\
              --prompt 2000 --output 400 --rate 20 --ttft-ms 800 --itl-ms 40

Models that need no directory: {", ".join(KNOWN)}.
Cards, estimated from vendors' figures: {", ".join(CARDS)}; each with -tp{", -tp".join(map(str, SIZES[1:]))}.

exit status: 0 a cluster was found; 1 no number of these nodes reaches the goals; 2 wrong usage.

More: tandem docs plan; tandem docs tuning
"""


def _up_to(most: float) -> Callable[[str], float]:
    """Return a reader of numbers above 0."""

    def number(text: str) -> float:
        if not 0 < (value := float(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text}: give more than 0, up to {most:g}")
        return value

    return number


_number = _up_to(1e6)


def _cost(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    return name, _number(number)


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem plan",
        description="Calculate how many prefill and decode nodes of which kind serve a load within the given "
        "times at the least cost.",
        epilog=EXAMPLES,
    )
    _add_nodes(parser.add_argument_group("nodes"))
    _add_load(parser.add_argument_group("load"))
    add = parser.add_argument_group("goals").add_argument
    add("--ttft-ms", type=_number, metavar="MS", help="longest time to the first token")
    add("--itl-ms", type=_number, metavar="MS", help="longest time between two tokens")
    add(
        "--percentile",
        type=_up_to(100),
        default=99.0,
        metavar="P",
        help="of requests and of gaps between tokens that keep these times (default: 99)",
    )
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add(
        "--check",
        type=Path,
        metavar="DIR",
        help="write files for simulated engines to DIR, and print the commands that check the plan with them",
    )
    return parser


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--node",
        action="append",
        default=[],
        metavar="NODE",
        help="kind of node for either role: a file of `tandem profile`, or CARD-tpN; may be repeated",
    )
    add("--prefill-node", action="append", default=[], metavar="NODE", help="for prefill alone")
    add("--decode-node", action="append", default=[], metavar="NODE", help="for decode alone")
    add(
        "--model",
        default="",
        metavar="PATH|NAME",
        help="of cards, which depend on it: a directory with config.json, or a known name",
    )
    add(
        "--cost",
        action="append",
        type=_cost,
        default=[],
        metavar="NODE=X",
        help="of one such node, in any unit (default: its number of devices); may be repeated",
    )
    add(
        "--link-gbit",
        type=_number,
        default=0.0,
        metavar="X",
        help="rate of every node's link for KV, in Gbit/s (default: from its profile)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format")
    add(
        "--prompt",
        default="",
        metavar="TOKENS",
        help=f"tokens of a prompt, without a trace: {LENGTH_EXAMPLES}",
    )
    add("--output", default="", metavar="TOKENS", help="tokens of an answer, likewise")
    add(
        "--rate",
        type=_up_to(10_000),  # a drawn load must fit into memory
        default=0.0,
        metavar="R",
        help="requests a second; of a trace: its average, by stretching its times",
    )
    add(
        "--system-prompt",
        type=int,
        default=0,
        metavar="TOKENS",
        help="shared beginning of every prompt, in addition to --prompt",
    )


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    logs.configure("error")
    args = build_parser().parse_args(argv)
    try:
        plan = make_plan(args)
        check = write_check(plan, args.check) if args.check is not None and plan.best else None
    except ConfigInvalid as error:
        sys.stderr.write(f"tandem plan: error: {error.for_operators}\n")
        return 2
    if args.json:
        sys.stdout.write(as_json(plan, check).decode())
    else:
        render(plan, check, Console(markup=False, highlight=False))
    return 0 if plan.best else 1


def make_plan(args: argparse.Namespace) -> Plan:
    """Return the plan that the flags ask for.

    Raises:
        ConfigInvalid: A value cannot work; the message names what to give.
    """
    if args.ttft_ms is None and args.itl_ms is None:
        raise ConfigInvalid("there is no goal: give --ttft-ms, --itl-ms or both", topic="plan")
    goals = Goals(
        ttft_s=None if args.ttft_ms is None else args.ttft_ms / 1000,
        itl_s=None if args.itl_ms is None else args.itl_ms / 1000,
        percentile=args.percentile,
    )
    prefills, decodes = _kinds(args)
    most_tokens = min(max(kind.most_tokens for kind in kinds) for kinds in (prefills, decodes))
    load = Load(_requests(args), most_tokens)
    return Plan(
        load=load,
        goals=goals,
        prefills=[size_prefill(kind, load, goals) for kind in prefills],
        decodes=[size_decode(kind, load, goals) for kind in decodes],
    )


def _kinds(args: argparse.Namespace) -> tuple[list[NodeKind], list[NodeKind]]:
    """Return the kinds for prefill and for decode."""
    prefills = [*dict.fromkeys(args.node + args.prefill_node)]
    decodes = [*dict.fromkeys(args.node + args.decode_node)]
    for role, names in (("prefill", prefills), ("decode", decodes)):
        if not names:
            raise ConfigInvalid(
                f"no kind of node for {role}: give --node for both roles, or --{role}-node; a file of "
                "`tandem profile`, or a card such as h100-tp2",
                topic="plan#nodes",
            )
    names = [*dict.fromkeys(prefills + decodes)]
    costs = dict(args.cost)
    if unknown := [name for name in costs if name not in names]:
        raise ConfigInvalid(f"--cost {unknown[0]}: name a node as --node does")
    link_bytes_per_s = args.link_gbit * 1e9 / 8
    kinds = {
        name: node_kind(name, args.model, cost=costs.get(name), link_bytes_per_s=link_bytes_per_s)
        for name in names
    }
    sizes = {kind.figures.kv_bytes_per_token: name for name, kind in kinds.items()}
    if len(sizes) > 1:
        told = ", ".join(f"{name} has {size:,}" for size, name in sizes.items())
        raise ConfigInvalid(
            f"nodes of a cluster have one model and type of KV, and so one size of a token's KV: {told} bytes",
            topic="plan#nodes",
        )
    return [kinds[name] for name in prefills], [kinds[name] for name in decodes]


def _requests(args: argparse.Namespace) -> list[TraceRow]:
    drawn = {"--prompt": args.prompt, "--output": args.output, "--rate": args.rate}
    if args.trace is not None:
        if args.prompt or args.output or args.system_prompt:
            raise ConfigInvalid(
                "--trace has its own lengths: leave out --prompt, --output and --system-prompt"
            )
        return replay(read_trace(str(args.trace)), args.rate)
    if missing := [flag for flag, value in drawn.items() if not value]:
        raise ConfigInvalid(
            f"there is no load: give --trace, or {' and '.join(missing)}; lengths are {LENGTH_EXAMPLES}",
            topic="plan#the-load",
        )
    return draw(args.prompt, args.output, rate=args.rate, system_tokens=args.system_prompt)
