"""Small fleets and loads to plan with."""

import random

from tandem.engine.profile import DecodeTimes, PrefillTimes, Profile
from tandem.plan.seam import Fleet, NodeKind, Overheads, PlannedRequest

PROFILE = Profile(
    prefill=PrefillTimes(base_ms=3, per_token_ms=0.1, per_context_token_ms=0.001),
    decode=DecodeTimes(base_ms=11, per_request_ms=0.7, per_context_token_ms=0.0003),
)


def kind(**changes: object) -> NodeKind:
    told: dict[str, object] = {
        "name": "small",
        "profile": PROFILE,
        "num_tokens": 40_000,
        "kv_bytes_per_token": 1000,
        "link_bytes_per_s": 1e7,
        "host_step_s": 0.0007,
        "chunked_prefill_size": 1024,
        "context_length": 8192,
    }
    return NodeKind(**told | changes)


def fleet(
    num_prefill: int = 2, num_decode: int = 2, *, policy: str = "cache_aware", **changes
) -> Fleet:
    each = kind(**changes)
    return Fleet(
        prefill=each,
        num_prefill=num_prefill,
        decode=each,
        num_decode=num_decode,
        policy=policy,
        overheads=Overheads(edge_s=0.004, message_s=0.0003, transfer_s=0.0002),
    )


def load(
    seed: int, count: int, rate: float, *, prompt: int = 2500, output: int = 120
) -> list[PlannedRequest]:
    """Poisson arrivals; some prompts begin alike, some are short enough to stay on decode."""
    rng, now_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        shared = rng.choice([(), (0, 1), (0, 2, 3), (4, 5, 6, 7)])
        found.append(
            PlannedRequest(
                arrival_s=now_s,
                num_prompt=rng.choice([rng.randint(1, 100), rng.randint(1, prompt)]),
                num_output=rng.choice([1, rng.randint(1, output)]),
                blocks=shared,
                session=f"s{rng.randrange(8)}",
            )
        )
    return found
