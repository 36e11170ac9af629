"""The flags of `tandem plan`, read and checked; the files that they name are read, and nothing is simulated."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.bench.trace import read_trace
from tandem.plan.flags import build_parser
from tandem.plan.goals import Goals
from tandem.plan.kinds import kind_of, read_profile_of
from tandem.plan.lengths import EXAMPLES, read_lengths
from tandem.plan.models import read_model
from tandem.plan.planning import Limits
from tandem.plan.seam import NodeKind, PlannedRequest
from tandem.plan.workload import TOKEN_S, Drawn, draw, replay, without_too_long
from tandem.wire.errors import ConfigInvalid

# Ten requests are beyond a 99th percentile; in half a minute most answers of the first ones have ended.
DRAWN_REQUESTS, LEAST_S, MOST_S = 1000, 30.0, 3600.0
# A rate is one of a cluster: what is drawn for a plan must fit into memory.
MOST_REQUESTS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What `tandem plan` was told.

    Attributes:
        num_too_long: Requests that were left out: no node holds them.
    """

    prefills: Sequence[NodeKind]
    decodes: Sequence[NodeKind]
    requests: Sequence[PlannedRequest]
    num_too_long: int
    goals: Goals
    policy: str
    limits: Limits
    is_json: bool
    plot: Path | None


def parse(argv: Sequence[str]) -> PlanConfig:
    """Read the command line.

    Raises:
        ConfigInvalid: A value cannot work; the sentence says what to give.
        SystemExit: argparse's own answer to a wrong flag (2) and to --help (0).
    """
    args = build_parser().parse_args(argv)
    _check_numbers(args)
    goals = _goals(args)
    prefills, decodes = _kinds(args)
    most = min(max(map(_most_tokens, kinds)) for kinds in (prefills, decodes))
    requests, num_too_long = without_too_long(_requests(args, goals), most)
    if not requests:
        raise ConfigInvalid(
            f"no request of the load fits a node, which holds {most:,} tokens of one"
        )
    return PlanConfig(
        prefills=prefills,
        decodes=decodes,
        requests=requests,
        num_too_long=num_too_long,
        goals=goals,
        policy=args.policy,
        limits=Limits(
            max_nodes=args.max_nodes,
            max_tries=args.max_tries,
            tolerance=args.tolerance,
            num_ratios=args.ratios,
        ),
        is_json=args.json,
        plot=_plot(args.plot),
    )


def _most_tokens(kind: NodeKind) -> int:
    return min(kind.context_length, kind.num_tokens)


