"""Prompts that may crash nodes. After two attempts at a prompt lost a node, it is not tried on a third pair.

```
 unknown ──a node is lost before decode's first token──▶ suspected ──a second node──▶ refused, for `KEPT_S`
    ▲                                                        │
    └────────────── decode's first token, or `KEPT_S` ───────┘
```

All prompts of a lost node fail, and at most one of them is the cause. So suspected prompts are tried one at a time: a
second loss then identifies the prompt. Most losses are not caused by a prompt, so prompts must not wait long: after
`ALONE_S` the remaining ones are tried together. A prompt that was tried together with others is refused only after its
third loss.
"""

import asyncio
import hashlib
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tandem.wire.errors import RequestEndedEngine
from tandem.wire.generation import GenerateRequest, RequestId

# Longer than clients keep retrying, and short enough that a repaired cluster soon accepts the prompt again.
KEPT_S = 300.0
# Time after a loss in which suspected prompts are tried one at a time.
ALONE_S = 2.0
# Far more than are lost with one node. Beyond it, the oldest is forgotten.
MAX_KEPT = 1024


def name_of(request: GenerateRequest, model: str) -> str:
    """Return a hash of the model and of the fields that determine the computation.

    Ids, deadlines and the seed are left out, because they change when a client retries.
    """
    same = msgspec.structs.replace(
        request,
        request_id=RequestId(""),
        sampling=msgspec.structs.replace(request.sampling, seed=None),
        priority=0,
        group="",
        client="",
        deadline_s=None,
        session="",
    )
    return hashlib.blake2b(msgspec.msgpack.encode([model, same]), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class _Record:
    """A suspected or refused prompt.

    `num_lost`: highest number of losses of a request. `is_alone`: whether no other suspected prompt ran in its last
    try.
    """

    noted_s: float
    num_lost: int = 0
    is_alone: bool = False
    is_refused: bool = False

    def check(self) -> None:
        """Raise `RequestEndedEngine` if the prompt is refused."""
        if self.is_refused:
            raise RequestEndedEngine(
                f"this prompt is refused for {KEPT_S:g} s, because nodes were lost, one after the other, while they "
                "computed it"
            )


class Suspects:
    """The suspected and refused prompts of one edge worker.

    Attributes:
        on_refused: Called with the name of each prompt that this worker begins to refuse.
    """

    def __init__(self) -> None:
        self.on_refused: Callable[[str], None] = lambda _name: None
        self._records: dict[str, _Record] = {}  # oldest first
        self._trying: dict[asyncio.Event, _Record] = {}
        self._alone_until_s = -math.inf
        self._waiting: dict[asyncio.Event, None] = {}

    def __len__(self) -> int:
        """Return how many requests try a suspected prompt, or wait to do so."""
        return len(self._waiting) + len(self._trying)

    def known(self, request: GenerateRequest, model: str) -> tuple[str, int]:
        """Return the name and the losses of a suspected or refused prompt; ("", 0) for all others."""
        self._forget_old()
        # Hashing takes a millisecond per 100,000 tokens, and hardly ever is any prompt suspected.
        name = name_of(request, model) if self._records else ""
        record = self._records.get(name)
        return (name, record.num_lost) if record is not None else ("", 0)

    async def turn(self, name: str, wake: asyncio.Event) -> bool:
        """Return whether a request may try this prompt now. If not, first wait for `wake` or the end of `ALONE_S`.

        Raises:
            RequestEndedEngine: The prompt is refused.
        """
        self._waiting.pop(wake, None)
        record = self._records.get(name)
        if record is None:
            return True
        record.check()
        left_s, others = self._alone_until_s - _now(), self._trying.keys() - {wake}
        if others and left_s > 0:
            wake.clear()
            self._waiting[wake] = None
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await wake.wait()
            return False
        self._trying[wake] = record
        for each in self._trying.values():
            each.is_alone = not others
        return True

    def end(self, wake: asyncio.Event) -> None:
        """Let the next request try its prompt. Safe to call for a request that neither tries nor waits."""
        self._waiting.pop(wake, None)
        if self._trying.pop(wake, None) is not None and not self._trying:
            for waiting in self._waiting:
                waiting.set()

    def clear(self, name: str) -> None:
        """Forget that a prompt was suspected, because decode has computed a token with it."""
        record = self._records.get(name)
        if record is not None and not record.is_refused:
            del self._records[name]

    def note_loss(self, name: str, num_lost: int) -> None:
        """Record that nodes of an attempt were lost with a prompt.

        Args:
            num_lost: How often nodes were lost with this request, what `known` returned included. Requests with equal
                prompts that are lost at once do not add up.

        Raises:
            RequestEndedEngine: It was the second loss, and the prompt was tried alone, or the third. The prompt is
                refused from now on.
        """
        self._forget_old()
        self._alone_until_s = _now() + ALONE_S
        record = self._record(name)
        record.num_lost = max(record.num_lost, num_lost)
        if record.num_lost > (1 if record.is_alone else 2) and not record.is_refused:
            self.refuse(name)
            self.on_refused(name)
        self._records[name].check()

    def refuse(self, name: str) -> None:
        """Refuse a prompt from now on, for `KEPT_S`."""
        self._records.pop(name, None)
        self._record(name).is_refused = True

    def _record(self, name: str) -> _Record:
        if name not in self._records:
            self._records[name] = _Record(_now())
            if len(self._records) > MAX_KEPT:
                del self._records[next(iter(self._records))]
        return self._records[name]

    def _forget_old(self) -> None:
        oldest_s = _now() - KEPT_S
        while self._records and next(iter(self._records.values())).noted_s < oldest_s:
            del self._records[next(iter(self._records))]


def _now() -> float:
    return asyncio.get_running_loop().time()
