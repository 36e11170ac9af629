"""How often both ends of a link say that they are there, and after how much silence one is lost.

```
 alive ─▶ │ beat │ beat │ dies       beat due ──────── timeout_s ────────▶ lost, within 4 intervals
```
"""

from dataclasses import dataclass

from tandem.wire.errors import ConfigInvalid

MIN_INTERVAL_S = 0.02
MAX_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The rhythm of a process's links.

    Attributes:
        interval_s: Between two beats. A lost peer is noticed within four of them.
    """

    interval_s: float = 0.5

    @property
    def timeout_s(self) -> float:
        """How long a beat may go unanswered; the next one is due an interval after a peer died."""
        return 3 * self.interval_s

    @property
    def silence_s(self) -> float:
        """How long after its last word a peer may be judged, by who looks a few times an interval."""
        return 3.5 * self.interval_s


DEFAULT_HEARTBEAT = Heartbeat()


def heartbeat_of(interval_ms: float) -> Heartbeat:
    """Return the rhythm that `--heartbeat-interval-ms` asks for.

    Raises:
        ConfigInvalid: Too short to be kept by a busy machine, or too long to be of use.
    """
    interval_s = interval_ms / 1000
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S:
        raise ConfigInvalid(
            f"--heartbeat-interval-ms is {interval_ms:g}: give {MIN_INTERVAL_S * 1000:g} to "
            f"{MAX_INTERVAL_S * 1000:g}"
        )
    return Heartbeat(interval_s)
