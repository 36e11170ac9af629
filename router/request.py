"""One request from its admission to its last token: the one task that serves it pulls tokens from here.

```
 place: a pair ──▶ attempt 0 on (prefill, decode), or on decode alone ──finish──▶ done
   ▲                    │ a node failed, and another attempt may help
   └────────────────────┘ another pair, prompt + sent tokens, the index continues
```

Streams, nodes that come up and an abort all wake the same event. What an attempt failed with decides, in `Replays`,
whether there is another:

```
 an error that no retry helps ────────────────────────────────▶ the client gets it
 rejected for want of room: elsewhere, once; then ────────────▶ the client gets it and should wait
 handed over by a node that drains: elsewhere, and no attempt is used up
 lost, failed, timed out: another pair, up to `max_attempts` ─▶ AttemptsUsedUp
```
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from tandem.router.cluster import Cluster
from tandem.router.metrics import RouterMetrics
from tandem.router.node import Work, halves
from tandem.router.pairing import Group, Pairing, PairUse
from tandem.router.policy import Asked, Pair, tokens_to_compute
from tandem.router.progress import Progress
from tandem.telemetry.log import get_logger
from tandem.wire.errors import (
    AttemptsUsedUp,
    NodeDraining,
    NoNodeAvailable,
    Overloaded,
    TandemError,
)
from tandem.wire.messages import StartColocated, TokenDelta

log = get_logger(__name__)

# A rolling update of a large cluster hands a long answer over a few times; more means that a node is broken.
MAX_HAND_OVERS = 32


class Replays:
    """Decides whether another attempt follows one that failed; at most `max_attempts` may fail."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._num_failed = self._num_handed_over = 0
        self._was_rejected = False

    def after(self, error: TandemError) -> None:
        """Return if another attempt may help after one that ended with `error`.

        Raises:
            TandemError: The client is sent this instead.
        """
        if not error.is_retryable:
            raise error
        if isinstance(error, Overloaded):
            if self._was_rejected:
                raise error
            self._was_rejected = True
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


class NodeWait:
    """The requests of one edge worker that wait until a role has a node: so many, so long."""

    def __init__(self, limit_s: float, max_requests: int) -> None:
        self.limit_s, self._max_requests = limit_s, max_requests
        # Ordered: the longest wait looks first, and a simulation follows from its seed alone.
        self._events: dict[asyncio.Event, None] = {}

    def __len__(self) -> int:
        return len(self._events)

    def wake_all(self) -> None:
        """A node may have come up."""
        for event in self._events:
            event.set()

    async def until(self, event: asyncio.Event, deadline: float) -> bool:
        """Wait for an event from now on; False when too many wait, or the loop's `deadline` passed."""
        if len(self._events) >= self._max_requests:
            return False
        event.clear()
        self._events[event] = None
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            del self._events[event]
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What all requests of one edge worker share."""

    cluster: Cluster
    pairing: Pairing
    waits: NodeWait
    max_attempts: int
    metrics: RouterMetrics


class Attempt:
    """One attempt at a request: both halves on a pair, or all of it on decode. Its owner closes it.

    Args:
        wake: Set whenever something arrives.

    Raises:
        TandemError: A node was lost since it was chosen, or cannot take the request; nothing is left.
    """

    def __init__(
        self, shared: Shared, progress: Progress, pair: Pair, number: int, wake: asyncio.Event
    ) -> None:
        cluster = shared.cluster
        self._progress, self._pair = progress, pair
        self._prefill: Work | None = None
        self._arrived: deque[tuple[str, TokenDelta]] = deque()
        self._is_decoding = False
        request, decode = progress.remaining(), cluster.node(pair.decode)
        if not pair.prefill:
            start = StartColocated(request=request, attempt=number)
            num_cached = Asked.of(request).cached_tokens(cluster.view(pair.decode))
            self._decode = decode.start(start, wake, tokens_to_compute(request, num_cached))
        else:
            prefill = cluster.node(pair.prefill)
            start_decode, start_prefill = halves(request, prefill, number)
            self._decode = decode.start(start_decode, wake)
            try:
                self._prefill = prefill.start(start_prefill, wake)
            except TandemError:
                self._decode.end()
                raise
        self._use: PairUse | None = shared.pairing.begin(pair, len(request.prompt_ids))

    def take(self) -> TokenDelta | None:
        """Return what arrived next that is new to the client; None while nothing is.

        Raises:
            TandemError: A half failed before the end.
        """
        self._decode.stream.tap = None
        while not self._progress.is_finished and (arrived := self._next()) is not None:
            node, delta = arrived
            if delta.phases:
                self._progress.trail.heard(delta.phases, node)
            if new := self._progress.accept(delta):
                return new
        return None

    def listen(self) -> None:
        """Let ordinary tokens of decode through at once, until something else arrives.

        Only once decode has sent a token: then nothing but its tokens can follow.
        """
        if self._is_decoding:
            self._decode.stream.tap = self._progress

    def close(self) -> None:
        """Give back the shares of both nodes; cancel what still runs. Safe to call twice."""
        if self._prefill is not None:
            self._prefill.end()
        self._decode.end()
        if self._use is not None:
            self._use.num_running -= 1
            self._use = None

    def _next(self) -> tuple[str, TokenDelta] | None:
        """Return what waits in either stream, prefill's first: it has the first token."""
        if self._arrived:
            return self._arrived.popleft()
        prefill, decode = self._prefill, self._decode
        if prefill is None:
            delta = decode.stream.take()
            if delta is not None and delta.token_ids:
                decode.prompt_done()
        else:
            if not prefill.is_done and (delta := prefill.stream.take()) is not None:
                return self._pair.prefill, delta
            # The nodes' links do not keep pace with each other: while prefill owes log-probabilities of the
            # prompt, which come before all tokens, decode's tokens wait. Its failure does not.
            owes = self._progress.awaits_prompt_logprobs and prefill.stream.is_open
            if owes and not decode.stream.is_empty:
                return None
            delta = decode.stream.take()
            if delta is not None:
                # Decode sends once every page landed: prefill's part is done, and cannot fail any more.
                prefill.done()
        if delta is None:
            return None
        self._is_decoding = self._is_decoding or bool(delta.token_ids)
        if prefill is not None and delta.finish is not None:
            # Prefill may have reported phases since, which the last delta is to carry.
            late = prefill.stream.take_late()
            self._arrived.extend((self._pair.prefill, each) for each in late)
        self._arrived.append((self._pair.decode, delta))
        return self._arrived.popleft()


