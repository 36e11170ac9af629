"""Files that are read again when they change, without a restart."""

import os
from collections.abc import Callable, Sequence

from tandem.settings.flags import SettingInvalid

Stamp = tuple[int, int, int]


class ReloadedFiles:
    """Loads files on creation, and again when `refresh` finds that one has changed.

    Args:
        paths: The files.
        load: Reads all of them and puts their content to use.

    Raises:
        SettingInvalid: Raised by `load`.

    Attributes:
        problem: Why the last change is not in use; empty if it is.
    """

    def __init__(self, paths: Sequence[str], load: Callable[[], None]) -> None:
        self.paths, self._load, self.problem = tuple(paths), load, ""
        # Stamps are taken before the files are read, so that a change during the read is noticed.
        self._stamps = self._read_stamps()
        load()

    def refresh(self) -> bool:
        """Load the files if one has changed. Return whether the content in use or `problem` changed.

        While they are invalid, the last valid content stays in use, and each call tries again: a certificate and its
        key are replaced one after the other.
        """
        stamps, before = self._read_stamps(), self.problem
        if stamps == self._stamps:
            self.problem = ""
            return bool(before)
        try:
            self._load()
        except SettingInvalid as error:
            self.problem = error.message
            return self.problem != before
        self._stamps, self.problem = stamps, ""
        return True

    def _read_stamps(self) -> list[Stamp | None]:
        return [_stamp(path) for path in self.paths]


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
