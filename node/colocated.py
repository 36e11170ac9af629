"""`tandem serve`: both roles in one engine. The colocated baseline, and the oracle of parity tests.

Run as `python -m node.colocated` by the HTTP process.
"""

import sys

from typing_extensions import override

from engine.core import Engine
from engine.request import ActiveRequest
from node.answers import Answers, Ticket
from node.deadlines import Deadlines, not_started
from node.engine_host import Parts, RoleHost, main
from node.load import engine_load, hit_rate, token_usage
from node.loop import Start
from wire.errors import InvalidRequest, TandemError
from wire.messages import NodeLoad, StartColocated


class ColocatedRole:
    """Prompts and generation in one engine, no transfer."""

    def __init__(self, engine: Engine, answers: Answers) -> None:
        self._engine = engine
        self._answers = answers
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
        active = self._engine.submit(message.request)
        self._by_ticket[ticket], self._by_request[active] = active, ticket
        self._deadlines.note(active, message.request.deadline_s)

    def cancel(self, ticket: Ticket) -> None:
        """See `Role.cancel`."""
        active = self._by_ticket.pop(ticket, None)
        if active is not None:
            del self._by_request[active]
            self._num_aborted += 1
            self._engine.cancel(active)

    def poll(self) -> None:
        """See `Role.poll`. Nothing happens beside this loop but that time passes."""
        for active in self._deadlines.passed():
            ticket = self._by_request.get(active)
            if ticket is not None and not active.is_begun:
                del self._by_request[active]
                del self._by_ticket[ticket]
                self._engine.cancel(active)
                self._answers.fail(ticket, not_started())

    def step(self) -> None:
        """See `Role.step`."""
        result = self._engine.step()
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
                logprobs=token.logprobs,
            )
            if token.finish is not None:
                del self._by_ticket[ticket], self._by_request[token.request]
        # Last: one that fails with its first token may have log-probabilities of its prompt above.
        for failure in result.failures:
            ticket = self._by_request.pop(failure.request)
            del self._by_ticket[ticket]
            self._answers.fail(ticket, failure.error)

    def fail_all(self, error: TandemError) -> None:
        """See `Role.fail_all`."""
        for ticket, active in list(self._by_ticket.items()):
            self._engine.cancel(active)
            self._answers.fail(ticket, error)
        self._by_ticket.clear()
        self._by_request.clear()

    def hand_over(self, error: TandemError) -> None:
        """See `Role.hand_over`."""
        self.fail_all(error)

    def flush_cache(self) -> None:
        """See `Role.flush_cache`."""
        self._engine.cache.flush()

    def load(self) -> NodeLoad:
        """See `Role.load`."""
        return engine_load(
            self._engine, num_failed=self._answers.num_failed, num_aborted=self._num_aborted
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
        )


class _Host(RoleHost):
    @override
    def role(self, parts: Parts) -> ColocatedRole:
        return ColocatedRole(parts.engine, parts.answers)


if __name__ == "__main__":
    sys.exit(main(_Host()))
