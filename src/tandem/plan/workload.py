"""The load that a fleet is planned for: from a trace, or drawn. Pure, and the same for the same seed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.bench.arrivals import arrival_times
from tandem.bench.trace import TraceRow, due_times
from tandem.plan.lengths import Lengths
from tandem.plan.seam import BLOCK_TOKENS, PlannedRequest

# Of an answer, where nothing is asked of it: faster than people read.
TOKEN_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A load as a person describes it.

    Attributes:
        prompt: Tokens that a turn adds to its conversation, the system prompt left out.
        output: Tokens of an answer.
        rate: Requests a second, every turn counted.
        burstiness: Of the arrivals of conversations; 1 is a Poisson process.
        system_tokens: At the beginning of each conversation, and its whole blocks of `BLOCK_TOKENS` are shared.
        num_systems: How many different ones there are, each as frequent as any other.
        turns: Requests of a conversation. Each has all before it in its prompt.
        think_s: From the end of an answer to the next turn.
        token_s: How long a token of an answer is taken to be when that end is reckoned.
    """

    prompt: Lengths
    output: Lengths
    rate: float
    duration_s: float
    burstiness: float = 1.0
    system_tokens: int = 0
    num_systems: int = 1
    turns: int = 1
    think_s: float = 0.0
    token_s: float = TOKEN_S
    seed: int = 0


def draw(load: Drawn) -> list[PlannedRequest]:
    """Return the requests of a load, in the order of their arrival."""
    count = max(round(load.rate * load.duration_s / load.turns), 1)
    starts_s = arrival_times(load.rate / load.turns, load.burstiness, count, load.seed)
    rng = np.random.default_rng([load.seed, count, load.turns])
    prompts = load.prompt.draw(rng, count * load.turns)
    outputs = load.output.draw(rng, count * load.turns)
    systems = rng.integers(load.num_systems, size=count).tolist()
    blocks_of = _Blocks(load)
    found: list[PlannedRequest] = []
    for number, start_s in enumerate(starts_s):
        own = slice(number * load.turns, (number + 1) * load.turns)
        found += _conversation(
            load,
            start_s,
            prompts[own],
            outputs[own],
            blocks_of.conversation(systems[number], number),
        )
    # Later turns of the last conversations come after all others have ended, and would meet an empty cluster.
    within = [request for request in found if request.arrival_s <= load.duration_s]
    return sorted(within or found, key=lambda request: request.arrival_s)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Numbers of blocks: those of system prompts first, then a range for each conversation."""

    load: Drawn

    @property
    def num_shared(self) -> int:
        return self.load.system_tokens // BLOCK_TOKENS

    def conversation(self, system: int, number: int) -> "_Said":
        first = system * self.num_shared
        shared = range(first, first + self.num_shared)
        # No conversation has so many blocks of its own: 500 million tokens.
        return _Said(shared, (1 << 40) + number * (1 << 20), f"s{number}" * (self.load.turns > 1))


@dataclass(frozen=True, slots=True)
class _Said:
    """The blocks of one conversation, from its system prompt on."""

    shared: range
    first_own: int
    session: str

    def blocks(self, num_tokens: int, *, is_shared: bool) -> Sequence[int]:
        """Return the whole blocks of so many tokens; of its own only where another turn will repeat them."""
        num_own = max(num_tokens // BLOCK_TOKENS - len(self.shared), 0) if is_shared else 0
        return [*self.shared, *range(self.first_own, self.first_own + num_own)]


def _conversation(
    load: Drawn, start_s: float, prompts: list[int], outputs: list[int], said: _Said
) -> list[PlannedRequest]:
    arrival_s, length = start_s, load.system_tokens
    found = []
    for num_prompt, num_output in zip(prompts, outputs, strict=True):
        length += num_prompt
        found.append(
            PlannedRequest(
                arrival_s=arrival_s,
                num_prompt=length,
                num_output=num_output,
                blocks=said.blocks(length, is_shared=load.turns > 1),
                session=said.session,
            )
        )
        length += num_output
        arrival_s += load.think_s + num_output * load.token_s
    return found


def replay(
    rows: Sequence[TraceRow], *, rate: float = 0.0, scale: float = 1.0, duration_s: float = 0.0
) -> list[PlannedRequest]:
    """Return the requests of a trace.

    Args:
        rate: Requests a second on average, to which the times between them are stretched; 0: as recorded.
        scale: Times as many requests a second, after that.
        duration_s: Only what arrives before then; 0: all.
    """
    speed = scale
    if rate and (lasts_s := (rows[-1].timestamp - rows[0].timestamp) / 1000):
        speed *= rate * lasts_s / len(rows)
    return [
        PlannedRequest(
            arrival_s=due_s,
            num_prompt=row.input_length,
            num_output=row.output_length,
            # The last id of a row may stand for a part of a block.
            blocks=row.hash_ids[: row.input_length // BLOCK_TOKENS],
        )
        for row, due_s in zip(rows, due_times(list(rows), speed), strict=True)
        if not duration_s or due_s <= duration_s
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What a load comes to.

    Attributes:
        num_uncached: Prompt tokens that were in no prompt before: what a cache without end leaves to compute.
    """

    num_requests: int
    lasts_s: float
    num_prompt: int
    num_output: int
    num_uncached: int

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.num_requests / self.lasts_s


def facts_of(requests: Sequence[PlannedRequest]) -> LoadFacts:
    """Return what a load comes to; it lasts from 0 to its last arrival, a second at least."""
    return LoadFacts(
        num_requests=len(requests),
        lasts_s=max(requests[-1].arrival_s, 1.0),
        num_prompt=sum(request.num_prompt for request in requests),
        num_output=sum(request.num_output for request in requests),
        num_uncached=sum(uncached(requests)),
    )


def uncached(requests: Sequence[PlannedRequest]) -> list[int]:
    """Return of each request how many prompt tokens were in no prompt before it."""
    seen: set[int] = set()
    found = []
    for request in requests:
        known = 0
        for block in request.blocks:
            if block not in seen:
                break
            known += 1
        seen.update(request.blocks)
        found.append(max(request.num_prompt - known * BLOCK_TOKENS, 1))
    return found


def without_too_long(
    requests: Sequence[PlannedRequest], most_tokens: int
) -> tuple[list[PlannedRequest], int]:
    """Return the requests that a node can hold, and how many it cannot."""
    kept = [each for each in requests if each.num_prompt + each.num_output <= most_tokens]
    return kept, len(requests) - len(kept)
