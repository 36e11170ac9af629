"""`tandem serve`: runs both roles in one engine, as the colocated baseline and the reference of parity tests."""

from collections.abc import Sequence

from tandem.node.command import NodeCommand, run

COMMAND = NodeCommand(
    role="colocated",
    engine_modules={"colocated": "tandem.decode.engine"},
    default_port=8000,
    summary="Serve a model with prefill and decode in one engine, without transfer.",
    prog="tandem serve",
)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return run(COMMAND, argv)
