"""The parsers of all commands, for the reference, for tests, and for `tandem completion SHELL`.

This module imports every command; `src/tandem/__main__.py` imports only the command that it runs.
"""

import argparse
import sys
from collections.abc import Sequence

import shtab

import tandem.batch.command
import tandem.bench.config
import tandem.decode.command
import tandem.doctor.config
import tandem.drain
import tandem.manual.command
import tandem.operator_key
import tandem.plan.command
import tandem.prefill.command
import tandem.profile.command
import tandem.serve
import tandem.top.command
import tandem.up
from tandem.router.arguments import build_parser as build_router_parser
from tandem.wire.command_line import Parser

EXAMPLES = """\
examples:
  source <(tandem completion bash)
  tandem completion zsh > "${fpath[1]}/_tandem"

More: tandem docs configuration
"""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by the command's name."""
    return {
        "up": tandem.up.build_parser(),
        "prefill": tandem.prefill.command.COMMAND.build_parser(),
        "decode": tandem.decode.command.COMMAND.build_parser(),
        "lb": build_router_parser(),
        "serve": tandem.serve.COMMAND.build_parser(),
        "drain": tandem.drain.build_parser(),
        "doctor": tandem.doctor.config.build_parser(),
        "bench": tandem.bench.config.build_parser(),
        "batch": tandem.batch.command.build_parser(),
        "top": tandem.top.command.build_parser(),
        "profile": tandem.profile.command.build_parser(),
        "plan": tandem.plan.command.build_parser(),
        "operator-key": tandem.operator_key.build_parser(),
        "completion": _completion_parser(),
        "docs": tandem.manual.command.build_parser(),
    }


def _completion_parser() -> Parser:
    parser = Parser(
        "tandem completion",
        description="Print the script that completes tandem's commands and flags in a shell.",
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
