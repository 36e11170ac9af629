"""The parsers of all commands: what the reference is written from, and what tests hold examples against.

Imports every command; `src/tandem/__main__.py` imports the one that it runs.
"""

import argparse

import tandem.batch.command
import tandem.bench.config
import tandem.completion
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
from tandem.node.command import NodeCommand
from tandem.router.arguments import build_parser as build_router_parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order in which `tandem --help` names them."""
    return {
        "up": tandem.up.build_parser(),
        "prefill": _of_node(tandem.prefill.command.COMMAND),
        "decode": _of_node(tandem.decode.command.COMMAND),
        "lb": build_router_parser(),
        "serve": _of_node(tandem.serve.COMMAND),
        "drain": tandem.drain.build_parser(),
        "doctor": tandem.doctor.config.build_parser(),
        "bench": tandem.bench.config.build_parser(),
        "batch": tandem.batch.command.build_parser(),
        "top": tandem.top.command.build_parser(),
        "profile": tandem.profile.command.build_parser(),
        "plan": tandem.plan.command.build_parser(),
        "operator-key": tandem.operator_key.build_parser(),
        "completion": tandem.completion.build_parser(),
        "docs": tandem.manual.command.build_parser(),
    }


def _of_node(command: NodeCommand) -> argparse.ArgumentParser:
    return command.build_parser()
