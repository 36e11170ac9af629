"""`tandem completion SHELL`: the script that completes commands and flags in a shell."""

import argparse
import sys
from collections.abc import Sequence

import shtab

from tandem.wire.command_line import Parser

EXAMPLES = """\
examples:
  source <(tandem completion bash)
  tandem completion zsh > "${fpath[1]}/_tandem"

More: tandem docs configuration
"""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem completion",
        description="Print the script that completes tandem's commands and flags in a shell.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=["bash", "zsh", "tcsh"])
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    from tandem.parsers import parsers  # it imports every command, this one too

    shell = build_parser().parse_args(argv).shell
    everything = argparse.ArgumentParser("tandem")
    commands = everything.add_subparsers(metavar="COMMAND")
    for name, parser in parsers().items():
        commands.add_parser(name, parents=[parser], add_help=False, help=parser.description)
    sys.stdout.write(shtab.complete(everything, shell=shell))
    return 0
