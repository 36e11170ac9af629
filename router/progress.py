"""One request's tokens over all of its attempts, and where its time went: pure, no I/O.

Tokens carry their index. The first copy of index i is taken and every other one is dropped, so prefill's first
token and decode's copy of it, a replay's overlap and a late message of a dead attempt need no special case. Prompt
positions follow the same rule: their log-probabilities are given once, in order.

```
 phases: queue ─▶ pair ─▶ an attempt: what its nodes report ─▶ first token ─▶ ...
                   ▲          └── it failed: lost_attempt ──┐
                   └────────────────────────────────────────┘
```
"""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tandem.frontend.backend import Tap
from tandem.wire.errors import PeerLost
from tandem.wire.generation import Finish, GenerateRequest, Phase, RequestId, TokenLogprobs
from tandem.wire.messages import TokenDelta


class Trail:
    """The phases of one request since the router took it; see `tandem.frontend.timings`.

    Args:
        clock: Monotonic, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._ended_s = 0.0
        self._phases: list[Phase] = []
        # Of the attempt that runs. When it fails, one phase stands for all of it.
        self._attempt: list[Phase] = []

    def end(self, name: str, node: str = "") -> None:
        """End a phase of the router's own; the next begins."""
        now = self._clock() - self._started
        self._phases.append(Phase(name, self._ended_s, now - self._ended_s, node))
        self._ended_s = now

    def heard(self, phases: Iterable[Phase], node: str) -> None:
        """Take the phases that a node of the attempt reports, in seconds since it took the request.

        The request counts as taken when it was sent: clocks of two machines are never compared.
        """
        for phase in phases:
            at_s = self._ended_s + phase.start_s
            self._attempt.append(Phase(phase.name, at_s, phase.duration_s, node))

    def lost(self) -> None:
        """The attempt failed."""
        self._attempt.clear()
        self.end("lost_attempt")

    def take(self) -> list[Phase]:
        """Return the phases that were not returned yet."""
        taken = self._phases + self._attempt
        self._phases, self._attempt = [], []
        return taken


