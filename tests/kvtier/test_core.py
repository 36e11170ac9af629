"""Whatever order answers, failures and lateness come in: each ask is told of once, and all memory goes back."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.kvtier.calls import Get, Has, Put, Read, Write
from tandem.kvtier.core import Lent, StackCore
from tandem.kvtier.events import Fetched, Placed, Saved
from tandem.kvtier.fetches import FetchState
from tests.kvtier.fakes import keys

MIB = 1 << 20
LIMIT_PAGES = 24
ALL_KEYS = keys(40)
ACTIONS = (
    "fetch",
    "save",
    "begin",
    "begin",
    "begin",
    "answer",
    "answer",
    "answer",
    "fail",
    "wait",
    "place",
    "abandon",
)


class Loan:
    """Pages that must not be given back while they are read, and not twice."""

    def __init__(self, num_pages):
        self.pages = [memoryview(b"")] * num_pages
        self.num_closed = 0

    def close(self):
        self.num_closed += 1


class World:
    """A core, and workers that do what is drawn."""

    def __init__(self):
        self.core = StackCore(
            [("host", True), ("disk", False), ("store", False)],
            MIB,
            timeout_s=1.0,
            max_staged_bytes=2 * LIMIT_PAGES * MIB,
        )
        self.now_s, self.number = 0.0, 0
        self.queued, self.begun, self.loans = [], [], []
        self.fetched, self.placed, self.saved = Counter(), Counter(), Counter()
        self.abandoned, self.asked_to_save, self.asked_to_place = set(), set(), set()
        self.asked_to_fetch = {}

    def do(self, action, choice):
        getattr(self, action)(choice)
        self.look()

    def look(self):
        out = self.core.outbox
        self.queued += out.calls
        out.calls.clear()
        for loan in out.loans:
            loan.close()
        out.loans.clear()
        while out.events:
            match out.events.popleft():
                case Fetched(number=number, num_pages=num, by_tier=by_tier):
                    assert sum(by_tier.values()) == num
                    self.fetched[number] += 1
                case Placed(number=number):
                    self.placed[number] += 1
                case Saved(number=number):
                    self.saved[number] += 1
        for budget in (self.core.fetch_budget, self.core.save_budget):
            assert 0 <= budget.num_used <= LIMIT_PAGES
        assert all(loan.num_closed <= 1 for loan in self.loans)
        for call in self.begun:
            assert not isinstance(call, Put) or not call.run._loan.num_closed
        for fetch in self.core.fetches._all.values():
            assert not any(run._loan.num_closed for _, run in fetch.runs)

    def fetch(self, choice):
        self.number += 1
        self.asked_to_fetch[self.number] = self.now_s
        self.core.fetches.fetch(self.number, ALL_KEYS[: choice % 41], self.now_s)

    def save(self, choice):
        self.number += 1
        num = choice % (LIMIT_PAGES + 1)
        if self.core.puts.save(self.number, ALL_KEYS[:num], range(num), self.now_s):
            self.asked_to_save.add(self.number)

    def begin(self, choice):
        if self.queued:
            call = self.queued.pop(choice % len(self.queued))
            if self.core.begin(call, self.now_s):
                self.begun.append(call)

    def answer(self, choice):
        if self.begun:
            call = self.begun.pop(choice % len(self.begun))
            self.core.answered(call, self.answer_to(call, choice // 7), self.now_s)

    def answer_to(self, call, choice):
        match call:
            case Write():
                return None
            case Has() | Put():
                return choice % (len(call.keys) + 1)
            case Get() | Read():
                num = len(call.keys)
                # Mostly all of it.
                if isinstance(call, Get) and choice % 3 == 0:
                    num = choice // 3 % (num + 1)
                loan = Loan(num)
                self.loans.append(loan)
                return Lent(loan, loan.pages)

    def fail(self, choice):
        if self.begun:
            self.core.failed(self.begun.pop(choice % len(self.begun)), "drawn", self.now_s)

    def wait(self, choice):
        self.now_s += (0.1, 0.6, 3.0, 40.0)[choice % 4]
        self.core.expire(self.now_s)
        late = [n for n, at in self.asked_to_fetch.items() if self.now_s >= at + 1.0]
        states = self.core.fetches.numbers
        assert all(states.get(n) is not FetchState.LOOKING for n in late)

    def place(self, choice):
        if ready := self.in_state(FetchState.FETCHED):
            number = ready[choice % len(ready)]
            num = choice % (self.core.fetches._all[number].num_pages + 1)
            self.asked_to_place.add(number)
            self.core.fetches.place(number, range(num))

    def abandon(self, choice):
        if known := self.in_state(FetchState.FETCHED, FetchState.LOOKING):
            number = known[choice % len(known)]
            self.abandoned.add(number)
            self.core.fetches.abandon(number)

    def in_state(self, *states):
        return [n for n, state in self.core.fetches.numbers.items() if state in states]

    def finish(self, random):
        """Let everything come to its end."""
        for _ in range(2):
            self.answer_all(random)
            self.do("wait", 3)
        while self.in_state(FetchState.FETCHED):
            self.do("place", random.randrange(10_000))
        self.answer_all(random)

    def answer_all(self, random):
        while self.begun or self.queued:
            self.do("begin", random.randrange(10_000))
            self.do("answer", random.randrange(10_000))

    def check_that_all_is_over(self):
        assert not self.core.fetches.numbers
        assert not self.core.puts.numbers
        assert self.core.fetch_budget.num_used == self.core.save_budget.num_used == 0
        assert all(loan.num_closed == 1 for loan in self.loans)
        assert not any(link.num_put_pages for link in self.core.links)


# A list of hypothesis' own is too short to come far: of a seed, a long run is drawn, and shrunk in its length.
SEEDS, LENGTHS = st.integers(0, 2**32), st.integers(0, 300)


def drawn_world(random, length):
    world = World()
    for _ in range(length):
        world.do(random.choice(ACTIONS), random.randrange(10_000))
    return world


@settings(max_examples=150, deadline=None)
@given(SEEDS, LENGTHS)
def test_each_ask_is_told_of_once_and_all_memory_goes_back(seed, length):
    random = Random(seed)
    world = drawn_world(random, length)
    world.finish(random)
    world.check_that_all_is_over()
    told = set(world.asked_to_fetch) - world.abandoned
    assert told <= set(world.fetched)
    assert set(world.fetched.values()) <= {1}
    assert world.placed == Counter(world.asked_to_place)
    assert world.saved == Counter(world.asked_to_save)


@settings(max_examples=50, deadline=None)
@given(SEEDS, LENGTHS)
def test_close_at_any_time_gives_all_memory_back_and_tells_nothing_more(seed, length):
    random = Random(seed)
    world = drawn_world(random, length)
    before = (world.fetched.copy(), world.placed.copy(), world.saved.copy())
    world.core.close()
    world.queued.clear()  # workers begin nothing more
    world.look()
    while world.begun:
        world.do("answer", random.randrange(10_000))
    assert not world.core.fetches.numbers
    assert all(loan.num_closed == 1 for loan in world.loans)
    assert (world.fetched, world.placed, world.saved) == before


def test_fetches_for_whose_pages_there_is_no_memory_wait_in_line():
    world = World()
    core = world.core
    for link in (core.links[0], core.links[2]):
        link.reads.failed(0.0)
    core.fetches.fetch(1, ALL_KEYS[:20], 0.0)
    core.fetches.fetch(2, ALL_KEYS[:10], 0.0)
    world.look()
    for call in world.queued:
        core.begin(call, 0.0)
        core.answered(call, len(call.keys), 0.0)
    world.queued.clear()
    world.look()
    assert {call.owner for call in world.queued} == {1}
    core.fetches.abandon(1)
    world.look()
    assert {call.owner for call in world.queued[1:]} == {2}


def test_a_number_used_again_is_told_nothing_of_the_abandoned_one():
    world = World()
    core = world.core
    for link in (core.links[0], core.links[2]):
        link.reads.failed(0.0)
    for number in (1, 2):
        core.fetches.fetch(number, ALL_KEYS[:20], 0.0)
    world.look()
    for call in world.queued:
        core.begin(call, 0.0)
        core.answered(call, len(call.keys), 0.0)
    core.fetches.abandon(2)
    core.fetches.fetch(2, ALL_KEYS[:20], 0.0)
    core.fetches.abandon(1)
    core.expire(0.0)
    assert not core.outbox.events


def test_a_tier_that_hangs_in_a_put_holds_no_more_than_that():
    world = World()
    core, disk = world.core, world.core.links[1]

    def save_and_answer(number, now_s):
        assert core.puts.save(number, ALL_KEYS[:12], range(12), now_s)
        world.look()
        while world.queued:
            call = world.queued.pop(0)
            if isinstance(call, Put) and call.rank == disk.rank and disk._under_way:
                continue  # its one worker for puts is busy
            if not core.begin(call, now_s) or (isinstance(call, Put) and call.rank == disk.rank):
                continue
            core.answered(call, world.answer_to(call, 1), now_s)
            world.look()

    for number in range(1, 10):
        save_and_answer(number, 60.0 * number)
        core.expire(60.0 * number + 6.0)
        world.look()
    assert disk.num_put_pages == 12
    assert disk.state == "full"


def test_puts_behind_reads_that_hang_are_dropped():
    world = World()
    core, disk = world.core, world.core.links[1]
    core.links[0].reads.failed(0.0)
    core.fetches.fetch(1, ALL_KEYS[:2], 0.0)
    core.puts.save(2, ALL_KEYS[:12], range(12), 0.0)
    world.look()
    for call in [call for call in world.queued if isinstance(call, Has | Read)]:
        core.begin(call, 0.0)
        if isinstance(call, Read):
            core.answered(call, world.answer_to(call, 1), 0.0)
    assert disk.num_put_pages == 12
    core.expire(1.0)
    assert disk.num_put_pages == 0


def test_more_pages_than_memory_is_there_for_are_fetched_as_far_as_it_goes():
    world = World()
    for link in (world.core.links[0], world.core.links[2]):
        link.reads.failed(0.0)
    world.fetch(40)
    while not world.fetched:
        world.look()
        call = world.queued.pop(0)
        if not isinstance(call, Put):
            world.core.begin(call, 0.0)
            world.core.answered(
                call, 40 if isinstance(call, Has) else world.answer_to(call, 1), 0.0
            )
            world.look()
    assert world.core.fetches._all[1].num_pages == LIMIT_PAGES


def test_a_piece_takes_a_part_of_the_time_limit_once_the_speed_is_known():
    [link] = StackCore([("disk", False)], MIB, timeout_s=1.6, max_staged_bytes=0).links
    assert link.call_pages() == 2
    link.meter.got(10, 0.5)  # 20 a second
    assert link.call_pages() == 2
    for _ in range(40):
        link.meter.got(10, 0.01)
    assert link.call_pages() == 16
    for _ in range(40):
        link.meter.got(10, 100.0)
    assert link.call_pages() == 1
