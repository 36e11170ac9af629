"""`python -m tandem.prefill.engine`: the engine process of a prefill node, started by its HTTP process."""

from tandem.kvtransfer.group import PrefillGroup
from tandem.kvtransfer.sender import PrefillAgent
from tandem.node.engine_host import Parts, main
from tandem.node.process import end_process
from tandem.prefill.role import PrefillRole


def make_role(parts: Parts) -> PrefillRole:
    """Return the role of a prefill node."""
    assert isinstance(parts.agent, PrefillAgent | PrefillGroup)
    return PrefillRole(
        parts.engine,
        parts.agent,
        parts.answers,
        parts.config.engine.max_waiting_requests,
        tiering=parts.tiering,
        pushes_layers=parts.config.transfer.push_granularity == "layer",
    )


if __name__ == "__main__":
    end_process(main(make_role))
