"""The parsers of all commands, for `tandem completion SHELL`, the reference pages and tests.

This module imports every command; `main.py` imports only the command that it runs.
"""

import argparse
import sys
from collections.abc import Sequence

import shtab

import tandem.cli.drain
import tandem.cli.operator_key
import tandem.cli.serve
import tandem.cli.up
import tandem.stock.command
import tandem.tools.batch.command
import tandem.tools.bench.config
import tandem.tools.doctor.command
import tandem.tools.top
from tandem.node.command import COMMANDS
from tandem.router.arguments import build_parser as build_router_parser
from tandem.settings.parser import Parser

EXAMPLES = """\
examples:
  source <(tandem completion bash)
  tandem completion zsh > "${fpath[1]}/_tandem"

More: docs/configuration.md
"""


def parsers() -> dict[str, Parser]:
    """Return the parser of each command by name."""
    return {
        "up": tandem.cli.up.build_parser(),
        "prefill": COMMANDS["prefill"].build_parser(),
        "decode": COMMANDS["decode"].build_parser(),
        "lb": build_router_parser(),
        "serve": tandem.cli.serve.COMMAND.build_parser(),
        "adopt": tandem.stock.command.build_parser(),
        "drain": tandem.cli.drain.build_parser(),
        "doctor": tandem.tools.doctor.command.build_parser(),
        "bench": tandem.tools.bench.config.build_parser(),
        "batch": tandem.tools.batch.command.build_parser(),
        "top": tandem.tools.top.build_parser(),
        "operator-key": tandem.cli.operator_key.build_parser(),
        "completion": _completion_parser(),
    }


def _completion_parser() -> Parser:
    parser = Parser(
        "tandem completion",
        description="Print a script that completes tandem's commands and flags in a shell.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `tandem completion`; return the exit status."""
    shell = _completion_parser().parse_args(argv).shell
    everything = argparse.ArgumentParser("tandem")
    commands = everything.add_subparsers(metavar="COMMAND")
    for name, parser in parsers().items():
        commands.add_parser(name, parents=[parser], add_help=False, help=parser.description)
    sys.stdout.write(shtab.complete(everything, shell=shell))
    return 0
