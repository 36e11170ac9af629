"""What `tandem ARGUMENTS` of a deployment's files would be told: read by the product's own parsers."""

from collections.abc import Sequence
from pathlib import Path

import tandem.decode.command
import tandem.prefill.command
from tandem.node.config import NodeConfig
from tandem.node.flags import build_parser, read_config
from tandem.router.arguments import parse
from tandem.router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
NODES = {"prefill": tandem.prefill.command.COMMAND, "decode": tandem.decode.command.COMMAND}


def config_of(argv: Sequence[str]) -> NodeConfig | RouterConfig:
    """Return the config of a role; raises, as the command would end, for what cannot work."""
    role, *flags = argv
    if role == "lb":
        return parse(flags)
    command = NODES[role]
    parser = build_parser(command.prog, command.role, command.summary, command.default_port)
    return read_config(parser, command.role, flags)[0]
