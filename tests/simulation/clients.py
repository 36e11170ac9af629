"""Clients: receivers that check every token and the cause of each error."""

import asyncio
from dataclasses import dataclass, field

from tandem.wire.errors import (
    DeadlinePassed,
    NoNodeAvailable,
    Overloaded,
    RequestEndedEngine,
    TandemError,
)
from tandem.wire.generation import GenerateRequest
from tests.simulation.toy import answer, logprob_after

# From the first chunk of a prompt to its first token, in the slowest of clusters.
BEGUN_WITHIN_S = 3.0


@dataclass(kw_only=True)
class Client:
    """One request's client: what it asks for, how it behaves, and what it got.

    Attributes:
        leaves_after: Tokens after which it hangs up; None stays.
        patience_s: How long it stays; None for as long as it takes.
        aborts_after: Tokens after which the request is aborted by its id.
        aborts_after_s: When it is aborted by its id, wherever it is then.
        is_slow: It has no room after each delta, and pauses in `drain`.
        takes_ordinary: Whether it accepts ordinary tokens.
    """

    request: GenerateRequest
    router_number: int = 0
    begins_s: float = 0.0
    leaves_after: int | None = None
    patience_s: float | None = None
    aborts_after: int | None = None
    aborts_after_s: float | None = None
    is_slow: bool = False
    takes_ordinary: bool = True
    has_room: bool = True
    token_ids: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    finish: str = ""
    error: TandemError | None = None
    has_left: bool = False
    has_aborted: bool = False
    router: object = None
    began_s: float = 0.0
    first_s: float = -1.0
    attempts_at_abort: int = -1
    ended_s: float = -1.0

    @property
    def name(self) -> str:
        """Its request's id."""
        return self.request.request_id

    async def run(self, router) -> None:
        """Send the request and read its answer, checking what comes."""
        self.router, world = router, router.world
        self._expected, self._expected_told = answer(self.request.prompt_ids, self.request.sampling)
        await asyncio.sleep(self.begins_s)
        self.began_s = world.loop.time()
        world.note("client", f"{self.name} begins at {router.host}")
        if self.aborts_after_s is not None:
            abort = router.run(self._abort_later(self.aborts_after_s))
        else:
            abort = None
        try:
            async with asyncio.timeout(self.patience_s):
                await self._read(router, world)
        except TimeoutError:
            self.has_left = True
        except TandemError as error:
            self.error = error
            self._check_error(error)
        finally:
            self.ended_s = world.loop.time()
            if abort is not None:
                abort.cancel()
            end = self.finish or self.error or ("left" if self.has_left else "cut off")
            world.note("client", f"{self.name} ends: {end}")
        if not self.error and not self.has_left:
            self._check_whole()
        self._check_times()

    async def _abort_later(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._abort()

    async def _abort(self) -> None:
        self.has_aborted = True
        self.router.world.note("client", f"{self.name} is aborted")
        if await self.router.backend.abort(self.name):
            self.attempts_at_abort = self.router.world.num_attempts(self.router, self.name)

    async def _read(self, router, world) -> None:
        self._running = asyncio.ensure_future(router.backend.generate(self.request, self))
        try:
            await self._running
        except asyncio.CancelledError:
            if not self.has_left:
                raise
        finally:
            self._running.cancel()

    @property
    def is_ended(self) -> bool:
        """See `tandem.wire.token_stream.TokenReceiver`."""
        return bool(self.finish)

    def take(self, delta) -> None:
        """See `tandem.wire.token_stream.TokenReceiver`."""
        num, world = len(self.token_ids), self.router.world
        world.check(not self.finish, f"{self.name} got a delta after its end")
        world.check(delta.index == num, f"{self.name}: index {delta.index} behind {num} tokens")
        self._take(delta.token_ids, delta.logprobs)
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish.reason if delta.finish is not None else ""
        self.has_room = not self.is_slow
        if self._is_after(self.leaves_after) and not self.finish:
            self.has_left = True
            self._running.cancel()
        elif self._is_after(self.aborts_after) and not self.has_aborted:
            self.router.run(self._abort())

    async def drain(self) -> None:
        """See `tandem.wire.token_stream.TokenReceiver`."""
        await asyncio.sleep(self.router.world.draw.expovariate(20))
        self.has_room = True

    def take_ordinary(self, token_ids) -> bool:
        """See `tandem.wire.token_stream.TokenReceiver`."""
        world = self.router.world
        if not self.takes_ordinary or self._wants_logprobs or world.draw.random() < 0.1:
            return False
        if not self.has_room or self.has_left:
            return False
        if self._would_act(self.leaves_after) or self._would_act(self.aborts_after):
            return False
        self._take(token_ids, ())
        return True

    @property
    def _wants_logprobs(self) -> bool:
        return self.request.logprobs is not None

    def _is_after(self, count: int | None) -> bool:
        return count is not None and len(self.token_ids) >= count

    def _would_act(self, count: int | None) -> bool:
        return count is not None and len(self.token_ids) + 1 >= count

    def _take(self, token_ids, logprobs) -> None:
        if token_ids and not self.token_ids:
            self.first_s = self.router.world.loop.time()
        self.token_ids += token_ids
        self.logprobs += logprobs
        num = len(self.token_ids)
        self.router.world.check(
            self.token_ids == self._expected[:num],
            f"{self.name} got {self.token_ids} instead of {self._expected[:num]}",
        )

    def _check_whole(self) -> None:
        check, request = self.router.world.check, self.request
        if self.finish == "abort":
            check(self.has_aborted, f"{self.name} was aborted by nobody")
            return
        check(bool(self.finish), f"{self.name} ended without a finish")
        check(
            self.token_ids == self._expected,
            f"{self.name} ended with {len(self.token_ids)} of {len(self._expected)} tokens",
        )
        if request.logprobs is None:
            return
        check(self.logprobs == self._expected_told, f"{self.name} got other log-probabilities")
        if request.logprobs.prompt_start >= 0:
            prompt = request.prompt_ids
            told = [
                logprob_after(prompt[:position], prompt[position])
                for position in range(max(1, request.logprobs.prompt_start), len(prompt))
            ]
            got = [each for each in self.prompt_logprobs if each.logprob is not None]
            check(
                got == told, f"{self.name} got {len(got)} of {len(told)} prompt log-probabilities"
            )

    def _check_times(self) -> None:
        """Nothing is begun for who was aborted, or too late."""
        world, deadline_s = self.router.world, self.request.deadline_s
        if self.attempts_at_abort >= 0:
            num_more = world.num_attempts(self.router, self.name) - self.attempts_at_abort
            world.check(not num_more, f"{self.name} was aborted and tried again")
        if deadline_s is not None and world.is_calm and world.is_undisturbed:
            told_s = self.first_s if self.first_s >= 0 else self.ended_s
            late_s = told_s - self.began_s - deadline_s
            world.check(
                late_s < BEGUN_WITHIN_S, f"{self.name} heard nothing until {late_s} s too late"
            )

    def _check_error(self, error: TandemError) -> None:
        """An error is right when no attempt is left, or no node, or no time, or no place in line."""
        world = self.router.world
        num_attempts = world.num_attempts(self.router, self.name)
        waited_s = world.loop.time() - self.began_s
        if isinstance(error, DeadlinePassed):
            is_right = self._is_late(waited_s)
        elif isinstance(error, Overloaded):
            # Of nodes none ever is: their own lines are long enough.
            is_right = not num_attempts and self._is_crowded(waited_s)
        elif isinstance(error, RequestEndedEngine):
            is_right = num_attempts > 1 and not world.is_calm
        elif isinstance(error, NoNodeAvailable):
            # A loop that stands still delivers it late, when a node may have come up since.
            is_delayed = waited_s > self.router.backend._node_wait.limit_s + 1e-9
            is_serving = self.router.cluster.health().is_serving and not is_delayed
            is_right = not world.is_undisturbed and not is_serving
        else:
            # What is handed over uses up no attempt; a frame late by more than a second may.
            is_used_up = error.is_retryable and num_attempts >= world.plan.max_attempts
            is_right = is_used_up and (not world.is_calm or world.num_ends > 0)
        world.check(
            is_right,
            f"{self.name} failed after {waited_s} s and {num_attempts} attempts with {error.code}: {error}",
        )

    def _is_late(self, waited_s: float) -> bool:
        """Tell whether the client's deadline passed before its first token."""
        if self.request.deadline_s is None or self.token_ids:
            return False
        return waited_s >= self.request.deadline_s - 1e-9

    def _is_crowded(self, waited_s: float) -> bool:
        limits = self.router.world.plan.admission.limits
        is_full = self.router.backend.leftovers["queued"] >= limits.max_requests
        return is_full or waited_s >= limits.max_wait_s - 1e-9
