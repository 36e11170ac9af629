"""Made-up models that more nodes never make worse, and searches that know nothing of them."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.plan.search import Search, Size, Space


@dataclass(frozen=True)
class Answer:
    misses_ttft: bool
    misses_itl: bool

    @property
    def is_met(self):
        return not (self.misses_ttft or self.misses_itl)


@dataclass
class Staircase:
    """Meets the goals from any of some corners on; counts how often it was asked."""

    corners: list[Size]
    asked: list[Size]

    def __call__(self, size):
        assert size not in self.asked, "the same fleet twice"
        self.asked.append(size)
        if any(size.covers(corner) for corner in self.corners):
            return Answer(False, False)
        # As in life, where what is short shows, but not always as what it is.
        late = all(size.num_prefill < corner.num_prefill for corner in self.corners)
        slow = all(size.num_decode < corner.num_decode for corner in self.corners)
        return Answer(late or not slow, slow)


sizes = st.builds(Size, st.integers(1, 60), st.integers(1, 60))
costs = st.sampled_from([0.5, 1.0, 2.0, 3.7, 8.0])


@given(
    corners=st.lists(sizes, max_size=6),
    least=st.builds(Size, st.integers(1, 6), st.integers(1, 6)),
    most_nodes=st.integers(2, 80),
    prefill_cost=costs,
    decode_cost=costs,
)
@settings(max_examples=150, deadline=None)
def test_the_cheapest_fleet_is_found_and_was_tried(
    corners, least, most_nodes, prefill_cost, decode_cost
):
    space = Space(
        least=least, most_nodes=most_nodes, prefill_cost=prefill_cost, decode_cost=decode_cost
    )
    model = Staircase(corners, [])
    search = Search(space, model, most_tries=100_000)
    search.run()
    met = [
        Size(p, d)
        for p in range(least.num_prefill, most_nodes)
        for d in range(least.num_decode, most_nodes - p + 1)
        if any(Size(p, d).covers(corner) for corner in corners)
    ]
    assert search.is_complete
    assert set(model.asked) == set(search.tried)
    if not met:
        assert search.best is None
    else:
        assert search.tried[search.best].is_met
        assert search.best.total <= most_nodes
        assert space.cost(search.best) == min(map(space.cost, met))


@given(
    answers=st.dictionaries(sizes, st.tuples(st.booleans(), st.booleans())),
    most_tries=st.integers(1, 40),
)
@settings(deadline=None)
def test_whatever_fleets_do_the_best_is_one_that_was_tried_and_met_the_goals(answers, most_tries):
    asked = {}

    def attempt(size):
        asked[size] = Answer(*answers.get(size, (True, False)))
        return asked[size]

    search = Search(Space(least=Size(1, 1), most_nodes=60), attempt, most_tries=most_tries)
    search.run()
    met = [size for size, answer in asked.items() if answer.is_met and size.total <= 60]
    assert len(asked) <= most_tries
    assert (search.best is None) == (not met)
    if met:
        assert search.best.total == min(size.total for size in met)


def test_a_large_fleet_is_found_by_few_tries():
    model = Staircase([Size(200, 130), Size(180, 170)], [])
    search = Search(Space(least=Size(150, 100), most_nodes=512), model)
    search.run()
    assert search.best == Size(200, 130)
    assert len(model.asked) < 60


def test_a_tolerance_saves_tries_and_costs_no_more_than_it_says():
    exact, rough = Staircase([Size(203, 131)], []), Staircase([Size(203, 131)], [])
    space = {"least": Size(150, 100), "most_nodes": 512}
    Search(Space(**space), exact).run()
    search = Search(Space(**space, tolerance=0.03), rough)
    search.run()
    assert len(rough.asked) < len(exact.asked)
    assert search.best.total <= 334 / 0.97


def test_only_what_costs_less_than_something_known_is_looked_for():
    model = Staircase([Size(4, 5)], [])
    search = Search(Space(least=Size(1, 1), most_nodes=64), model, below=9)
    search.run()
    assert search.best is None
    search = Search(Space(least=Size(1, 1), most_nodes=64), Staircase([Size(4, 5)], []), below=9.5)
    search.run()
    assert search.best == Size(4, 5)
