"""A cluster by arithmetic, through the seam: prompts on the first free prefill, steps of an even batch.

For tests of what is around the simulation. More nodes of either role never make it worse.
"""

import heapq

import numpy as np

from tandem.engine.profile import DecodeTimes, NodeFigures, PrefillTimes, Profile
from tandem.plan.seam import NodeKind, Outcome, Served

PROFILE = Profile(
    prefill=PrefillTimes(base_ms=5, per_token_ms=0.1),
    decode=DecodeTimes(base_ms=10, per_request_ms=0.1),
    origin="made up",
    node=NodeFigures(num_tokens=10_000_000, kv_bytes_per_token=1000, link_bytes_per_s=1e10),
)


def kind(name="plain", profile=PROFILE, **settings):
    defaults = {"num_tokens": 10_000_000, "kv_bytes_per_token": 1000, "link_bytes_per_s": 1e10}
    return NodeKind(name=name, profile=profile, **defaults | settings)


def simulate(fleet, requests, until_s):
    free_s = [0.0] * fleet.num_prefill
    prefill, decode = fleet.prefill.profile.prefill, fleet.decode.profile.decode
    tokens = sum(request.num_output for request in requests)
    lasts_s = max(requests[-1].arrival_s, 1.0)
    step_s = decode.forward_s(1, 0)
    for _ in range(100):  # a batch has as many answers as come while one of them takes its time
        batch = tokens / lasts_s * step_s / fleet.num_decode
        step_s = (decode.base_ms + decode.per_request_ms * batch) / 1000
    served, busy_s = [], 0.0
    for request in requests:
        took_s = prefill.forward_s(request.num_prompt, 0)
        first_s = max(heapq.heappop(free_s), request.arrival_s) + took_s
        heapq.heappush(free_s, first_s)
        busy_s += took_s
        token_s = first_s + step_s * np.arange(request.num_output)
        served.append(
            Served(
                arrival_s=request.arrival_s,
                num_prompt=request.num_prompt,
                num_output=request.num_output,
                token_s=token_s[token_s <= until_s],
            )
        )
    busy = [busy_s / fleet.num_prefill] * fleet.num_prefill + [lasts_s] * fleet.num_decode
    return Outcome(requests=served, busy_s=busy, num_retracted=0, end_s=until_s)
