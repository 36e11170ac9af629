"""What is so for a node is so on all of its ranks, in whatever order they answer."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tandem.kvtier.events import Fetched, Placed, Saved
from tandem.node.tier_agreement import TierAgreement


def found(number, num_pages, tier="host"):
    return Fetched(number, num_pages, {tier: num_pages} if num_pages else {})


def test_a_fetch_has_what_every_rank_found_and_says_where_the_least_came_from():
    agreement = TierAgreement(3)
    agreement.fetch(1)
    assert agreement.heard(0, found(1, 5)) is None
    assert agreement.heard(2, found(1, 3, "disk")) is None
    assert agreement.heard(1, found(1, 4)) == found(1, 3, "disk")


def test_the_first_rank_that_found_nothing_ends_a_fetch_for_all():
    agreement = TierAgreement(3)
    agreement.fetch(1)
    assert agreement.heard(2, found(1, 0)) == found(1, 0)
    assert agreement.heard(0, found(1, 5)) is None
    agreement.abandon(1)
    assert agreement.heard(1, found(1, 5)) is None
    assert agreement.fetches == set()


def test_pages_are_whole_only_where_they_are_on_every_rank():
    agreement = TierAgreement(2)
    for number, is_whole in ((1, True), (2, False)):
        agreement.fetch(number)
        for rank in range(2):
            agreement.heard(rank, found(number, 3))
        agreement.place(number, 2)
        # Not at once, although it is known: the other rank writes still.
        assert agreement.heard(1, Placed(number, is_whole)) is None
        assert agreement.heard(0, Placed(number, is_whole=True)) == Placed(number, is_whole)


def test_a_save_ends_when_no_rank_reads_its_pages_any_more():
    agreement = TierAgreement(2)
    agreement.save(1)
    assert agreement.heard(0, Saved(1)) is None
    assert agreement.heard(0, Saved(1)) is None
    assert agreement.heard(1, Saved(1)) == Saved(1)
    assert agreement.saves == set()


def test_no_more_is_placed_than_all_have():
    agreement = TierAgreement(2)
    agreement.fetch(1)
    agreement.heard(0, found(1, 5))
    with pytest.raises(AssertionError, match="fewer pages"):
        agreement.place(1, 5)
    agreement.heard(1, found(1, 4))
    with pytest.raises(AssertionError, match="fewer pages"):
        agreement.place(1, 5)
    agreement.place(1, 4)
    with pytest.raises(AssertionError, match="is being placed"):
        agreement.abandon(1)


class Rank:
    """A stack as rank 0 knows it: told and heard with delay, each in order."""

    def __init__(self):
        self.told, self.said = deque(), deque()
        self.looking, self.held, self.writing, self.reading = set(), {}, set(), set()

    def do(self):
        kind, number = self.told.popleft()
        if kind == "fetch":
            self.looking.add(number)
        elif kind == "abandon":
            assert number in self.looking or number in self.held
            self.looking.discard(number)
            self.held.pop(number, None)
        elif kind == "place":
            assert number in self.held
            self.writing.add(number)
        else:
            self.reading.add(number)

    def answer(self, number, num_pages, is_whole):
        """End what it is at with a number, if anything."""
        if number in self.looking:
            self.looking.remove(number)
            self.held[number] = num_pages
            self.said.append(found(number, num_pages))
        elif number in self.writing:
            self.writing.remove(number)
            del self.held[number]
            self.said.append(Placed(number, is_whole))
        elif number in self.reading:
            self.reading.remove(number)
            self.said.append(Saved(number))

    @property
    def at(self):
        return sorted(self.looking | self.writing | self.reading)


class AnyOrder(RuleBasedStateMachine):
    """Three ranks do what they are told when they like; rank 0 gives up fetches when it likes."""

    def __init__(self):
        super().__init__()
        self.agreement, self.ranks = TierAgreement(3), [Rank() for _ in range(3)]
        self.last = 0
        # What each rank found of each fetch that is asked for.
        self.wanted: set[int] = set()
        self.placing: dict[int, list[bool]] = {}
        self.saving: set[int] = set()

    @rule()
    def fetch(self):
        self.last += 1
        self.wanted.add(self.last)
        self.agreement.fetch(self.last)
        self._tell("fetch", self.last)

    @rule()
    def save(self):
        self.last += 1
        self.saving.add(self.last)
        self.agreement.save(self.last)
        self._tell("save", self.last)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def give_up(self, data):
        self._abandon(data.draw(st.sampled_from(sorted(self.wanted))))

    @rule(data=st.data(), num_pages=st.integers(0, 4), is_whole=st.booleans())
    def ranks_work(self, data, num_pages, is_whole):
        rank = data.draw(st.sampled_from(self.ranks))
        if rank.told and data.draw(st.booleans()):
            rank.do()
        elif rank.at:
            number = data.draw(st.sampled_from(rank.at))
            if number in rank.writing:
                self.placing[number].append(is_whole)
            rank.answer(number, num_pages, is_whole)

    @rule(index=st.integers(0, 2), is_placed=st.booleans())
    def hear(self, index, is_placed):
        if self.ranks[index].said:
            self._hear(index, is_placed=is_placed)

    def teardown(self):
        for number in sorted(self.wanted):
            if number % 2:
                self._abandon(number)
        while any(rank.told or rank.said or rank.at for rank in self.ranks):
            for index, rank in enumerate(self.ranks):
                while rank.told:
                    rank.do()
                for number in rank.at:
                    if number in rank.writing:
                        self.placing[number].append(True)
                    rank.answer(number, 2, is_whole=True)
                while rank.said:
                    self._hear(index, is_placed=True)
        assert not self.wanted | self.saving | self.placing.keys()
        assert not self.agreement.fetches | self.agreement.saves
        for rank in self.ranks:
            assert not rank.held

    def _hear(self, index, *, is_placed):
        event = self.agreement.heard(index, self.ranks[index].said.popleft())
        match event:
            case Fetched():
                self.wanted.remove(event.number)
                have = [rank.held.get(event.number) for rank in self.ranks]
                assert event.num_pages == min(each for each in have if each is not None)
                assert sum(event.by_tier.values()) == event.num_pages
                if not event.num_pages or not is_placed:
                    self._abandon(event.number)
                    return
                assert None not in have
                self.placing[event.number] = []
                self.agreement.place(event.number, event.num_pages)
                self._tell("place", event.number)
            case Placed():
                answers = self.placing.pop(event.number)
                assert len(answers) == 3
                assert event.is_whole == all(answers)
            case Saved():
                self.saving.remove(event.number)
                for rank in self.ranks:
                    assert event.number not in rank.reading
                    assert ("save", event.number) not in rank.told
            case None:
                pass

    def _abandon(self, number):
        self.wanted.discard(number)
        self.agreement.abandon(number)
        self._tell("abandon", number)

    def _tell(self, kind, number):
        for rank in self.ranks:
            rank.told.append((kind, number))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
