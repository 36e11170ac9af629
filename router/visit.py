"""A request on its way through the gate: as nodes may see it, and what it has had. No I/O."""

from collections.abc import Callable, Sequence

import msgspec

from tandem.frontend.backend import Tap
from tandem.wire.generation import GenerateRequest
from tandem.wire.messages import TokenDelta


class Visit:
    """A request that was let in, and what it has had so far. It is a `Tap` in front of the caller's.

    Args:
        began: Called with its first token.

    Attributes:
        request: As nodes may see it.
        num_tokens: Of its answer; those that went by `tap` only where they are counted.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tap: Tap | None,
        began: Callable[[], None],
        *,
        counts_tokens: bool,
    ) -> None:
        self.request = request
        self.num_tokens = 0
        self._tap, self._began = tap, began
        self._counts_tokens = counts_tokens
        self._is_begun = False

    @property
    def tap(self) -> Tap | None:
        """Return where ordinary tokens may go."""
        return self if self._counts_tokens and self._tap is not None else self._tap

    def saw(self, delta: TokenDelta) -> None:
        """Note a delta on its way to the client."""
        self.num_tokens += len(delta.token_ids)
        if delta.token_ids and not self._is_begun:
            self._is_begun = True
            self._began()

    def take_ordinary(self, token_ids: Sequence[int]) -> bool:
        """See `Tap`."""
        assert self._tap is not None
        is_taken = self._tap.take_ordinary(token_ids)
        self.num_tokens += len(token_ids) if is_taken else 0
        return is_taken


def for_nodes(request: GenerateRequest, deadline: float | None, now: float) -> GenerateRequest:
    """Return a request without what nodes are not told, and with the time that is left of it."""
    if not request.client and deadline is None:
        return request
    left_s = None if deadline is None else max(0.0, deadline - now)
    return msgspec.structs.replace(request, client="", deadline_s=left_s)
