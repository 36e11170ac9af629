"""`python -m tandem.decode.engine`: the engine process of a decode node, and of `tandem serve`."""

from tandem.decode.role import DecodeRole
from tandem.kvtransfer.group import DecodeGroup
from tandem.kvtransfer.receiver import DecodeAgent
from tandem.node.engine_host import Parts, main
from tandem.node.process import end_process


def make_role(parts: Parts) -> DecodeRole:
    """Return the role of a decode node, or of a colocated node if there is no transfer agent."""
    assert parts.agent is None or isinstance(parts.agent, DecodeAgent | DecodeGroup)
    return DecodeRole(
        parts.engine,
        parts.agent,
        parts.answers,
        max_running=parts.config.engine.max_running_requests,
        max_waiting=parts.config.engine.max_waiting_requests,
        tiering=parts.tiering,
    )


if __name__ == "__main__":
    end_process(main(make_role))
