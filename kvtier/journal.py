"""A journal of blocks that workers write while the engine's loop reads it."""

import threading

from typing_extensions import override

from tandem.wire.prefix_journal import PrefixChanges, PrefixJournal


class SharedJournal(PrefixJournal):
    """Any thread may call it."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    @override
    def add(self, name: int) -> None:
        with self._lock:
            super().add(name)

    @override
    def remove(self, name: int) -> None:
        with self._lock:
            super().remove(name)

    @override
    def since(self, position: int) -> PrefixChanges | None:
        with self._lock:
            return super().since(position)