class RequestAborted(Exception):
    """The request was aborted by its id."""


class Request:
    """One admitted request. After `begin` its task awaits `next` until that returns None, then calls `end`."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._cluster = shared, shared.cluster
        self._replays = Replays(shared.max_attempts)
        self._wake = asyncio.Event()
        self._is_aborted = False
        self._fingerprint = ""
        self._number = 0
        self._pair: Pair | None = None
        self._attempt: Attempt | None = None
        self._failed: set[Pair] = set()
        self._lost: TandemError | None = None

    def begin(self, progress: Progress, group: Group) -> None:
        """Serve `progress` from here on, until `end`."""
        self._progress, self._group = progress, group

    def abort(self) -> None:
        """End the request with reason `abort`, whatever it waits for."""
        self._is_aborted = True
        self._wake.set()

    async def next(self) -> TokenDelta | None:
        """Return what is new to the client, once it is there; None after the last.

        Raises:
            TandemError: No further attempt may help.
        """
        try:
            while not self._progress.is_finished:
                self._check()
                if self._pair is None:
                    self._pair = await self._place()
                try:
                    attempt = self._attempt or self._begin_attempt(self._pair)
                    delta = attempt.take()
                except TandemError as error:
                    self._lose(self._pair, error)
                    continue
                if delta is not None:
                    return delta
                attempt.listen()
                await self._wake.wait()
                self._wake.clear()
        except RequestAborted:
            return self._progress.aborted()
        return None

    def _check(self) -> None:
        if self._is_aborted:
            raise RequestAborted

    async def _place(self) -> Pair:
        """Choose the pair of the next attempt; wait for nodes that a role lacks.

        Raises:
            NoNodeAvailable: They did not come in time.
        """
        deadline = asyncio.get_running_loop().time() + self._shared.waits.limit_s
        while True:
            self._check()
            try:
                pair = self._choose()
            except NoNodeAvailable:
                if not await self._shared.waits.until(self._wake, deadline):
                    raise
                continue
            # A router that is cut off loses its nodes one after the other, all within a moment: without a look
            # each of them would cost the same request an attempt.
            if self._lost is None or await self._are_alive(pair):
                break
        self._check()
        self._progress.trail.end("pair", pair.decode)
        return pair

    def _choose(self) -> Pair:
        # The model stays, whatever the cluster serves later.
        self._fingerprint = self._fingerprint or self._cluster.fingerprint()
        return self._shared.pairing.pair_for(
            self._group, self._progress.to_place(), self._fingerprint, self._failed, self._lost
        )

    async def _are_alive(self, pair: Pair) -> bool:
        clients = [self._cluster.node(url).client for url in pair.urls]
        return all([client is not None and await client.is_alive() for client in clients])

    def _begin_attempt(self, pair: Pair) -> Attempt:
        number, self._number = self._number, self._number + 1
        self._wake.clear()
        self._check()
        self._attempt = Attempt(self._shared, self._progress, pair, number, self._wake)
        return self._attempt

    def end(self) -> None:
        """End what runs at the nodes. Safe to call twice."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()

    def _lose(self, pair: Pair, error: TandemError) -> None:
        """End an attempt that failed; the next one takes another pair. Raises `TandemError`."""
        self.end()
        self._pair = None
        self._replays.after(error)
        self._progress.trail.lost()
        self._failed.add(pair)
        self._lost = error
        self._shared.metrics.replays.labels(error.code).inc()
        log.warning(
            "request.replay",
            request_id=self._progress.request_id,
            num_sent=len(self._progress.sent_ids),
            prefill=pair.prefill,
            decode=pair.decode,
            error=error.message,
        )
