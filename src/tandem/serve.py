"""`tandem serve`: both roles in one engine, as the colocated baseline and the reference of parity tests.

On a terminal it shows what `tandem up` shows, in front of a process of its own; elsewhere, such as under a service
manager, it is that process, and writes its log to standard output.
"""

import sys
from collections.abc import Sequence

from typing_extensions import override

from tandem.frontend.server import listen
from tandem.node.command import NodeCommand, run
from tandem.node.flags import read_config, split_argv
from tandem.processes import Member, shown_url
from tandem.processes import run as run_processes
from tandem.wire.command_line import Parser
from tandem.wire.errors import ConfigInvalid


class ServeCommand(NodeCommand):
    """The node command, with a switch for the terminal."""

    @override
    def build_parser(self) -> Parser:
        parser = super().build_parser()
        help_ = "on a terminal: show the log instead of writing it to a file"
        parser.add_argument("-v", "--verbose", action="store_true", help=help_)
        return parser


COMMAND = ServeCommand(
    role="colocated",
    engine_modules={"colocated": "tandem.decode.engine"},
    default_port=8000,
    summary="Serve a model with prefill and decode in one engine, without transfer.",
    prog="tandem serve",
)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    if not sys.stdout.isatty():
        return run(COMMAND, argv)
    parser = COMMAND.build_parser()
    args = parser.parse_args(split_argv(argv)[0])
    try:
        config, _ = read_config(parser, COMMAND.role, argv)
        listen(config.host, config.port).close()  # before the model is loaded
    except ConfigInvalid as error:
        parser.error(error.message)
    url = shown_url(config.http.scheme, config.host, config.port)
    # Its standard output is no terminal.
    node = Member("node", ["serve", "--log-format", "console", *argv], url)
    return run_processes("serve", [node], config.drain_timeout_s, is_verbose=args.verbose)
