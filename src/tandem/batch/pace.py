"""How many requests one server should have at once. Pure: no I/O, no clock; looks at the server are its time.

```
 nothing waits, and all places were used ──▶ more: twice as many until the first queue was seen; later one
                                             more, once it is quiet, and two, four ... when it stays so
 something waits now                     ──▶ no more
 something waited at every recent look   ──▶ less by half of the fewest that waited: what waits gains nothing,
                                             and a machine that stood still for a second lets many wait
 429, 503                                ──▶ half, once between two looks
 connection lost                         ──▶ the least, and from the beginning
```

A queue that comes and goes is a burst; one that stands is too much (Nichols and Jacobson, Controlling Queue
Delay, 2012). A server that does not tell its queue is judged by the time of a token, in rounds of as many answers
as there are places. Now and then there is a round with half as many: where it makes a token nearly twice as fast,
the other half of the requests gains nothing (as BBR drains a path to learn its delay; Cardwell et al., 2016).
"""

from collections import deque

from typing_extensions import override

START = 8
# In a row, before a queue stands: with four looks a second, a second.
STANDING_LOOKS = 4
# In a row, before it is quiet: what a larger limit did shows in the next look but one.
QUIET_LOOKS = 2
# In a row, before the step of the increase doubles.
LONG_QUIET_LOOKS = 16
# Of the limit: with less under way there is nothing to be learned about more.
USED_SHARE = 0.9
# Of the time of a token with half as many: there the other half adds 14 % to the throughput.
TOLERANCE = 1.75
# From one round with half as many to the next: they cost 3 % of the throughput.
NUM_ROUNDS = 32
# Of answers that make a round, at least: one alone says little.
MIN_ROUND = 4


class Pace:
    """Follows one server.

    Args:
        least: Requests at once, at least.
        most: At most.

    Attributes:
        limit: Requests that the server should have now: `least` to `most`.
    """

    def __init__(self, least: int = 1, most: int = 1024) -> None:
        self._least, self._most = min(least, most), most
        self._recent: deque[int] = deque(maxlen=STANDING_LOOKS)
        self._start_over(START)

    @override
    def __repr__(self) -> str:
        return f"Pace({self.limit} of {self._least} to {self._most})"

    def _start_over(self, limit: int) -> None:
        self._set(limit)
        self._is_probing = True
        self._step = 1
        self._num_quiet = 0
        self._was_refused = False
        self._recent.clear()
        self._base_s = 0.0  # of a token; 0: not known
        self._num_rounds = self._num_halved = self._whole = 0
        self._begin_round()

    def _set(self, limit: int) -> None:
        self.limit = max(self._least, min(limit, self._most))

    def _begin_round(self) -> None:
        self._round_s, self._num_round = 0.0, 0

    def look(self, in_flight: int, peak: int, queued: int | None) -> None:
        """Take what a look at the server showed.

        Args:
            in_flight: Our requests there now.
            peak: The most of them since the last look.
            queued: Requests that wait there, whosever they are; None: it does not tell.
        """
        was_refused, self._was_refused = self._was_refused, False
        if queued is None:
            self._judge_round(peak, was_refused=was_refused)
        elif queued:
            self._calm()
            self._recent.append(queued)
            if len(self._recent) == STANDING_LOOKS:
                self._set(min(self.limit, in_flight - (min(self._recent) + 1) // 2))
                self._recent.clear()  # what was asked for less shows only after a while
        else:
            self._recent.clear()
            if not was_refused:
                self._grow(peak)

    def answer(self, seconds_per_token: float) -> None:
        """Take how long an answer took."""
        self._round_s += seconds_per_token
        self._num_round += 1

    def refuse(self, in_flight: int) -> None:
        """The server had no room; those refused before the next look are one event."""
        self._calm()
        if not self._was_refused:
            self._set(min(self.limit, in_flight) // 2)
        self._was_refused = True
        self._whole = 0
        self._begin_round()

    def lose(self) -> None:
        """The server cannot be reached: when it can, its past says nothing."""
        self._start_over(self._least)

    def _calm(self) -> None:
        self._is_probing, self._step, self._num_quiet = False, 1, 0

    def _grow(self, peak: int) -> None:
        self._num_quiet += 1
        if peak < USED_SHARE * self.limit:
            return
        if self._num_quiet < QUIET_LOOKS:
            return
        if self._is_probing:
            self._set(2 * self.limit)
            self._num_quiet = 0
            return
        self._set(self.limit + self._step)
        if self._num_quiet % LONG_QUIET_LOOKS == 0:
            self._step = min(2 * self._step, self.limit)

    def _judge_round(self, peak: int, *, was_refused: bool) -> None:
        """Judge by the time of tokens, once as many answers came as there are places."""
        if self._num_round < max(MIN_ROUND, min(peak, self.limit)):
            return
        mean_s = self._round_s / self._num_round
        self._begin_round()
        if self._whole:
            self._end_half(mean_s)
            return
        self._base_s = min(self._base_s or mean_s, mean_s)
        if mean_s > TOLERANCE * self._base_s:
            self._calm()
            self._set(int(self.limit * max(0.5, TOLERANCE * self._base_s / mean_s)))
        elif not was_refused:
            self._grow(peak)
        self._num_rounds += 1
        if self._num_rounds >= NUM_ROUNDS:
            self._num_rounds, self._num_halved, self._whole = 0, 0, self.limit
            self._set(self.limit // 2)

    def _end_half(self, mean_s: float) -> None:
        """Learn from a second round with half as many: requests of the first began among more."""
        self._num_halved += 1
        if self._num_halved == 2:
            self._base_s = mean_s
            self._set(self._whole)
            self._whole = 0
