"""What `tandem batch` was told."""

from dataclasses import dataclass
from pathlib import Path

from tandem.batch.client import BatchSettings


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """What `tandem batch` was told; the flags' help says what each is."""

    input: Path
    output: Path
    error_file: Path | None
    urls: tuple[str, ...]
    settings: BatchSettings
    is_restarted: bool
    skips_invalid: bool
    max_line_bytes: int
    grace_s: float

    @property
    def journal(self) -> Path:
        """Beside the output, so that it is on the same disk."""
        return self.output.with_name(f"{self.output.name}.journal")
