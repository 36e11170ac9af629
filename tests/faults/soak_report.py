"""What a soak tells: whether memory and descriptors stayed as they were, and what was left behind."""

import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# What the median of the last quarter may be above that of the second: caches fill and the allocator
# keeps what it has; a leak of a kilobyte a request is more.
MAX_GROWTH_MIB, MAX_NEW_DESCRIPTORS = 6.0, 6


@dataclass(slots=True)
class Growth:
    """Memory and descriptors of a process that was spared: what they were, by the clock."""

    name: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)

    def sample(self, at_s: float) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            memory, descriptors = private_mib(self.pid), num_descriptors(self.pid)
            self.at_s.append(at_s)
            self.memory_mib.append(memory)
            self.descriptors.append(descriptors)

    def grown(self, values: Sequence[float]) -> float:
        """Return the median of the last quarter less that of the second."""
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) - statistics.median(
            values[quarter : 2 * quarter]
        )

    @property
    def is_flat(self) -> bool:
        return (
            self.grown(self.memory_mib) <= MAX_GROWTH_MIB
            and self.grown(self.descriptors) <= MAX_NEW_DESCRIPTORS
        )


def private_mib(pid: int) -> float:
    """Return a process's own memory, without files and what it shares."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def leftovers(directory: Path) -> list[str]:
    """Return files of ended processes: in their scratch directories and their /dev/shm."""
    files = (path for path in directory.glob("*/*") if path.parent.name != "model")
    return sorted(str(p.relative_to(directory)) for p in files if p.name not in ("log", "ballast"))


def described(growth: Growth) -> dict[str, float]:
    hours = max(1e-9, (growth.at_s[-1] - growth.at_s[0]) / 3600)
    slope = statistics.linear_regression(growth.at_s, growth.memory_mib).slope if hours else 0.0
    return {
        "memory MiB": round(growth.memory_mib[-1], 1),
        "2nd to last quarter MiB": round(growth.grown(growth.memory_mib), 2),
        "MiB an hour": round(slope * 3600, 1),
        "descriptors": growth.descriptors[-1],
        "most descriptors": max(growth.descriptors),
        "2nd to last quarter descriptors": growth.grown(growth.descriptors),
    }


def write_report(report: dict, file: Path) -> None:
    """Write it as a page, or as JSON where the file is called so."""
    if file.suffix == ".json":
        file.write_text(json.dumps(report, indent=2) + "\n")
        return
    rows = [f"| {key} | {json.dumps(value)} |" for key, value in report.items() if key != "growth"]
    grown = [
        f"| {name} | " + " | ".join(str(value) for value in values.values()) + " |"
        for name, values in report["growth"].items()
    ]
    heads = list(next(iter(report["growth"].values())))
    lines = ["# Soak", "", "| what | value |", "|---|---|", *rows, ""]
    lines += ["| process | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads), *grown]
    file.write_text("\n".join(lines) + "\n")
