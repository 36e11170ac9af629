"""`tandem serve`: both roles in one engine. The colocated baseline, and the oracle of parity tests.

Run as `python -m tandem.node.colocated` by the HTTP process.
"""

import time
from collections.abc import Callable

from typing_extensions import override

from tandem.engine.core import Engine
from tandem.engine.request import ActiveRequest
from tandem.engine.step import Token
from tandem.kvtransfer.region import MemoryRegion
from tandem.node.answers import Answers, Ticket
from tandem.node.config import NodeConfig
from tandem.node.deadlines import Deadlines, not_started
from tandem.node.engine_host import Parts, RoleHost, main
from tandem.node.load import engine_load, hit_rate, tier_hits, token_usage
from tandem.node.loop import Start
from tandem.node.pool_memory import make_region
from tandem.node.pool_plan import PoolPlan
from tandem.node.quick_process import end_process
from tandem.node.tiering import Tiering
from tandem.node.timeline import Timeline
from tandem.wire.errors import InvalidRequest, TandemError
from tandem.wire.generation import Phase
from tandem.wire.messages import NodeLoad, StartColocated


class ColocatedRole:
    """Prompts and generation in one engine, no transfer.

    Args:
        tiering: Brings prefixes from tiers; None: there are none.
        clock: Of the phases that edge workers are told.
    """

    def __init__(
        self,
        engine: Engine,
        answers: Answers,
        clock: Callable[[], float] = time.perf_counter,
        *,
        tiering: Tiering[ActiveRequest] | None = None,
    ) -> None:
        self._engine = engine
        self._tiering = tiering or Tiering(engine)
        self._answers, self._clock = answers, clock
        # Of requests that have no token yet.
        self._timelines: dict[ActiveRequest, Timeline] = {}
        self._by_ticket: dict[Ticket, ActiveRequest] = {}
        self._by_request: dict[ActiveRequest, Ticket] = {}
        self._deadlines: Deadlines[ActiveRequest] = Deadlines()
        self._num_aborted = 0
        self._logged = NodeLoad()

    @property
    def has_work(self) -> bool:
        """See `Role.has_work`."""
        return self._engine.has_work

    def tickets(self) -> list[Ticket]:
        """See `Role.tickets`."""
        return list(self._by_ticket)

    def start(self, ticket: Ticket, message: Start) -> None:
        """See `Role.start`."""
        if not isinstance(message, StartColocated):
            raise InvalidRequest("this node serves alone: it takes no half of a request")
        active = self._engine.check(message.request)
        self._engine.refuse_overload(len(self._tiering.awaited))
        self._by_ticket[ticket], self._by_request[active] = active, ticket
        self._timelines[active] = Timeline(self._clock)
        self._deadlines.note(active, message.request.deadline_s)
        prefix = active.token_ids[: active.num_matchable]
        if not self._tiering.begin(active, prefix, message.request.cache_salt):
            self._engine.queue(active)

    def cancel(self, ticket: Ticket) -> None:
        """See `Role.cancel`."""
        active = self._by_ticket.pop(ticket, None)
        if active is not None:
            del self._by_request[active]
            self._timelines.pop(active, None)
            self._num_aborted += 1
            self._end(active)

    def poll(self) -> None:
        """See `Role.poll`. Beside this loop nothing happens but what tiers do, and that time passes."""
        self._tiering.poll()
        for ready in self._tiering.ready():
            ready.owner.from_tiers = ready.from_tiers
            self._timelines[ready.owner].end("kv_tier")
            self._engine.queue(ready.owner)
        for active in self._deadlines.passed():
            ticket = self._by_request.get(active)
            if ticket is not None and not active.is_begun:
                del self._by_request[active]
                del self._by_ticket[ticket], self._timelines[active]
                self._end(active)
                self._answers.fail(ticket, not_started())

    def step(self) -> None:
        """See `Role.step`."""
        began = self._clock()
        result = self._engine.step()
        for chunk in result.chunks:
            if (timeline := self._timelines.get(chunk.request)) is not None:
                timeline.computed(began)
        for run in result.prompt_logprobs:
            ticket = self._by_request[run.request]
            index = run.request.request.num_prior_tokens  # before its first token
            self._answers.prompt_logprobs(ticket, run.first_position, run.entries, index)
        for token in result.tokens:
            ticket = self._by_request[token.request]
            self._answers.token(
                ticket,
                token.index,
                [token.token],
                token.finish,
                token.cached_tokens,
                cached_by_tier=token.cached_by_tier,
                logprobs=token.logprobs,
                phases=self._phases(token),
            )
            if token.finish is not None:
                del self._by_ticket[ticket], self._by_request[token.request]
        # Last: one that fails with its first token may have log-probabilities of its prompt above.
        for failure in result.failures:
            ticket = self._by_request.pop(failure.request)
            del self._by_ticket[ticket]
            self._timelines.pop(failure.request, None)
            self._answers.fail(ticket, failure.error)

    def _phases(self, token: Token) -> list[Phase] | None:
        """Return what is told of with a first token."""
        timeline = self._timelines.pop(token.request, None)
        if timeline is None:
            return None
        timeline.end("prefill")
        return timeline.take()

    def fail_all(self, error: TandemError) -> None:
        """See `Role.fail_all`."""
        for ticket, active in list(self._by_ticket.items()):
            self._end(active)
            self._answers.fail(ticket, error)
        self._by_ticket.clear()
        self._by_request.clear()
        self._timelines.clear()

    def hand_over(self, error: TandemError) -> None:
        """See `Role.hand_over`."""
        self.fail_all(error)

    def flush_cache(self) -> None:
        """See `Role.flush_cache`."""
        self._engine.cache.flush()

    def load(self) -> NodeLoad:
        """See `Role.load`."""
        awaited = self._tiering.awaited
        return engine_load(
            self._engine,
            num_waiting=len(awaited),
            queued_tokens=sum(active.num_prompt for active in awaited),
            num_failed=self._answers.num_failed,
            num_aborted=self._num_aborted,
            tiers=self._tiering.loads(),
        )

    def log_line(self, elapsed_s: float) -> str | None:
        """See `Role.log_line`."""
        now, before = self.load(), self._logged
        self._logged = now
        num_generated = now.generated_tokens - before.generated_tokens
        if not num_generated:
            return None
        return (
            f"Decode batch, #running-req: {now.num_running}, "
            f"#token: {now.pages_held * now.page_size}, token usage: {token_usage(now):.2f}, "
            f"#retracted-req: {now.num_retracted - before.num_retracted}, "
            f"gen throughput (token/s): {num_generated / elapsed_s:.2f}, "
            f"#queue-req: {now.num_waiting}, cache hit rate: {hit_rate(now, before):.2f}"
            f"{tier_hits(now, before)}"
        )

    def _end(self, active: ActiveRequest) -> None:
        self._tiering.cancel(active)
        self._engine.cancel(active)


class _Host(RoleHost):
    @override
    def memory(self, config: NodeConfig, plan: PoolPlan) -> MemoryRegion | None:
        if config.tiers.specs:
            self.region = make_region(config, plan.memory_bytes)
        return self.region

    @override
    def role(self, parts: Parts) -> ColocatedRole:
        return ColocatedRole(parts.engine, parts.answers, tiering=parts.tiering)

    @override
    def close(self) -> None:
        if self.region is not None:
            self.region.close()


if __name__ == "__main__":
    end_process(main(_Host()))
