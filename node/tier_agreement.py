"""When what ranks say of their tiers is so for the node: pure, one answer after another.

```
 fetch ─▶ looking ─ all found some, or one none ─▶ found ──place──▶ placing ─ all placed ─▶ over
             └───────────── abandon ─▶ over ◀────────┘
 save ──▶ saving ─ all saved ─▶ over
```

A page is of use with the heads of every rank only, so the node has found what each of its ranks has, and has placed
what each has placed. Pages are given back when no rank reads or writes them any more. What a rank says of a number
that is over comes late, of a fetch that was abandoned, and is passed over.
"""

from typing_extensions import override

from tandem.kvtier.events import Fetched, Placed, Saved, TierEvent


class TierAgreement:
    """What is asked of the tiers of all ranks and not answered by all of them.

    Args:
        num_ranks: How many answer; they are numbered from 0 on.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # By the number of what was asked: what each rank answered, by rank.
        self._looking: dict[int, dict[int, Fetched]] = {}
        self._placing: dict[int, dict[int, Placed]] = {}
        self._saving: dict[int, set[int]] = {}
        # Pages that every rank found.
        self._found: dict[int, int] = {}

    @override
    def __repr__(self) -> str:
        fetches, saves = len(self.fetches), len(self._saving)
        return f"<TierAgreement {self._num_ranks} ranks, {fetches} fetches, {saves} saves>"

    @property
    def fetches(self) -> set[int]:
        """Numbers of fetches that are not over."""
        return {*self._looking, *self._found, *self._placing}

    @property
    def saves(self) -> set[int]:
        """Numbers of saves that are not over."""
        return set(self._saving)

    def fetch(self, number: int) -> None:
        """Note that every rank was asked to fetch."""
        assert number not in self.fetches, f"fetch {number} is under way"
        self._looking[number] = {}

    def place(self, number: int, num_pages: int) -> None:
        """Note that every rank was asked to place that many pages, which all of them found."""
        assert 0 < num_pages <= self._found.get(number, 0), f"fetch {number} found fewer pages"
        del self._found[number]
        self._placing[number] = {}

    def abandon(self, number: int) -> None:
        """Note that every rank was told to forget a fetch; answers that are on their way find nobody."""
        assert number not in self._placing, f"fetch {number} is being placed"
        self._looking.pop(number, None)
        self._found.pop(number, None)

    def save(self, number: int) -> None:
        """Note that every rank was asked to save."""
        assert number not in self._saving, f"save {number} is under way"
        self._saving[number] = set()

    def heard(self, rank: int, event: TierEvent) -> TierEvent | None:
        """Take what a rank says.

        Returns:
            What is so for the node by that; None: others have to answer first, or nobody asks any more.
        """
        match event:
            case Fetched():
                return self._fetched(rank, event)
            case Placed():
                return self._placed(rank, event)
            case Saved():
                return self._saved(rank, event)

    def _fetched(self, rank: int, event: Fetched) -> Fetched | None:
        answers = self._looking.get(event.number)
        if answers is None:
            return None
        answers[rank] = event
        # The first of the ranks that found the least says where that came from.
        least = min((answers[rank] for rank in sorted(answers)), key=lambda each: each.num_pages)
        # What one has nothing of is of no use, whatever others find.
        if least.num_pages and len(answers) < self._num_ranks:
            return None
        del self._looking[event.number]
        self._found[event.number] = least.num_pages
        return least

    def _placed(self, rank: int, event: Placed) -> Placed | None:
        answers = self._placing.get(event.number)
        if answers is None:
            return None
        answers[rank] = event
        # Also where one has failed: another may still write, and nobody may have its pages until then.
        if len(answers) < self._num_ranks:
            return None
        del self._placing[event.number]
        return Placed(event.number, all(each.is_whole for each in answers.values()))

    def _saved(self, rank: int, event: Saved) -> Saved | None:
        answers = self._saving.get(event.number)
        if answers is None:
            return None
        answers.add(rank)
        if len(answers) < self._num_ranks:
            return None
        del self._saving[event.number]
        return event
