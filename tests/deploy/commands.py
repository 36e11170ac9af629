"""What `tandem ARGUMENTS` of a deployment's files would be told: read by the product's own parsers."""

from collections.abc import Sequence
from pathlib import Path

from tandem.node.command import COMMANDS
from tandem.node.config import NodeOptions
from tandem.node.flags import build_parser, read_options
from tandem.router.arguments import parse
from tandem.router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
NODES = COMMANDS


def config_of(argv: Sequence[str]) -> NodeOptions | RouterConfig:
    """Return the config of a role; raises, as the command would end, for what cannot work."""
    role, *flags = argv
    if role == "lb":
        return parse(flags)
    command = NODES[role]
    parser = build_parser(command.prog, command.role, command.summary, command.default_port)
    return read_options(parser, command.role, flags)[0]
