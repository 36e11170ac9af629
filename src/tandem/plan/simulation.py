"""A fleet in virtual time: the product's policies, line, roles, scheduler, batcher and pages; no sleeping.

```
 requests ──▶ dispatch.py: the router ──▶ nodes.py: roles, and engines (leaping.py) with the profile's times
                    ▲                          └── links.py: the bytes between them
                    └── loads and caches, as late as nodes tell them          agenda.py: what happens when
```

What stands in for the real thing: the device (its time is the profile's), the links (bytes at a rate, with
the delays of `Overheads`), the edge worker (a delay) and the client, which reads at once and never leaves.
"""

import gc
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from tandem.engine.shape import ModelShape
from tandem.node.answers import Ticket
from tandem.plan.agenda import Agenda, NodeClock
from tandem.plan.dispatch import Dispatch
from tandem.plan.links import Wires
from tandem.plan.nodes import FINGERPRINT, Journey, PlannedNode, Told
from tandem.plan.prompts import Prompts
from tandem.plan.seam import Fleet, NodeKind, Outcome, PlannedRequest, Served
from tandem.wire.channel import Peer
from tandem.wire.ids import RequestId

_EDGE = Peer(b"edge")


class Simulation:
    """One fleet and one load.

    Args:
        leaps: See `PlannedNode`.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests: Iterable[PlannedRequest],
        *,
        seed: int = 0,
        page_size: int = 0,
        leaps: bool = True,
    ) -> None:
        self._fleet, self._requests = fleet, list(requests)
        self._agenda = Agenda()
        prompts, journeys = Prompts(self._requests), dict[str, Journey]()
        rng = random.Random(seed)
        self._dispatch = Dispatch(fleet, self._agenda, prompts, rng, self._refused)
        wires = Wires(self._agenda, fleet.overheads)
        self._journeys = journeys

        def told(clock: NodeClock, role: str) -> Told:
            return Told(clock, journeys, role, self._dispatch.handed_off, self._ended)

        def nodes(kind: NodeKind, count: int, role: str) -> list[PlannedNode]:
            counted = _with_pages(kind, page_size)
            shape = _shape(counted, prompts.vocab_size)
            return [
                PlannedNode(counted, role, shape, wires, told, leaps=leaps) for _ in range(count)
            ]

        self.prefills = nodes(fleet.prefill, fleet.num_prefill, "prefill")
        self.decodes = nodes(fleet.decode, fleet.num_decode, "decode")
        self._dispatch.know(self.prefills, self.decodes)
        self._num_left = len(self._requests)

    @property
    def agenda(self) -> Agenda:
        """What is still to happen."""
        return self._agenda

    def run(self, until_s: float = float("inf")) -> Outcome:
        """Serve the load to its end or until a time, and return what came of it."""
        self._expect(0)
        with _uncollected():
            self._agenda.run(until_s, lambda: not self._num_left)
            for node in (*self.prefills, *self.decodes):
                node.catch_up(until_s)
        return Outcome(
            requests=[self._served(number, until_s) for number in range(len(self._requests))],
            busy_s=[node.busy_s for node in (*self.prefills, *self.decodes)],
            num_retracted=sum(node.engine.num_retracted for node in self.decodes),
            end_s=until_s if self._num_left else self._agenda.now,
        )

    def _expect(self, number: int) -> None:
        """Let the request of this number arrive in its time, and after it the next."""
        if number < len(self._requests):
            request = self._requests[number]
            at_s = max(self._agenda.now, request.arrival_s + self._fleet.overheads.edge_s / 2)
            self._agenda.at(at_s, partial(self._arrive, number))

    def _arrive(self, number: int) -> None:
        self._expect(number + 1)
        request_id = RequestId(str(number))
        request = self._requests[number]
        journey = Journey(request, Ticket(_EDGE, request_id, 0))
        self._journeys[request_id] = journey
        most = min(self._most_tokens(self._fleet.prefill), self._most_tokens(self._fleet.decode))
        if request.num_prompt >= most:
            journey.error = f"the prompt has {request.num_prompt} tokens, a node holds {most}"
            self._refused(journey)
        else:
            self._dispatch.arrive(journey)

    def _refused(self, _journey: Journey) -> None:
        self._num_left -= 1

    def _ended(self, journey: Journey, at_s: float) -> None:
        if not journey.is_over:
            journey.is_over = True
            self._num_left -= 1
            self._dispatch.ended(journey, at_s)

    def _served(self, number: int, until_s: float) -> Served:
        request = self._requests[number]
        journey = self._journeys.get(str(number))
        if journey is None:  # `until_s` came before it
            journey = Journey(request, Ticket(_EDGE, RequestId(str(number)), 0))
        token_s = np.array(journey.token_s) + self._fleet.overheads.edge_s / 2
        return Served(
            arrival_s=request.arrival_s,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
            token_s=token_s[token_s <= until_s],
            prefill=journey.prefill,
            decode=journey.decode,
            num_cached=journey.num_cached,
            num_kept=journey.num_kept,
            error=journey.error,
        )

    @staticmethod
    def _most_tokens(kind: NodeKind) -> int:
        return min(kind.context_length, kind.num_tokens)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no cycles: what a simulation makes stays to its end, and was a tenth of the time to look through."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def simulate(
    fleet: Fleet,
    requests: Iterable[PlannedRequest],
    *,
    until_s: float | None = None,
    seed: int = 0,
    page_size: int = 0,
) -> Outcome:
    """Serve a load to its end, or to `until_s`.

    The same arguments give the same outcome.

    Args:
        requests: In the order of their arrival.
        seed: Of what is drawn: policies that draw, and when nodes tell their load.
        page_size: Counts pages of so many tokens instead of the kinds' own: large ones are quicker.
    """
    simulation = Simulation(fleet, requests, seed=seed, page_size=page_size)
    return simulation.run(float("inf") if until_s is None else until_s)


def _with_pages(kind: NodeKind, page_size: int) -> NodeKind:
    return replace(kind, page_size=page_size) if page_size else kind


def _shape(kind: NodeKind, vocab_size: int) -> ModelShape:
    return ModelShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=vocab_size,
        context_length=kind.context_length,
        eos_token_ids=frozenset(),
        dtype="uint8",
        kv_dtype="uint8",
        fingerprint=FINGERPRINT,
    )
