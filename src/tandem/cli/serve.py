"""`tandem serve`: both roles in one engine. It is the colocated baseline and the reference of parity tests.

On a terminal it runs the node as a child process behind the screen of `tandem up`. Elsewhere, such as under a service
manager, the node runs in this process and logs to standard output.
"""

import sys
from collections.abc import Sequence

from typing_extensions import override

from tandem.cli.processes import ChildProcess, shown_url
from tandem.cli.processes import run as run_processes
from tandem.frontend.http.server import listen
from tandem.node.command import NodeCommand, run
from tandem.node.flags import read_options, split_argv
from tandem.settings.flags import SettingInvalid
from tandem.settings.parser import Parser


class ServeCommand(NodeCommand):
    """The node command with `--verbose`."""

    @override
    def build_parser(self) -> Parser:
        parser = super().build_parser()
        help_ = "on a terminal: show the log instead of writing it to a file"
        parser.add_argument("-v", "--verbose", action="store_true", help=help_)
        return parser


COMMAND = ServeCommand(
    role="colocated",
    engine_modules={"colocated": "tandem.decode.role"},
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
        config, _ = read_options(parser, COMMAND.role, argv)
        listen(config.host, config.port).close()  # before the model is loaded
    except SettingInvalid as error:
        parser.error(error.message)
    url = shown_url(config.http.scheme, config.host, config.port)
    own, vllm_args = split_argv(argv)
    after = ["--", *vllm_args] if vllm_args else []
    node = ChildProcess("node", ["serve", *own, "--log-format", "json", *after], url=url)
    return run_processes(
        "serve",
        [node],
        config.drain_timeout_s,
        is_verbose=args.verbose,
        log_format=config.log_format,
    )
