"""Measures transports one after another, each between two probes. Says nothing of what the numbers mean.

The writing probe always runs here; where the other one runs is up to the `FarEnd`: on this host
(`ReceivingProbe`), or on another one (`tandem.doctor.pair`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.doctor.probe import (
    MEMCPY,
    SOCKET,
    Broke,
    Check,
    Checked,
    FromProbe,
    Measured,
    NotOpened,
    Opened,
    Receive,
    Send,
    Shape,
    Where,
)
from tandem.doctor.probe_process import Probe
from tandem.wire.errors import PeerLost, TransferTimeout
from tandem.wire.hand_off import TransportOffer

# Beyond what is measured: a library of a transport may take this long to load and to connect.
PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is moved, and for how long each transport may take.

    Pages of 64 KiB: those of small models, and the size at which the cost of each page still shows.
    """

    shape: Shape
    rate_s: float
    latency_s: float


QUICK = Effort(Shape(page_bytes=64 << 10, num_pages=512), rate_s=0.15, latency_s=0.05)
# Beyond most last-level caches, so that memory is measured and not the cache.
THOROUGH = Effort(Shape(page_bytes=64 << 10, num_pages=2048), rate_s=1.0, latency_s=0.25)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one transport.

    Attributes:
        kind: `no_library`: what it stands on is not installed, at either end. `refused`: an end says that
            it cannot be used here. `broke`: both ends agreed, and then it did not do what it should.
        reason: Why it does not work.
    """

    name: str
    kind: Literal["works", "no_library", "refused", "broke"]
    measured: Measured | None = None
    reason: str = ""


class FarEnd(Protocol):
    """Where the receiving probes run. One is open at a time."""

    def open(self, name: str) -> Opened | NotOpened:
        """Start to receive.

        Raises:
            PeerLost: The far end is gone, or the probe is.
            TransferTimeout: There is no answer.
        """
        ...

    def digest(self, num_copies: int) -> str:
        """Return the hash of what arrived; raises as `open` does."""
        ...

    def shut(self) -> None:
        """End what `open` started. Safe to call twice."""
        ...

    def watch(self) -> None:
        """Look whether the far end is there; called several times a second.

        Raises:
            PeerLost: It is not.
        """
        ...


class ReceivingProbe:
    """The far end where it runs: on this host, or behind a link from another. One probe at a time.

    Args:
        toward_host: The writing host, as this one reaches it.
        watch: Called while a probe is waited for; raises when whoever asked is gone.
    """

    def __init__(
        self,
        shape: Shape,
        where: Where,
        toward_host: str,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self._shape, self._where, self._toward_host = shape, where, toward_host
        self.watch = watch
        self._probe: Probe | None = None

    def open(self, name: str) -> Opened | NotOpened:
        """See `FarEnd.open`."""
        self.shut()
        self._probe = Probe()
        self._probe.tell(
            Receive(
                transport=name, shape=self._shape, where=self._where, toward_host=self._toward_host
            )
        )
        answer = self._probe.answer(PROBE_TIMEOUT_S, self.watch)
        assert isinstance(answer, Opened | NotOpened)
        return answer

    def digest(self, num_copies: int) -> str:
        """See `FarEnd.digest`."""
        if self._probe is None:
            raise PeerLost("nothing is open")
        self._probe.tell(Check(num_copies=num_copies))
        answer = self._probe.answer(PROBE_TIMEOUT_S, self.watch)
        assert isinstance(answer, Checked)
        return answer.digest

    def shut(self) -> None:
        """See `FarEnd.shut`."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None


def measure_limits(far: FarEnd, effort: Effort, where: Where) -> tuple[Outcome, Outcome]:
    """Measure one core's memcpy here, and one bare stream to the far end."""
    with Probe() as probe:
        probe.tell(_send(MEMCPY, effort, where, None))
        memcpy = _outcome(MEMCPY, probe.answer(_timeout_s(effort), far.watch))
    return memcpy, measure_transport(far, SOCKET, effort, where)


def measure_all(
    far: FarEnd,
    names: Sequence[str],
    effort: Effort,
    where: Where,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Outcome]:
    """Measure each transport in turn.

    Args:
        progress: Told the name of the one whose turn it is.

    Raises:
        PeerLost: The far end is gone; what was measured goes with it.
    """
    outcomes = []
    for name in names:
        progress(name)
        outcomes.append(measure_transport(far, name, effort, where))
    return outcomes


def measure_transport(far: FarEnd, name: str, effort: Effort, where: Where) -> Outcome:
    """Open, write, check what arrived, shut.

    Raises:
        PeerLost: The far end is gone, and not just its probe.
    """
    try:
        with Probe() as probe:  # starts up while the far end does
            opened = far.open(name)
            if isinstance(opened, NotOpened):
                return _outcome(name, opened)
            probe.tell(_send(name, effort, where, opened.offer))
            outcome = _outcome(name, probe.answer(_timeout_s(effort), far.watch))
            return outcome if name == SOCKET else _verified(outcome, far)
    except (PeerLost, TransferTimeout) as error:
        far.watch()
        return Outcome(name, "broke", reason=str(error))
    finally:
        far.shut()


def _send(name: str, effort: Effort, where: Where, offer: TransportOffer | None) -> Send:
    return Send(
        transport=name,
        shape=effort.shape,
        where=where,
        rate_s=effort.rate_s,
        latency_s=effort.latency_s,
        offer=offer,
    )


def _timeout_s(effort: Effort) -> float:
    return PROBE_TIMEOUT_S + 10 * (effort.rate_s + effort.latency_s)


def _outcome(name: str, answer: FromProbe) -> Outcome:
    match answer:
        case Measured():
            return Outcome(name, "works", answer)
        case NotOpened():
            kind: Literal["no_library", "refused"] = (
                "no_library" if answer.stage == "library" else "refused"
            )
            return Outcome(name, kind, reason=answer.reason)
        case Broke():
            return Outcome(name, "broke", reason=answer.reason)
        case _:
            raise AssertionError(f"{type(answer).__name__} is not an answer of a writing probe")


def _verified(outcome: Outcome, far: FarEnd) -> Outcome:
    if (
        outcome.measured is None
        or far.digest(outcome.measured.num_copies) == outcome.measured.digest
    ):
        return outcome
    return Outcome(
        outcome.name, "broke", reason="the bytes that arrived are not those that were sent"
    )
