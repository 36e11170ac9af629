"""Which pair the running requests of one group share: pure, no I/O.

```
 first enter ──▶ no pair ──move──▶ a pair ──▶ ... ──▶ last leave: forgotten
                                    │  ▲
                                    └──┘ move, when the pair fails or goes away
```
"""

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import override

from tandem.router.policy import Pair


class Group:
    """Requests of one prompt.

    Attributes:
        pair: Where the next of them goes; None until it was chosen.
        num_running: Its requests that have not ended.
    """

    def __init__(self) -> None:
        self.pair: Pair | None = None
        self.num_running = 0

    @override
    def __repr__(self) -> str:
        return f"<Group {self.pair} num_running={self.num_running}>"


class Groups:
    """The groups that have a request running; each is forgotten with its last one."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    @override
    def __repr__(self) -> str:
        return f"<Groups {len(self._groups)} running>"

    def __len__(self) -> int:
        return len(self._groups)

    @contextmanager
    def entered(self, name: str) -> Iterator[Group]:
        """Count a request as running inside the block and yield its group.

        Args:
            name: Empty for a request that shares with nobody.
        """
        if not name:
            yield Group()
            return
        group = self._groups.setdefault(name, Group())
        group.num_running += 1
        try:
            yield group
        finally:
            group.num_running -= 1
            if not group.num_running:
                del self._groups[name]
