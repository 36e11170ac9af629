"""The fault matrix as a table: who is hurt, how, and at which stage of a request. Pure."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

TARGETS = ("edge worker", "router", "prefill", "decode", "engine process", "TP rank")
FAULTS = (
    *("SIGKILL", "restart", "SIGSTOP", "SIGTERM", "network cut", "delay and loss"),
    *("disk full", "out of pages", "memory limit"),
)
STAGES = ("idle", "waiting", "prefilling", "pushing", "landed", "decoding", "streaming")

# Of what lasts and passes: well beyond the 2 s after which a silent peer is lost.
LASTS_S = dict.fromkeys(
    ("SIGSTOP", "network cut", "delay and loss", "disk full", "out of pages"), 5.0
)
DELAY_MS, LOSS = 100.0, 0.05

# Why a cell is empty.
_SHARES_NETWORK = "same host, no link of its own"
_SHARES_DISK = "same disk"
_NO_PAGES = "no pages of its own"
EMPTY = {
    **{(target, fault): f"{_SHARES_NETWORK}: see {whose}"
       for target, whose in (("edge worker", "router"), ("engine process", "prefill and decode"),
                             ("TP rank", "prefill and decode"))
       for fault in ("network cut", "delay and loss")},
    **{(target, "restart"): f"started again by {whose}: see SIGKILL"
       for target, whose in (("edge worker", "the router"), ("engine process", "what runs the node"),
                             ("TP rank", "what runs the node"))},
    ("router", "restart"): "its connections end with it: see SIGKILL",
    ("edge worker", "disk full"): f"{_SHARES_DISK}: see router",
    ("engine process", "disk full"): f"{_SHARES_DISK}: see prefill and decode",
    ("TP rank", "disk full"): f"{_SHARES_DISK}: see prefill and decode",
    ("edge worker", "out of pages"): _NO_PAGES,
    ("router", "out of pages"): _NO_PAGES,
    ("engine process", "out of pages"): "its node's pages: see prefill and decode",
    ("TP rank", "out of pages"): "its node's pages: see prefill and decode",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One experiment."""

    target: str
    fault: str
    stage: str

    @property
    def why_empty(self) -> str:
        """Why there is nothing to try; empty when there is."""
        return EMPTY.get((self.target, self.fault), "")

    @property
    def needs_network(self) -> bool:
        return self.fault in ("network cut", "delay and loss")

    @property
    def needs_ranks(self) -> bool:
        """Whether it takes a model on several processes, which a simulated engine has not."""
        return self.target == "TP rank"

    @property
    def must_be_noticed(self) -> bool:
        """Whether somebody else has to say of it: a node that is gone, or silent for longer than allowed."""
        return self.target in ("prefill", "decode") and self.fault in (
            *("SIGKILL", "SIGSTOP", "network cut"),
        )

    @property
    def breaks_connections(self) -> bool:
        """Whether clients are connected to what is ended, and must come again."""
        return self.target in ("edge worker", "router") and self.fault in (
            *("SIGKILL", "SIGTERM", "memory limit"),
        )


def all_cells() -> Iterator[Cell]:
    """Yield every cell with something to try, cells of one cluster together."""
    for target, fault, stage in itertools.product(TARGETS, FAULTS, STAGES):
        cell = Cell(target, fault, stage)
        if not cell.why_empty:
            yield cell
