"""`tandem plan`: calculates a plan, prints the plan and writes its files."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
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
from tandem.wire.options import Flag, add_flags, read_flags

EXAMPLES = f"""\
examples:
  tandem plan --model llama-8b --node h100 --prompt 3000 --output 300 --rate 40 --ttft-ms 500 --itl-ms 20
  tandem plan --node measured.json --trace mooncake_trace.jsonl --ttft-ms 2000 --itl-ms 50 --check check/
  tandem plan --model llama-70b --node h100-tp4 --node h100-tp8 --prompt lognormal:1500:12000 \\
              --output lognormal:200:1000 --rate 30 --system-prompt 2048 --ttft-ms 1000 --itl-ms 40
  tandem plan --model llama-8b --node h100 --node l40s-tp2 --cost h100=2.9 --cost l40s-tp2=1.8 \\
              --prompt 2000 --output 400 --rate 20 --ttft-ms 800 --itl-ms 40

Models that need no directory: {", ".join(KNOWN)}.
Cards, estimated from vendors' figures: {", ".join(CARDS)}; each with -tp{", -tp".join(map(str, SIZES[1:]))}.

exit status: 0 a cluster was found; 1 no number of these nodes reaches the goals; 2 wrong usage.

More: tandem docs plan; tandem docs tuning
"""


def _costs(words: Sequence[str]) -> list[tuple[str, float]]:
    costs = []
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            costs.append((name, float(number)))
        except ValueError:
            raise ConfigInvalid(f"--cost {word}: give NODE=X") from None
    return costs


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem plan`."""

    nodes: Annotated[
        tuple[str, ...],
        Flag(
            "--node",
            group="nodes",
            metavar="NODE",
            help="kind of node, for both roles: a file of `tandem profile`, or CARD-tpN; may be repeated",
        ),
    ] = ()
    model: Annotated[
        str,
        Flag(
            "--model",
            metavar="PATH|NAME",
            help="model of cards: a directory with config.json, a name on the Hugging Face Hub, or a known name",
        ),
    ] = ""
    costs: Annotated[
        tuple[tuple[str, float], ...],
        Flag(
            "--cost",
            metavar="NODE=X",
            help="cost of one such node, in any unit (default: its number of devices); may be repeated",
            parse=_costs,
        ),
    ] = ()
    link_gbit: Annotated[
        float,
        Flag(
            "--link-gbit",
            ge=0,
            le=1e6,
            help="rate of every node's link for KV, in Gbit/s (default: from its profile)",
        ),
    ] = 0.0
    trace: Annotated[str, Flag("--trace", group="load", help="JSON lines in Mooncake's format")] = (
        ""
    )
    prompt: Annotated[
        str, Flag("--prompt", help=f"tokens of a prompt, without a trace: {LENGTH_EXAMPLES}")
    ] = ""
    output: Annotated[str, Flag("--output", help="tokens of an answer, likewise")] = ""
    rate: Annotated[
        float,
        Flag(
            "--rate",
            ge=0,
            le=10_000,  # a drawn load must fit into memory
            help="requests a second; of a trace: its average, by stretching its times",
        ),
    ] = 0.0
    system_tokens: Annotated[
        int,
        Flag(
            "--system-prompt",
            ge=0,
            help="shared beginning of every prompt, in addition to --prompt",
        ),
    ] = 0
    ttft_ms: Annotated[
        float | None,
        Flag("--ttft-ms", group="goals", ge=0.001, help="longest time to the first token"),
    ] = None
    itl_ms: Annotated[
        float | None, Flag("--itl-ms", ge=0.001, help="longest time between two tokens")
    ] = None
    percentile: Annotated[
        float,
        Flag(
            "--percentile",
            ge=1,
            le=100,
            help="percentile of requests and of gaps between tokens that keep these times",
        ),
    ] = 99.0
    is_json: Annotated[
        bool, Flag("--json", group="output", help="print one JSON object instead of tables")
    ] = False
    check: Annotated[
        Path | None,
        Flag(
            "--check",
            help="write files for simulated engines to DIR, and print the commands that check the plan with them",
            parse=Path,
        ),
    ] = None


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem plan",
        description="Calculate how many prefill and decode nodes of which kind serve a load within the given "
        "times at the least cost.",
        epilog=EXAMPLES,
    )
    add_flags(parser, PlanConfig)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    logs.configure("error")
    config = read_flags(PlanConfig, build_parser().parse_args(argv))
    plan = make_plan(config)
    check = write_check(plan, config.check) if config.check and plan.best else None
    if config.is_json:
        sys.stdout.write(as_json(plan, check).decode())
    else:
        render(plan, check, Console(markup=False, highlight=False))
    return 0 if plan.best else 1


def make_plan(config: PlanConfig) -> Plan:
    """Return the plan for the flags.

    Raises:
        ConfigInvalid: A value is missing or invalid; the message names the remedy.
    """
    if config.ttft_ms is None and config.itl_ms is None:
        raise ConfigInvalid("there is no goal: give --ttft-ms, --itl-ms or both", topic="plan")
    goals = Goals(
        ttft_s=None if config.ttft_ms is None else config.ttft_ms / 1000,
        itl_s=None if config.itl_ms is None else config.itl_ms / 1000,
        percentile=config.percentile,
    )
    kinds = _kinds(config)
    load = Load(_requests(config), max(kind.most_tokens for kind in kinds))
    return Plan(
        load=load,
        goals=goals,
        prefills=[size_prefill(kind, load, goals) for kind in kinds],
        decodes=[size_decode(kind, load, goals) for kind in kinds],
    )


def _kinds(config: PlanConfig) -> list[NodeKind]:
    names = [*dict.fromkeys(config.nodes)]
    if not names:
        raise ConfigInvalid(
            "no kind of node: give --node, a file of `tandem profile` or a card such as h100-tp2",
            topic="plan#nodes",
        )
    costs = dict(config.costs)
    if unknown := [name for name in costs if name not in names]:
        raise ConfigInvalid(f"--cost {unknown[0]}: name a node as --node does")
    link_bytes_per_s = config.link_gbit * 1e9 / 8
    kinds = [
        node_kind(name, config.model, cost=costs.get(name), link_bytes_per_s=link_bytes_per_s)
        for name in names
    ]
    sizes = {kind.figures.kv_bytes_per_token: kind.name for kind in kinds}
    if len(sizes) > 1:
        told = ", ".join(f"{name} has {size:,}" for size, name in sizes.items())
        raise ConfigInvalid(
            f"nodes of a cluster have one model and type of KV, and so one size of a token's KV: {told} bytes",
            topic="plan#nodes",
        )
    return kinds


def _requests(config: PlanConfig) -> list[TraceRow]:
    drawn = {"--prompt": config.prompt, "--output": config.output, "--rate": config.rate}
    if config.trace:
        if config.prompt or config.output or config.system_tokens:
            raise ConfigInvalid(
                "--trace has its own lengths: leave out --prompt, --output and --system-prompt"
            )
        return replay(read_trace(config.trace), config.rate)
    if missing := [flag for flag, value in drawn.items() if not value]:
        raise ConfigInvalid(
            f"there is no load: give --trace, or {' and '.join(missing)}; lengths are {LENGTH_EXAMPLES}",
            topic="plan#the-load",
        )
    return draw(config.prompt, config.output, rate=config.rate, system_tokens=config.system_tokens)
