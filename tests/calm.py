"""Time limits that only a test's own clock reaches: ends of links that nobody loses for being slow.

A machine that is busy, or stands still for seconds, would else end hand-offs of tests that are about something else.
Whoever hangs up is found out as soon as ever.
"""

from typing import Any

from typing_extensions import override

from tandem.kvtransfer.receiver import ReceiverTimeouts
from tandem.kvtransfer.sender import SenderTimeouts
from tandem.wire.channel import Heartbeat

LONG_S = 1000.0
"""Far more than any test waits."""


class CalmHeartbeat(Heartbeat):
    """Beats as often as others, and takes no silence for a loss."""

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
    """Return the limits of a prefill: these, and otherwise none that a machine's pace reaches."""
    return SenderTimeouts(
        **{"grant_s": LONG_S, "early_grant_s": LONG_S, "heartbeat": CALM, **limits}
    )


def calm_receiver(**limits: Any) -> ReceiverTimeouts:
    """Return the limits of a decode: these, and otherwise none that a machine's pace reaches."""
    calm = {"connect_s": LONG_S, "landed_s": LONG_S, "released_s": LONG_S, "heartbeat": CALM}
    return ReceiverTimeouts(**{**calm, **limits})
