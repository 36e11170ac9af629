"""Time limits so long that a slow machine never reaches them, for both ends of links in tests.

A busy machine, or one that pauses for seconds, would otherwise time out hand-offs in tests of something else.
A closed link is detected as early as with the normal limits.
"""

from typing import Any

from typing_extensions import override

from tandem.kvtransfer.agents.receiver import ReceiverTimeouts
from tandem.kvtransfer.agents.sender import SenderTimeouts
from tandem.wire.channel import Heartbeat

LONG_S = 1000.0
"""Far more than any test waits."""


class CalmHeartbeat(Heartbeat):
    """Beats at the normal interval, and never treats silence as a loss."""

    @property
    @override
    def timeout_s(self) -> float:
        return LONG_S

    @property
    @override
    def silence_s(self) -> float:
        return LONG_S


CALM = CalmHeartbeat()


def calm_sender(**limits: Any) -> SenderTimeouts:
    """Return a prefill's time limits: those given, and very long ones for the rest."""
    return SenderTimeouts(
        **{"grant_s": LONG_S, "early_grant_s": LONG_S, "heartbeat": CALM, **limits}
    )


def calm_receiver(**limits: Any) -> ReceiverTimeouts:
    """Return a decode's time limits: those given, and very long ones for the rest."""
    calm = {"connect_s": LONG_S, "landed_s": LONG_S, "released_s": LONG_S, "heartbeat": CALM}
    return ReceiverTimeouts(**{**calm, **limits})
