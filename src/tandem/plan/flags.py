"""The flags of `tandem plan` and their help."""

import argparse
from pathlib import Path

from tandem.plan.cards import CARDS, SIZES
from tandem.plan.models import KNOWN
from tandem.router.policies import POLICIES

EXAMPLES = f"""\
examples:
  tandem plan --model llama-8b --node h100 --prompt 3000 --output 300 --rate 40 --ttft-ms 500 --itl-ms 20
  tandem plan --node measured.json --trace mooncake_trace.jsonl --ttft-ms 2000 --itl-ms 50
  tandem plan --model llama-70b --node h100-tp4 --node h100-tp8 --prompt lognormal:1500:12000 \\
              --output lognormal:200:1000 --rate 30 --system-prompt 2048 --ttft-ms 1000 --itl-ms 40 --plot plan.html
  tandem plan --model llama-8b --prefill-node h100 --decode-node l40s-tp2 --cost h100=2.9 --cost l40s-tp2=1.8 \\
              --prompt 2000 --output 400 --rate 20 --ttft-ms 800 --itl-ms 40

Models that need no directory: {", ".join(KNOWN)}.
Cards, estimated from vendors' figures: {", ".join(CARDS)}; each with -tp{", -tp".join(map(str, SIZES[1:]))}.

exit status: 0 a fleet was found; 1 none within --max-nodes meets the goals; 2 wrong usage; 130 stopped by Ctrl-C.

More: tandem docs plan; tandem docs tuning
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="tandem plan",
        description="Say how many prefill and decode nodes of which kind a load takes so that its first tokens "
        "come and its answers flow as fast as asked, at the least cost: by simulating clusters.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_nodes(parser.add_argument_group("nodes"))
    _add_goals(parser.add_argument_group("goals"))
    _add_trace(parser.add_argument_group("the load: a trace"))
    _add_drawn(parser.add_argument_group("the load: drawn, instead of a trace"))
    _add_search(parser.add_argument_group("the search"))
    _add_output(parser.add_argument_group("what is said of it"))
    return parser


def _add_nodes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    each = "a profile of `tandem profile`, or CARD-tpN; may be repeated"
    add("--node", action="append", default=[], metavar="NODE", help=f"for either role: {each}")
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
        default=[],
        metavar="NODE=X",
        help="of one such node, in any unit (default: as many as it has devices); may be repeated",
    )
    add(
        "--link-gbit",
        type=float,
        default=0.0,
        metavar="X",
        help="what every node's link carries of KV, in Gbit/s (default: what its profile says)",
    )


def _add_goals(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ttft-ms", type=float, metavar="MS", help="time to the first token, at most")
    add("--itl-ms", type=float, metavar="MS", help="time between two tokens, at most")
    add(
        "--percentile",
        type=float,
        default=99.0,
        metavar="P",
        help="of requests, and of gaps between tokens, that have to meet them (default: 99)",
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE", help="JSON lines as Mooncake publishes them")
    add("--trace-limit", type=int, default=0, metavar="N", help="only its first N requests")


def _add_drawn(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--prompt",
        default="",
        metavar="TOKENS",
        help="of a turn: N, uniform:LOW:HIGH, or lognormal:P50:P99",
    )
    add("--output", default="", metavar="TOKENS", help="of an answer, likewise")
    add(
        "--rate",
        type=float,
        default=0.0,
        metavar="R",
        help="requests a second; of a trace: its average, by stretching its times",
    )
    add("--scale", type=float, default=1.0, metavar="X", help="times as many requests a second")
    add(
        "--duration",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds of arrivals (default: 1,000 requests, but 30 to 3,600 s; of a trace: all of it)",
    )
    add("--burstiness", type=float, default=1.0, help="1 is Poisson, less is burstier (default: 1)")
    add(
        "--system-prompt",
        type=int,
        default=0,
        metavar="TOKENS",
        help="shared, at the beginning of every conversation",
    )
    add(
        "--num-system-prompts", type=int, default=1, metavar="N", help="different ones (default: 1)"
    )
    add("--turns", type=int, default=1, metavar="N", help="requests of a conversation (default: 1)")
    add("--think-time-s", type=float, default=0.0, help="between an answer and the next turn")
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")


def _add_search(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-nodes", type=int, default=64, metavar="N", help="of a fleet (default: 64)")
    add(
        "--policy",
        choices=sorted(POLICIES),
        default="cache_aware",
        help="of the router (default: cache_aware)",
    )
    add(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="look for nothing that is cheaper by less (default: 0; 0.02 for large fleets)",
    )
    add(
        "--max-tries",
        type=int,
        default=150,
        metavar="N",
        help="fleets simulated at most (default: 150)",
    )
    add(
        "--ratios",
        type=int,
        default=9,
        metavar="N",
        help="other P:D ratios of the fleet found that are simulated, too (default: 9)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--plot", type=Path, metavar="FILE", help="goodput over the P:D ratio, as .svg or .html")
