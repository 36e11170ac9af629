"""The `decode` command."""

from collections.abc import Sequence

from tandem.node.command import NodeCommand, run

COMMAND = NodeCommand(
    role="decode",
    # Module names, not imports: a running node can switch to the other role.
    engine_modules={"prefill": "tandem.prefill.engine", "decode": "tandem.decode.engine"},
    default_port=7001,
    summary="Serve answers: take over prompts whose KV landed here, and generate.",
)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return run(COMMAND, argv)
