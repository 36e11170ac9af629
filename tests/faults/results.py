"""What came of a cell of the fault matrix: what clients got, who noticed, and whose pages are where. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.faults.cells import Cell
from tests.faults.streams import Answer, Pauses


@dataclass(slots=True)
class Result:
    """What came of a cell; times in milliseconds.

    Attributes:
        gap_ms: The longest pause of a client, beyond the longest of an undisturbed run.
        noticed_ms: Until the first other process said so; None when none did.
        pages_left: Not free or cached on survivors `PAGES_TIMEOUT_S` after the last answer.
        pages_ms: Until all were, from the last answer.
        healed_ms: Until routers had every node again, from when all nodes served.
        operator: Events that tell of it, with how many there were.
        health: What /health said while it lasted.
    """

    target: str
    fault: str
    stage: str
    num_requests: int = 0
    num_right: int = 0
    lost: int = 0
    repeated: int = 0
    wrong: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    gap_ms: float = 0.0
    noticed_ms: float | None = None
    noticed_by: str = ""
    pages_left: int = 0
    pages_ms: float = 0.0
    healed_ms: float = 0.0
    operator: dict[str, int] = field(default_factory=dict)
    health: str = ""
    effect: str = ""
    not_run: str = ""

    @property
    def is_nothing_lost(self) -> bool:
        """No token lost, repeated or wrong, no error but a connection's to what was ended."""
        return not (self.lost or self.repeated or self.wrong or self.errors or self.pages_left)

    def as_json(self) -> dict:
        return asdict(self)


def judge(
    result: Result, answers: Sequence[Answer], cell: Cell, undisturbed: Pauses, since_s: float
) -> None:
    """Sum up what clients got, and how long they waited for more since the fault."""
    errors, gap_s = Counter[str](), 0.0
    for answer in answers:
        verdict = answer.verdict()
        result.lost += verdict.lost
        result.repeated += verdict.repeated
        result.wrong += verdict.wrong
        if cell.breaks_connections and answer.error == "connection lost":
            result.broken += 1
        elif answer.error:
            errors[answer.error] += 1
        else:
            result.num_right += verdict.is_right
            gap_s = max(gap_s, answer.longest_pauses_s(since_s).beyond(undisturbed))
    result.errors = dict(errors)
    result.gap_ms = round(1000 * gap_s)


def summary(result: Result) -> str:
    """Return a line of progress."""
    cell = f"{result.target} | {result.fault} | {result.stage}:"
    if result.not_run:
        return f"{cell} not run: {result.not_run}"
    verdict = "ok  " if result.is_nothing_lost else "BAD "
    noticed = "-" if result.noticed_ms is None else f"{result.noticed_ms:.0f}"
    return (
        f"{verdict} {cell} {result.num_right}/{result.num_requests} right, broken {result.broken}, "
        f"lost {result.lost} repeated {result.repeated} wrong {result.wrong} errors {result.errors} "
        f"gap {result.gap_ms} noticed {noticed} by {result.noticed_by} pages {result.pages_ms} "
        f"left {result.pages_left} healed {result.healed_ms} {result.effect}"
    )