class Progress:
    """What a request's client was sent so far, and what is still to come.

    Args:
        tap: Takes ordinary tokens; see `Backend.generate`.
        clock: Of the request's deadline, which counts from now.

    Attributes:
        sent_ids: Tokens sent to the client, over all attempts.
        next_index: Index of the token that the client waits for.
        is_finished: The last delta was returned.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tap: Tap | None = None,
        clock: Callable[[], float] = time.monotonic,
        trail: Trail | None = None,
    ) -> None:
        self.trail = trail or Trail()
        self.sent_ids: list[int] = []
        self.next_index = request.num_prior_tokens
        self.is_finished = False
        self._request, self._tap = request, tap
        self._clock, self._started = clock, clock()
        start = request.logprobs.prompt_start if request.logprobs is not None else -1
        self._next_position = start if start >= 0 else len(request.prompt_ids)

    @property
    def request_id(self) -> RequestId:
        """The request's id: the same in every attempt."""
        return self._request.request_id

    @property
    def group(self) -> str:
        """The name of the request's group; empty where it is alone."""
        return self._request.group

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether the client was promised prompt positions that it was not sent yet."""
        return self._next_position < len(self._request.prompt_ids)

    def accept(self, delta: TokenDelta) -> TokenDelta | None:
        """Return the part of a delta that is new to the client, or None when nothing is.

        Raises:
            PeerLost: Something before this delta never came: the stream has a gap and can be replayed.
        """
        if self.is_finished:
            return None
        if delta.index > self.next_index:
            raise PeerLost(f"tokens {self.next_index} to {delta.index - 1} never arrived")
        prompt_logprobs = self._new_prompt_logprobs(delta)
        num_known = self.next_index - delta.index
        token_ids, finish = delta.token_ids[num_known:], self._end_of_request(delta)
        if not token_ids and not prompt_logprobs and finish is None:
            return None
        has_news = finish is not None or (delta.token_ids and not self.sent_ids)
        new = msgspec.structs.replace(
            delta,
            index=self.next_index,
            token_ids=token_ids,
            finish=finish,
            # In later attempts most of the "cached" prompt is what this request itself computed.
            cached_tokens=0 if self.sent_ids else delta.cached_tokens,
            cached_by_tier={} if self.sent_ids else delta.cached_by_tier,
            logprobs=delta.logprobs[num_known:],
            prompt_index=self._next_position,
            prompt_logprobs=prompt_logprobs,
            phases=self.trail.take() if has_news else [],
        )
        self.sent_ids += token_ids
        self.next_index += len(token_ids)
        self._next_position += len(prompt_logprobs)
        self.is_finished = finish is not None
        return new

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        """Pass tokens on to the tap if they come next, as a `StreamTap`."""
        tap = self._tap
        if index != self.next_index or tap is None or not tap.take_ordinary(token_ids):
            return False
        self.sent_ids += token_ids
        self.next_index = index + len(token_ids)
        return True

    def _new_prompt_logprobs(self, delta: TokenDelta) -> list[TokenLogprobs]:
        """Return those of positions that the client waits for.

        A later attempt's prompt is longer: the tokens that the client was sent are not part of its prompt.
        """
        if not delta.prompt_logprobs or not self.awaits_prompt_logprobs:
            return []
        if delta.prompt_index > self._next_position:
            raise PeerLost(
                f"log-probabilities of prompt positions {self._next_position} to "
                f"{delta.prompt_index - 1} never arrived"
            )
        first = self._next_position - delta.prompt_index
        return delta.prompt_logprobs[first : len(self._request.prompt_ids) - delta.prompt_index]

    def _end_of_request(self, delta: TokenDelta) -> Finish | None:
        """Return why the request ended; None while it goes on.

        A hand-off ends prefill's part only. An abort ends the request whatever the client was sent: the half
        that reports it may not know the tokens that the other half sent.
        """
        finish = delta.finish
        if finish is None or finish.reason == "handed_off":
            return None
        is_late = delta.index + len(delta.token_ids) < self.next_index
        return None if is_late and finish.reason != "abort" else finish

    def aborted(self) -> TokenDelta:
        """End the request and return its client's last delta."""
        self.is_finished = True
        return self._without_tokens(Finish(reason="abort"))

    def last_words(self) -> TokenDelta:
        """Return the delta that comes before a failure: the phases that were not returned yet."""
        return self._without_tokens(None)

    def _without_tokens(self, finish: Finish | None) -> TokenDelta:
        return TokenDelta(
            request_id=self.request_id,
            attempt=0,
            index=self.next_index,
            token_ids=[],
            finish=finish,
            phases=self.trail.take(),
        )

    def to_place(self) -> GenerateRequest:
        """Return what nodes are chosen for: the request, with the sent tokens in its prompt."""
        if not self.sent_ids:
            return self._request
        prompt_ids = self._request.prompt_ids + self.sent_ids
        return msgspec.structs.replace(self._request, prompt_ids=prompt_ids)

    def remaining(self) -> GenerateRequest:
        """Return what an attempt has to do from here: the sent tokens become part of the prompt."""
        request, logprobs = self._request, self._request.logprobs
        if logprobs is not None:
            start = self._next_position if self.awaits_prompt_logprobs else -1
            logprobs = msgspec.structs.replace(logprobs, prompt_start=start)
        return msgspec.structs.replace(
            request,
            prompt_ids=request.prompt_ids + self.sent_ids,
            num_prior_tokens=self.next_index,
            # With sent tokens behind it the prompt is no longer that of the group.
            group="" if self.sent_ids else request.group,
            deadline_s=self._left_s(),
            session="",  # only the router uses it
            logprobs=logprobs,
        )

    def _left_s(self) -> float | None:
        """Return the time that is left to begin; a client that was sent something waits on."""
        if self._request.deadline_s is None or self.sent_ids:
            return None
        return max(0.0, self._request.deadline_s - (self._clock() - self._started))
