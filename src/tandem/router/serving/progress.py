"""The tokens of a request over all its attempts, and the phases of its time. No I/O.

Every token has an index. The first copy of each index is sent and all others are dropped. So decode's copy of the first
token, the overlap of a replay and a late message of a failed attempt need no special case. Log-probabilities of prompt
positions follow the same rule: each is sent once, in order.

```
 phases: queue ─▶ pair ─▶ an attempt: phases reported by its nodes ─▶ first token ─▶ ...
                   ▲          └── it failed: lost_attempt ──┐
                   └────────────────────────────────────────┘
```
"""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tandem.wire.errors import PeerLost
from tandem.wire.generation import Finish, GenerateRequest, Phase, RequestId, TokenLogprobs
from tandem.wire.messages import TokenDelta
from tandem.wire.token_stream import TokenReceiver


class RequestTimeline:
    """The phases of one request since it reached the router; see `tandem.frontend.timings`.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._ended_s = 0.0
        self._phases: list[Phase] = []
        # Phases of the running attempt. If it fails, one phase replaces them.
        self._attempt: list[Phase] = []

    def end(self, name: str, node: str = "") -> None:
        """End a phase of the router; the next one starts."""
        now = self._clock() - self._started
        self._phases.append(Phase(name, self._ended_s, now - self._ended_s, node))
        self._ended_s = now

    def note(self, name: str) -> None:
        """Add a phase without a duration."""
        self._phases.append(Phase(name, self._clock() - self._started, 0.0))

    def add(self, phases: Iterable[Phase], node: str) -> None:
        """Add phases that a node of the attempt reports, in seconds since it received the request.

        The time of sending counts as the time of receipt, because the clocks of two machines cannot be compared.
        """
        for phase in phases:
            at_s = self._ended_s + phase.start_s
            self._attempt.append(Phase(phase.name, at_s, phase.duration_s, node))

    def lose_attempt(self) -> None:
        """Replace the phases of a failed attempt by one phase."""
        self._attempt.clear()
        self.end("lost_attempt")

    def take(self) -> list[Phase]:
        """Return the phases that have not been returned yet."""
        taken = self._phases + self._attempt
        self._phases, self._attempt = [], []
        return taken


class Progress:
    """The tokens that a request's client has received, and the part that is left.

    Args:
        receiver: Gets the ordinary tokens that `take_ordinary_at` accepts.
        clock: Clock of the request's deadline, which counts from now.

    Attributes:
        sent_ids: Tokens sent to the client, over all attempts.
        next_index: Index of the next token for the client.
        is_finished: Whether the last delta has been returned.
    """

    def __init__(
        self,
        request: GenerateRequest,
        receiver: TokenReceiver,
        clock: Callable[[], float] = time.monotonic,
        timeline: RequestTimeline | None = None,
    ) -> None:
        self.timeline = timeline or RequestTimeline()
        self.sent_ids: list[int] = []
        self.next_index = request.num_prior_tokens
        self.is_finished = False
        self._request, self._take_ordinary = request, receiver.take_ordinary
        self._clock, self._started = clock, clock()
        start = request.logprobs.prompt_start if request.logprobs is not None else -1
        self._next_position = start if start >= 0 else len(request.prompt_ids)

    @property
    def request(self) -> GenerateRequest:
        """The request as it was admitted."""
        return self._request

    @property
    def is_greedy(self) -> bool:
        """Whether each token depends only on the tokens before it, so that any node continues the answer alike.

        Engines count the presence and frequency of tokens that they generated themselves.
        """
        sampling = self._request.sampling
        is_argmax = sampling.temperature == 0.0 or sampling.top_k == 1
        has_counts = bool(sampling.presence_penalty or sampling.frequency_penalty)
        return is_argmax and not has_counts and sampling.grammar is None

    @property
    def request_id(self) -> RequestId:
        """The request's id, which is the same in every attempt."""
        return self._request.request_id

    @property
    def group(self) -> str:
        """The name of the request's group; empty for a request without a group."""
        return self._request.group

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether the client is still to receive log-probabilities of prompt positions."""
        return self._next_position < len(self._request.prompt_ids)

    def accept(self, delta: TokenDelta) -> TokenDelta | None:
        """Return the part of a delta that is new to the client, or None.

        Raises:
            PeerLost: Tokens before this delta are missing. A replay can send them.
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
            # In later attempts, most of the cached prompt was computed by this request itself.
            cached_tokens=0 if self.sent_ids else delta.cached_tokens,
            cached_by_tier={} if self.sent_ids else delta.cached_by_tier,
            logprobs=delta.logprobs[num_known:],
            prompt_index=self._next_position,
            prompt_logprobs=prompt_logprobs,
            phases=self.timeline.take() if has_news else [],
        )
        self.sent_ids += token_ids
        self.next_index += len(token_ids)
        self._next_position += len(prompt_logprobs)
        self.is_finished = finish is not None
        return new

    def take_ordinary_at(self, index: int, token_ids: Sequence[int]) -> bool:
        """Pass tokens to the receiver if they are the next ones. Implements `DirectReceiver`."""
        if index != self.next_index or not self._take_ordinary(token_ids):
            return False
        self.sent_ids += token_ids
        self.next_index = index + len(token_ids)
        return True

    def _new_prompt_logprobs(self, delta: TokenDelta) -> list[TokenLogprobs]:
        """Return the log-probabilities of prompt positions that the client has not received.

        The prompt of a later attempt includes sent tokens, which are not part of the client's prompt.
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
        """Return why the request has ended, or None.

        A hand-off ends only prefill's half. An abort always ends the request, even at an old index: the half that
        reports it may not know the tokens that the other half has sent.
        """
        finish = delta.finish
        if finish is None or finish.reason == "handed_off":
            return None
        is_late = delta.index + len(delta.token_ids) < self.next_index
        return None if is_late and finish.reason != "abort" else finish

    def aborted(self) -> TokenDelta:
        """End the request as aborted and return the client's last delta."""
        self.is_finished = True
        return self._without_tokens(Finish(reason="abort"))

    def final_timings(self) -> TokenDelta:
        """Return a delta with the remaining phases, for the client of a failed request."""
        return self._without_tokens(None)

    def _without_tokens(self, finish: Finish | None) -> TokenDelta:
        return TokenDelta(
            request_id=self.request_id,
            attempt=0,
            index=self.next_index,
            token_ids=[],
            finish=finish,
            phases=self.timeline.take(),
        )

    def routed_request(self) -> GenerateRequest:
        """Return the request for the choice of nodes, with the sent tokens in its prompt."""
        if not self.sent_ids:
            return self._request
        prompt_ids = self._request.prompt_ids + self.sent_ids
        return msgspec.structs.replace(self._request, prompt_ids=prompt_ids)

    def remaining(self) -> GenerateRequest:
        """Return the request for the next attempt: the sent tokens become part of its prompt."""
        request, logprobs = self._request, self._request.logprobs
        if logprobs is not None:
            start = self._next_position if self.awaits_prompt_logprobs else -1
            logprobs = msgspec.structs.replace(logprobs, prompt_start=start)
        return msgspec.structs.replace(
            request,
            prompt_ids=request.prompt_ids + self.sent_ids,
            num_prior_tokens=self.next_index,
            # With sent tokens appended, the prompt differs from that of the group.
            group="" if self.sent_ids else request.group,
            deadline_s=self.remaining_s(),
            session="",  # used only by the router
            logprobs=logprobs,
        )

    def remaining_s(self) -> float | None:
        """Return the remaining time for the first token; None once the client has received tokens."""
        if self._request.deadline_s is None or self.sent_ids:
            return None
        return max(0.0, self._request.deadline_s - (self._clock() - self._started))
