"""A node in virtual time: the product's role, engine and loop, passes one after the other.

```
 inbox ──▶ pass: hear, poll, step ──▶ the next pass, when this one ends
                     └─ nothing but one more token for every answer ──▶ leap over passes, as far as nothing comes
```
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from typing_extensions import override

from tandem.decode.role import DecodeRole
from tandem.engine.request import ActiveRequest
from tandem.engine.shape import ModelShape
from tandem.node.answers import Answers, Ticket
from tandem.node.loop import Start
from tandem.plan.agenda import NodeClock
from tandem.plan.leaping import Leap, LeapingEngine
from tandem.plan.links import PlannedReceiver, PlannedSender, Wires
from tandem.plan.seam import NodeKind, PlannedRequest
from tandem.prefill.role import PrefillRole
from tandem.wire.errors import TandemError
from tandem.wire.generation import Finish, Phase, TokenLogprobs
from tandem.wire.messages import NodeLoad
from tandem.wire.prefix_journal import PrefixChanges

FINGERPRINT = "planned"


@dataclass(slots=True, eq=False)
class Journey:
    """One request on its way.

    Attributes:
        token_s: When each token so far was chosen.
        num_own: Prompt tokens that decode computes by itself.
        is_handed_off: Decode has spoken: prefill's part is done.
        is_over: A node has told its last token.
        is_ended: The router knows.
    """

    request: PlannedRequest
    ticket: Ticket
    token_s: "array[float]" = field(default_factory=lambda: array("d"))
    prefill: int = -1
    decode: int = -1
    num_cached: int = 0
    num_kept: int = 0
    num_own: int = 0
    is_handed_off: bool = False
    is_over: bool = False
    is_ended: bool = False
    error: str = ""


class Told(Answers):
    """What a node tells its edge worker, kept with the request.

    Args:
        hand_off: Told of a request when decode first speaks of it.
        end: Told of a request when its last token was chosen, or it failed.

    Attributes:
        journeys: Those under way in the fleet.
    """

    def __init__(
        self,
        clock: NodeClock,
        journeys: dict[str, Journey],
        role: str,
        hand_off: Callable[[Journey, float], None],
        end: Callable[[Journey, float], None],
    ) -> None:
        self._clock, self.journeys, self._role = clock, journeys, role
        self._hand_off, self._finish = hand_off, end
        self.num_failed = 0

    @override
    def token(
        self,
        ticket: Ticket,
        index: int,
        token_ids: list[int],
        finish: Finish | None = None,
        cached_tokens: int = 0,
        *,
        cached_by_tier: dict[str, int] | None = None,
        logprobs: TokenLogprobs | None = None,
        phases: list[Phase] | None = None,
    ) -> None:
        """Note when a token came; the first copy counts."""
        journey, now = self.journeys[ticket.request_id], self._clock.now()
        if index == len(journey.token_s) and token_ids:
            journey.token_s.append(now)
        if self._role == "prefill":
            journey.num_cached = cached_tokens or journey.num_cached
        elif not journey.is_handed_off:
            journey.is_handed_off = True
            journey.num_kept = cached_tokens
            self._hand_off(journey, now)
        if finish is not None and finish.reason != "handed_off":
            self._finish(journey, now)

    @override
    def fail(self, ticket: Ticket, error: TandemError) -> None:
        """Note that it ended without its tokens."""
        journey = self.journeys[ticket.request_id]
        journey.error = error.message
        self._finish(journey, self._clock.now())


@dataclass(frozen=True, slots=True)
class Report:
    """What a node says of itself, and when."""

    at_s: float
    load: NodeLoad


class PlannedNode:
    """One node.

    Args:
        leaps: Whether passes are leapt over; the outcome is the same.

    Attributes:
        engine: For what it counts.
    """

    def __init__(
        self,
        kind: NodeKind,
        role: str,
        shape: ModelShape,
        wires: Wires,
        told: Callable[[NodeClock, str], Told],
        *,
        leaps: bool,
    ) -> None:
        self._agenda, self._clock = wires.agenda, NodeClock()
        self._host_step_s, self._leaps = kind.host_step_s, leaps
        self.engine = LeapingEngine(kind, shape, self._clock)
        self._told = told(self._clock, role)
        self._inbox: list[Callable[[], None]] = []
        self._is_idle, self._number = True, 0
        self._leap: Leap | None = None
        self._num_leapt = 0
        self._changes_seen = -1
        # What was last told, and behind which pass: an idle node has not changed since.
        self._told_load, self._told_in = NodeLoad(), -1
        ends = (kind, self._clock, wires, self.deliver)
        self.role: PrefillRole | DecodeRole
        now = self._clock.now
        if role == "prefill":
            sender = PlannedSender(*ends)
            wires.senders.append(sender)
            self.role = PrefillRole(self.engine, sender, self._told, max_waiting=1 << 30, clock=now)
        else:
            self.role = DecodeRole(
                self.engine,
                PlannedReceiver(*ends),
                self._told,
                kind.max_running,
                max_waiting=1 << 30,
                clock=now,
            )

    def start(self, ticket: Ticket, message: Start) -> None:
        """Begin a request, or its half, in the next pass."""

        def begin() -> None:
            try:
                self.role.start(ticket, message)
            except TandemError as error:
                self._told.fail(ticket, error)

        self.deliver(begin)

    def deliver(self, act: Callable[[], None]) -> None:
        """Have the next pass begin with `act`."""
        self._inbox.append(act)
        if self._is_idle:
            self._is_idle = False
            self._pass_at(self._agenda.now)
        elif self._leap is not None:
            self._pass_at(self._leap_to_now())
            self._leap = None

    def report(self, give: Callable[[Report], None]) -> None:
        """Have `give` called with the load at the end of the pass under way, as soon as it is known."""
        if self._is_idle:
            give(self._report(self._agenda.now))
        elif self._leap is not None:
            give(self._report(self._leap_to_now()))
        else:
            self._inbox.append(lambda: give(self._report(self._clock.now())))

    def catch_up(self, until_s: float) -> None:
        """Do what has ended by a time, at which all stops."""
        leap = self._leap
        if leap is not None:
            until = int(np.searchsorted(leap.starts_s[1:], until_s, "right"))
            self._leap_until(max(until, self._num_leapt))

    def changes_since(self, position: int) -> PrefixChanges | None:
        """Return what changed in the prefix cache."""
        return self.engine.cache.journal.since(position)

    @property
    def busy_s(self) -> float:
        """How long its device was busy."""
        return self.engine.launcher.busy_s

    def _report(self, at_s: float) -> Report:
        if not self._is_idle or self._told_in != self._number:
            self._told_in, num_own = self._number, len(self.role.tickets())
            self._told_load = msgspec.structs.replace(
                self.role.load(), num_edges=min(1, num_own), num_own=num_own
            )
        return Report(at_s, self._told_load)

    def _pass_at(self, at_s: float) -> None:
        """Let the next pass begin then; one that was planned before does not."""
        self._number += 1
        number = self._number
        self._agenda.at(at_s, lambda: self._pass(number), is_pass=True)

    def _pass(self, number: int) -> None:
        """Hear, poll and step, as `EngineLoop.run_once`."""
        if number != self._number:
            return
        if self._leap is not None:
            self._leap_until(len(self._leap))
            self._leap = None
        self._clock.now_s = self._agenda.now
        inbox, self._inbox = self._inbox, []
        for act in inbox:
            act()
        self.role.poll()
        self._changes_seen = self.engine.scheduler.num_changes
        if not self.role.has_work:
            # Whatever came of this pass is in the inbox of the next.
            self._is_idle = not self._inbox
            if self._inbox:
                self._pass_at(self._clock.now())
            return
        self._clock.sleep(self._host_step_s)
        self.role.step()
        now_s = self._clock.now()
        if not self._inbox and self._leaps and self._begin_leap(now_s):
            return
        self._pass_at(now_s)

    def _begin_leap(self, now_s: float) -> bool:
        if not isinstance(self.role, DecodeRole) or not self.engine.is_steady:
            return False
        limit = 1 << 30
        if self.role.load().num_waiting:
            # Those in line for pages are tried again when something may have made room.
            if self._changes_seen != self.engine.scheduler.num_changes:
                return False
            limit = self.engine.scheduler.num_until_retry
        leap = self.engine.plan_leap(now_s, limit)
        if len(leap) < 2:
            return False
        self._leap, self._num_leapt = leap, 0
        self._pass_at(float(leap.starts_s[-1]))
        return True

    def _leap_to_now(self) -> float:
        """Leap over the passes that began before now; return when the next begins."""
        assert self._leap is not None
        starts_s = self._leap.starts_s
        until = max(self._num_leapt, int(np.searchsorted(starts_s, self._agenda.now)))
        self._leap_until(until)
        return float(starts_s[until])

    def _leap_until(self, until: int) -> None:
        leap, done = self._leap, self._num_leapt
        assert leap is not None
        if until == done:
            return
        times = leap.starts_s[done + 1 : until + 1].tobytes()
        journeys = self._told.journeys

        def took(active: ActiveRequest) -> None:
            journeys[active.request.request_id].token_s.frombytes(times)

        self.engine.repeat(leap, done, until, took)
        self._num_leapt = until
