"""How far requests have come, told from what engines say of their loads and clients have. Pure.

| stage | a prefill node is in it while | a decode node is in it while |
|---|---|---|
| waiting | decode has more requests than it takes, and a prompt waits for its grant | requests wait in line |
| prefilling | it computes | its pages are granted and no prefill has computed a prompt |
| pushing | a prompt is computed and its KV on its way | pages are granted and KV is on its way |
| landed | it has handed off its first prompt | its first request has pages and at most a step |
| decoding | all is handed off, or nothing is left to compute | every request runs, and has 5 tokens |
| streaming | the same, and a client has 10 tokens | the same, and a client has 10 tokens |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.wire.messages import NodeLoad


@dataclass(frozen=True, slots=True)
class View:
    """A cluster at one moment.

    Attributes:
        now: Load of each node that says one, by name.
        base: The same before the requests.
        most_tokens: That a client has got.
    """

    now: Mapping[str, NodeLoad]
    base: Mapping[str, NodeLoad]
    most_tokens: int

    def of(self, prefix: str) -> list[NodeLoad]:
        return [load for name, load in self.now.items() if name.startswith(prefix)]

    def generated(self, name: str) -> int:
        return self.now[name].generated_tokens - self.base[name].generated_tokens

    def pushed(self, name: str) -> int:
        return self.now[name].pushed_bytes - self.base[name].pushed_bytes


def _prefill(view: View, name: str, stage: str) -> bool:
    load = view.now[name]
    is_decoding = not load.num_transferring and view.generated(name) > 0
    return {
        "waiting": load.num_waiting > 0 and any(d.num_waiting for d in view.of("d")),
        "prefilling": load.num_running > 0,
        "pushing": load.num_transferring > 0,
        "landed": view.pushed(name) > 0,
        "decoding": is_decoding and any(d.num_running for d in view.of("d")),
        "streaming": is_decoding and view.most_tokens >= 10,
    }[stage]


def _decode(view: View, name: str, stage: str) -> bool:
    load, generated = view.now[name], view.generated(name)
    is_pushed = any(p.num_transferring for p in view.of("p"))
    return {
        "waiting": load.num_waiting > 0,
        "prefilling": load.num_transferring > 0 and any(p.num_running for p in view.of("p")),
        "pushing": load.num_transferring > 0 and is_pushed,
        "landed": load.num_running > 0 and generated <= 2,
        "decoding": load.num_running > 0 and generated >= 5 * load.num_running,
        "streaming": load.num_running > 0 and view.most_tokens >= 10,
    }[stage]


def in_stage(view: View, name: str, stage: str) -> bool:
    """Tell whether a request that a node has a part in is at a stage now."""
    if name not in view.now or name not in view.base:
        return False
    decide: Callable[[View, str, str], bool] = _prefill if name.startswith("p") else _decode
    return decide(view, name, stage)
