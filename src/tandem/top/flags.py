"""The flags of `tandem top`."""

import argparse

EXAMPLES = """\
examples:
  tandem top                                   the router of this machine, at port 8000
  tandem top http://10.0.0.2:8000              another one
  tandem top http://10.0.0.2:8000 --once       one picture, for a report or a file
  tandem top --once --json | jq .nodes         the same as data, as GET /overview tells it

Ctrl-C ends it. A browser shows the same and more at the router's own URL.

More: tandem docs dashboard
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="tandem top",
        description="Show what a router's cluster does now: nodes and their pages, pairs, latencies, recent "
        "requests by phase.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="of the router")
    add("--once", action="store_true", help="print one picture, and end")
    add("--json", action="store_true", help="print the state itself, a line each time")
    add("--interval", type=float, default=1.0, metavar="SECONDS", help="between two pictures; 1")
    add(
        "--api-key",
        default="",
        metavar="KEY",
        help="one that the router takes, where it asks for one",
    )
    add(
        "--slo-ttft-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="goodput: time to the first token; 1000",
    )
    add(
        "--slo-itl-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="goodput: mean between two tokens; 100",
    )
    return parser
