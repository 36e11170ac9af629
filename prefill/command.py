"""The `prefill` command."""

from collections.abc import Sequence

from tandem.node.command import NodeCommand, run

COMMAND = NodeCommand(
    role="prefill",
    # Module names, not imports: a running node can switch to the other role.
    engine_modules={"prefill": "tandem.prefill.engine", "decode": "tandem.decode.engine"},
    default_port=7000,
    summary="Serve prompts: compute their KV and push it into decode nodes' memory.",
)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    return run(COMMAND, argv)
