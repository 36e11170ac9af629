"""One request from admission to its last token. Its task chooses the pairs; the links' callbacks pass its tokens to the receiver.

```
 choose a pair ──▶ attempt 0 on (prefill, decode), or on decode alone ──finish──▶ done
   ▲                    │ a node failed, and another attempt may help
   └────────────────────┘ a different pair, prompt + sent tokens, the index continues
```

The end of an attempt, nodes that come up and an abort all set the same event. `Replays` decides by the error of an
attempt whether another attempt follows:

```
 an error that a retry cannot fix ────────────────────────────▶ the client gets it
 rejected for lack of room: a different pair, once; then ─────▶ the client gets it, with the time of a retry
 handed over by a draining node: a different pair; does not count as an attempt
 the second node lost with its prompt: no other pair ─────────▶ RequestEndedEngine
 lost, failed, timed out: a different pair, up to `max_attempts` ─▶ AttemptsUsedUp
```
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tandem.frontend.timings import RESAMPLED
from tandem.router.metrics import RouterMetrics
from tandem.router.nodes.cluster import Cluster
from tandem.router.nodes.fleet import Fleet
from tandem.router.nodes.node import NodeWork, halves
from tandem.router.pairing.pairing import PairGroup, Pairing, PairUse
from tandem.router.pairing.policy import Pair, RoutingRequest, tokens_to_compute
from tandem.router.serving.progress import Progress
from tandem.router.serving.suspects import Suspects, name_of
from tandem.telemetry.log import get_logger
from tandem.wire.errors import (
    AttemptsUsedUp,
    DeadlinePassed,
    NodeDraining,
    NoNodeAvailable,
    Overloaded,
    PeerLost,
    RequestEndedEngine,
    TandemError,
)
from tandem.wire.messages import StartColocated, TokenDelta
from tandem.wire.token_stream import Relay, TokenReceiver

log = get_logger(__name__)

# A rolling update of a large cluster hands a long answer over a few times. More hand-overs mean a broken node.
MAX_HAND_OVERS = 32
# When a node dies, its peer may report the loss before the router's own link breaks. Time to wait for that, and the
# interval of the checks.
LOSS_NOTICED_S, LOSS_POLL_S = 0.2, 0.01
# After the first, a loss counts only if some node sends a message within this time. Idle nodes report once a second.
HEARD_S = 2.0


class Replays:
    """Decides whether another attempt follows a failed one. At most `max_attempts` may fail."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._num_failed = self._num_handed_over = 0
        self._was_rejected = False

    def after(self, error: TandemError) -> None:
        """Return if another attempt may help after `error`.

        Raises:
            TandemError: The error for the client, if no attempt follows.
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
    """Requests that wait for a node of a missing role, limited in number and time."""

    def __init__(self, limit_s: float, max_requests: int) -> None:
        self.limit_s, self._max_requests = limit_s, max_requests
        # Ordered, so that the longest wait comes first and a simulation depends only on its seed.
        self._events: dict[asyncio.Event, None] = {}

    def __len__(self) -> int:
        return len(self._events)

    def wake_all(self) -> None:
        """Wake all waiting requests, because a node may have come up."""
        for event in self._events:
            event.set()

    async def wait(self, event: asyncio.Event, deadline: float) -> bool:
        """Clear an event and wait for it. Return False if too many requests wait.

        Raises:
            TimeoutError: `deadline`, in the loop's time, passed.
        """
        if len(self._events) >= self._max_requests:
            return False
        event.clear()
        self._events[event] = None
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        finally:
            del self._events[event]
        return True


@dataclass(frozen=True, slots=True, eq=False)
class RequestContext:
    """Objects that all requests of one edge worker share."""

    cluster: Cluster
    pairing: Pairing
    node_wait: NodeWait
    max_attempts: int
    metrics: RouterMetrics
    suspects: Suspects
    replays_sampled: bool = True


class Attempt:
    """One attempt at a request: its two halves on a pair, or all of it on decode. Its owner must call `release`.

    Args:
        on_change: Called when a half has a new delta or failure. Must not raise.

    Raises:
        TandemError: A node was lost after it had been chosen, or rejects the request. Nothing remains to be released.

    Attributes:
        is_decoding: Whether decode has sent a token.
    """

    def __init__(
        self,
        shared: RequestContext,
        progress: Progress,
        pair: Pair,
        number: int,
        on_change: Callable[[], None],
    ) -> None:
        cluster = shared.cluster
        self._progress, self._pair = progress, pair
        self._prefill: NodeWork | None = None
        self._arrived: deque[tuple[str, TokenDelta]] = deque()
        self.is_decoding = False
        request, decode = progress.remaining(), cluster.node(pair.decode)
        self._links = [cluster.node(url).client for url in pair.urls]
        if not pair.prefill:
            start = StartColocated(request=request, attempt=number)
            num_cached = RoutingRequest.of(request).cached_tokens(decode.entry)
            self._decode = decode.start(start, on_change, tokens_to_compute(request, num_cached))
        else:
            prefill = cluster.node(pair.prefill)
            start_decode, start_prefill = halves(request, prefill, number)
            self._decode = decode.start(start_decode, on_change)
            try:
                self._prefill = prefill.start(start_prefill, on_change)
            except TandemError:
                self._decode.release()
                raise
        self._use: PairUse | None = shared.pairing.begin(pair, len(request.prompt_ids))

    def take(self) -> TokenDelta | None:
        """Return the next delta that is new to the client, or None.

        Once decode has sent a token, only decode's tokens can follow. Ordinary ones then go directly to the receiver.

        Raises:
            TandemError: A half failed before the request ended.
        """
        while not self._progress.is_finished and (arrived := self._next()) is not None:
            node, delta = arrived
            if delta.phases:
                self._progress.timeline.add(delta.phases, node)
            if new := self._progress.accept(delta):
                return new
        if self.is_decoding:
            self._decode.stream.direct = self._progress
        return None

    def release(self) -> None:
        """Cancel the halves that still run, and release their shares of both nodes. Safe to call twice."""
        if self._prefill is not None:
            self._prefill.release()
        self._decode.release()
        if self._use is not None:
            self._use.num_running -= 1
            self._use = None

    async def has_lost_link(self) -> bool:
        """Return whether the link to a node of this attempt is lost. Wait up to `LOSS_NOTICED_S` for that."""
        deadline = asyncio.get_running_loop().time() + LOSS_NOTICED_S
        while True:
            is_lost = any(link and link.lost.is_set() for link in self._links)
            if is_lost or asyncio.get_running_loop().time() >= deadline:
                return is_lost
            await asyncio.sleep(LOSS_POLL_S)

    def _next(self) -> tuple[str, TokenDelta] | None:
        """Return the next message of either stream; prefill's first, because it sends the first token."""
        if self._arrived:
            return self._arrived.popleft()
        prefill, decode = self._prefill, self._decode
        if prefill is None:
            delta = decode.stream.take()
            if delta is not None and delta.token_ids:
                decode.finish_prompt()
        else:
            if not prefill.is_finished and (delta := prefill.stream.take()) is not None:
                return self._pair.prefill, delta
            # The two links are not synchronised. Log-probabilities of the prompt come before all tokens, so decode's
            # tokens wait until prefill has sent them. Decode's failure does not wait.
            awaits_prefill = self._progress.awaits_prompt_logprobs and prefill.stream.is_open
            if awaits_prefill and not decode.stream.is_empty:
                return None
            delta = decode.stream.take()
            if delta is not None:
                # Decode sends only after every page has landed, so prefill's half is finished and can no longer fail.
                prefill.finish()
        if delta is None:
            return None
        self.is_decoding = self.is_decoding or bool(delta.token_ids)
        if prefill is not None and delta.finish is not None:
            # Phases that prefill reported after its half was finished belong before the last delta.
            late = prefill.stream.take_all()
            self._arrived.extend((self._pair.prefill, each) for each in late)
        self._arrived.append((self._pair.decode, delta))
        return self._arrived.popleft()


