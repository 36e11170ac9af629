"""The `decode` command."""

from collections.abc import Sequence

from node.command import NodeCommand, run

COMMAND = NodeCommand(
    role="decode",
    engine_module="decode.engine",
    default_port=7001,
    summary="Serve answers: take over prompts whose KV landed here, and generate.",
)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return run(COMMAND, argv)