def _check_numbers(args: argparse.Namespace) -> None:
    least: dict[str, float] = {
        **dict.fromkeys(("trace_limit", "rate", "duration", "system_prompt", "think_time_s"), 0),
        **dict.fromkeys(("link_gbit", "ratios", "seed"), 0),
        **dict.fromkeys(("num_system_prompts", "turns", "max_tries"), 1),
        "max_nodes": 2,
    }
    for name, bound in least.items():
        if not getattr(args, name) >= bound:
            flag = "--" + name.replace("_", "-")
            raise ConfigInvalid(f"{flag} is {getattr(args, name):g}: give at least {bound:g}")
    for name in ("scale", "burstiness", "ttft_ms", "itl_ms"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigInvalid(f"--{name.replace('_', '-')} is {value:g}: give more than 0")
    if not 0 < args.percentile <= 100:
        raise ConfigInvalid(f"--percentile is {args.percentile:g}: give more than 0, up to 100")
    if args.tolerance is not None and not 0 <= args.tolerance < 1:
        raise ConfigInvalid(f"--tolerance is {args.tolerance:g}: give a share such as 0.02")


def _goals(args: argparse.Namespace) -> Goals:
    if args.ttft_ms is None and args.itl_ms is None:
        raise ConfigInvalid(
            "nothing is asked of the fleet: give --ttft-ms, --itl-ms or both", topic="plan"
        )
    return Goals(
        ttft_s=None if args.ttft_ms is None else args.ttft_ms / 1000,
        itl_s=None if args.itl_ms is None else args.itl_ms / 1000,
        percentile=args.percentile,
    )


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────


def _kinds(args: argparse.Namespace) -> tuple[list[NodeKind], list[NodeKind]]:
    """Return the kinds for prefill and for decode."""
    named = {
        "prefill": dict.fromkeys(args.node + args.prefill_node),
        "decode": dict.fromkeys(args.node + args.decode_node),
    }
    for role, names in named.items():
        if not names:
            raise ConfigInvalid(
                f"no kind of node for {role}: give --node for both roles, or --{role}-node; a file of "
                "`tandem profile`, or a card such as h100-tp2",
                topic="plan#nodes",
            )
    model = read_model(args.model) if args.model else None
    costs = _costs(args.cost, {*named["prefill"], *named["decode"]})
    kinds = {
        name: kind_of(
            name,
            read_profile_of(name, model),
            cost=costs.get(name),
            link_bytes_per_s=args.link_gbit * 1e9 / 8,
        )
        for name in {**named["prefill"], **named["decode"]}
    }
    _check_same_model([*kinds.values()])
    return [kinds[name] for name in named["prefill"]], [kinds[name] for name in named["decode"]]


def _costs(given: Sequence[str], names: set[str]) -> dict[str, float]:
    costs = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            costs[name] = float(number)
        except ValueError:
            costs[name] = 0.0
        if name not in names or not 0 < costs[name] < float("inf"):
            raise ConfigInvalid(
                f"--cost {text}: give NODE=X, NODE as --node names it and X more than 0"
            )
    return costs


def _check_same_model(kinds: Sequence[NodeKind]) -> None:
    """Refuse to pair nodes whose KV is not of one model."""
    sizes = {kind.kv_bytes_per_token: kind for kind in kinds}
    if len(sizes) > 1:
        one, other, *_ = sizes.values()
        raise ConfigInvalid(
            f"--node {one.name} has {one.kv_bytes_per_token:,} bytes of KV a token, {other.name} "
            f"{other.kv_bytes_per_token:,}: nodes of a cluster have one model and type of KV",
            topic="plan#nodes",
        )


# ── the load ─────────────────────────────────────────────────────────────────────────────────────


def _requests(args: argparse.Namespace, goals: Goals) -> list[PlannedRequest]:
    if args.trace is not None:
        return _of_trace(args)
    if args.trace_limit:
        raise ConfigInvalid("--trace-limit: there is no trace; give --trace, or leave it out")
    for flag, value in (("--prompt", args.prompt), ("--output", args.output)):
        if not value:
            raise ConfigInvalid(
                f"the load is not said: give --trace, or --prompt, --output and --rate; {flag} takes {EXAMPLES}",
                topic="plan#the-load",
            )
    if not args.rate:
        raise ConfigInvalid("--rate: give requests a second", topic="plan#the-load")
    rate = args.rate * args.scale
    duration_s = args.duration or min(max(DRAWN_REQUESTS / rate, LEAST_S), MOST_S)
    if rate * duration_s > MOST_REQUESTS:
        raise ConfigInvalid(
            f"--rate and --duration come to {rate * duration_s:,.0f} requests: give at most {MOST_REQUESTS:,}"
        )
    return draw(
        Drawn(
            prompt=read_lengths(args.prompt, "--prompt"),
            output=read_lengths(args.output, "--output"),
            rate=rate,
            duration_s=duration_s,
            burstiness=args.burstiness,
            system_tokens=args.system_prompt,
            num_systems=args.num_system_prompts,
            turns=args.turns,
            think_s=args.think_time_s,
            token_s=goals.itl_s or TOKEN_S,
            seed=args.seed,
        )
    )


def _of_trace(args: argparse.Namespace) -> list[PlannedRequest]:
    given = {"--prompt": args.prompt, "--output": args.output, "--turns": args.turns > 1}
    given["--system-prompt"] = args.system_prompt
    given["--num-system-prompts"] = args.num_system_prompts > 1
    given["--think-time-s"] = args.think_time_s
    given["--burstiness"] = args.burstiness != 1
    if wrong := [flag for flag, value in given.items() if value]:
        raise ConfigInvalid(f"--trace says itself what is asked for: leave out {', '.join(wrong)}")
    try:
        with args.trace.open("rb") as lines:
            rows = read_trace(lines, str(args.trace), args.trace_limit)
    except OSError as error:
        raise ConfigInvalid(f"--trace {args.trace}: {error.strerror}") from error
    return replay(rows, rate=args.rate, scale=args.scale, duration_s=args.duration)


def _plot(path: Path | None) -> Path | None:
    if path is None:
        return None
    if path.suffix not in (".svg", ".html"):
        raise ConfigInvalid(f"--plot {path}: give a name that ends in .svg or .html")
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigInvalid(f"--plot {path}: {error.strerror}") from error
    return path