class RequestAborted(Exception):
    """The request was aborted by its id, or no node can continue its answer."""


class Request:
    """One request. Once it is admitted, its task awaits `run` and then calls `release`.

    Args:
        fleet: The nodes of its model.
    """

    def __init__(self, shared: RequestContext, fleet: Fleet, receiver: TokenReceiver) -> None:
        self._shared, self._cluster, self._fleet = shared, shared.cluster, fleet
        self._replays = Replays(shared.max_attempts)
        self._receiver, self._wake = receiver, asyncio.Event()
        self._relay = Relay(receiver, self._wake)
        self._is_aborted = False
        self._fingerprint = ""
        # Name of its prompt while that is suspected, and its losses; see `Suspects`.
        self._suspect, self._num_lost = "", 0
        self._number = 0
        self._pair: Pair | None = None
        self._attempt: Attempt | None = None
        self._failed: set[Pair] = set()
        self._last_error: TandemError | None = None

    def abort(self) -> None:
        """End the request with reason `abort`, even while it waits."""
        self._is_aborted = True
        self._relay.fail(RequestAborted())
        # The task may wait for a client that does not read.
        self.release()

    async def run(self, progress: Progress, group: PairGroup) -> None:
        """Make attempts until the receiver has ended.

        Raises:
            TandemError: The request failed, and no further attempt follows.
            ConnectionError: The client has disconnected.
        """
        self._progress, self._group = progress, group
        self._suspect, self._num_lost = self._shared.suspects.known(
            progress.request, self._fleet.name
        )
        try:
            while not self._receiver.is_ended:
                self._check_aborted()
                if self._pair is None:
                    self._pair = await self._choose_pair()
                    self._check_continuation(self._pair)
                try:
                    await self._serve(self._pair)
                except TandemError as error:
                    await self._lose(self._pair, error)
        except RequestAborted:
            self._receiver.take(progress.aborted())

    async def _serve(self, pair: Pair) -> None:
        """Make one attempt on a pair. Raises `TandemError` if it fails."""
        number, self._number = self._number, self._number + 1
        attempt = Attempt(self._shared, self._progress, pair, number, self._relay.on_change)
        self._attempt = attempt
        await self._relay.run(self._take_while_suspected if self._suspect else attempt.take)

    def _take_while_suspected(self) -> TokenDelta | None:
        """Return the next delta. After decode's first token, the prompt is no longer suspected."""
        attempt = self._attempt
        assert attempt is not None
        delta = attempt.take()
        if self._suspect and (attempt.is_decoding or self._progress.is_finished):
            self._shared.suspects.clear(self._suspect)
            self._shared.suspects.end(self._wake)
            self._suspect = ""
        return delta

    def _check_aborted(self) -> None:
        if self._is_aborted:
            raise RequestAborted

    async def _choose_pair(self) -> Pair:
        """Choose the pair of the next attempt. If a role has no node, wait for one.

        Raises:
            NoNodeAvailable: No node came up in time.
            DeadlinePassed: The client's deadline passed first.
            RequestEndedEngine: Nodes were lost with this prompt, one after the other.
        """
        while self._suspect:
            self._check_aborted()
            if await self._shared.suspects.turn(self._suspect, self._wake):
                break
        limit_s, left_s = self._shared.node_wait.limit_s, self._progress.remaining_s()
        wait_s = limit_s if left_s is None else min(limit_s, left_s)
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            self._check_aborted()
            try:
                pair = self._pair_now()
            except NoNodeAvailable as error:
                try:
                    if await self._shared.node_wait.wait(self._wake, deadline):
                        continue
                except TimeoutError:
                    if wait_s < limit_s:
                        raise DeadlinePassed(f"the deadline passed: {error.message}") from error
                raise
            # A router that is cut off from the network loses its nodes one by one within a short time. Without this
            # check, each of them would cost the request an attempt.
            if self._last_error is None or await self._are_alive(pair):
                break
        self._check_aborted()
        self._progress.timeline.end("pair", pair.decode)
        return pair

    def _check_continuation(self, pair: Pair) -> None:
        """Note that a pair continues the answer with other draws. Raises `RequestAborted` if it must not."""
        info, progress = self._cluster.node(pair.decode).info, self._progress
        if info is None or info.continues_sampling or not progress.sent_ids or progress.is_greedy:
            return
        if progress.request.sampling.grammar is None and self._shared.replays_sampled:
            progress.timeline.note(RESAMPLED)
            return
        log.warning("request.not_continued", request_id=progress.request_id, decode=pair.decode)
        raise RequestAborted

    def _pair_now(self) -> Pair:
        # A request keeps its weights, even if the fleet changes to different ones.
        self._fingerprint = self._fingerprint or self._fleet.fingerprint()
        request = self._progress.routed_request()
        return self._shared.pairing.pair_for(
            self._fleet,
            self._group,
            request,
            self._fingerprint,
            self._failed,
            after=self._last_error,
        )

    async def _are_alive(self, pair: Pair) -> bool:
        clients = [self._cluster.node(url).client for url in pair.urls]
        return all([client is not None and await client.is_alive() for client in clients])

    def release(self) -> None:
        """Release the running attempt. Safe to call twice."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.release()
        self._shared.suspects.end(self._wake)

    async def _lose(self, pair: Pair, error: TandemError) -> None:
        """Release a failed attempt and prepare the next on a different pair.

        Raises:
            TandemError: No further attempt follows.
        """
        attempt = self._attempt
        self.release()
        self._pair = None
        if (
            attempt is not None
            and not attempt.is_decoding
            and isinstance(error, PeerLost)
            and await attempt.has_lost_link()
        ):
            await self._note_loss(pair, error)
        self._replays.after(error)
        self._progress.timeline.lose_attempt()
        self._failed.add(pair)
        self._last_error = error
        self._shared.metrics.replays.labels(error.code).inc()
        log.warning("request.replay", **self._facts(pair, error))

    async def _note_loss(self, pair: Pair, error: TandemError) -> None:
        if self._num_lost and not await self._hears_a_node():
            return  # the network of this router may be the cause
        self._num_lost += 1
        self._suspect = self._suspect or name_of(self._progress.request, self._fleet.name)
        try:
            self._shared.suspects.note_loss(self._suspect, self._num_lost)
        except RequestEndedEngine:
            log.warning("prompt.refused", **self._facts(pair, error))
            raise

    async def _hears_a_node(self) -> bool:
        """Return whether a node sends something within `HEARD_S`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (waited_s := loop.time() - began_s) < HEARD_S:
            clients = [node.client for node in self._cluster.roster]
            if any(each and each.is_up and each.silent_s < waited_s for each in clients):
                return True
            await asyncio.sleep(LOSS_POLL_S)
        return False

    def _facts(self, pair: Pair, error: TandemError) -> dict[str, object]:
        """Return the log fields of a failed attempt."""
        return {
            "request_id": self._progress.request_id,
            "num_sent": len(self._progress.sent_ids),
            "prefill": pair.prefill,
            "decode": pair.decode,
            "error": error.message,
        }
