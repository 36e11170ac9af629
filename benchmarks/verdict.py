"""The last line of a benchmark."""


def result(
    name: str, value: float, goal: float, unit: str = "ratio", *, is_lower_better: bool = False
) -> str:
    """Return `result: NAME VALUE UNIT (goal GOAL) reached|short`."""
    is_reached = value <= goal if is_lower_better else value >= goal
    verdict = "reached" if is_reached else "short"
    return f"result: {name} {value:.3g} {unit} (goal {goal:g}) {verdict}"
