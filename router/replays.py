"""Whether a request that lost its nodes is tried again: pure, no I/O.

```
 an error that no retry helps ────────────────────────────────▶ it
 refused for want of room: elsewhere, once; then ─────────────▶ it: the client should wait
 handed over by a node that drains: elsewhere, and no attempt is used up
 lost, failed, timed out: another pair, up to `max_attempts` ─▶ AttemptsUsedUp
```
"""

from tandem.wire.errors import AttemptsUsedUp, NodeDraining, Overloaded, TandemError

# A rolling update of a large cluster hands a long answer over a few times; more is a node that is wrong.
MAX_HAND_OVERS = 32


class Replays:
    """The attempts of one request.

    Args:
        max_attempts: That may fail; at least 1.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._num_failed = self._num_handed_over = 0
        self._was_refused = False

    def after(self, error: TandemError) -> None:
        """Return if another attempt may help after one that ended with `error`.

        Raises:
            TandemError: What the client is told instead.
        """
        if not error.is_retryable:
            raise error
        if isinstance(error, Overloaded):
            if self._was_refused:
                raise error
            self._was_refused = True
            return
        if isinstance(error, NodeDraining) and self._num_handed_over < MAX_HAND_OVERS:
            self._num_handed_over += 1
            return
        self._num_failed += 1
        if self._num_failed < self._max_attempts:
            return
        if self._max_attempts == 1:
            raise error
        raise AttemptsUsedUp(self._num_failed, error) from error
