"""How fast counters rise."""

from tandem.router.counters import Counters


def test_a_rate_is_that_of_the_span_and_not_of_all_time():
    counters = Counters(span_s=5)
    for second in range(11):
        counters.note("a", second, [100 if second < 6 else 100 + 10 * (second - 5), second])
    assert counters.per_second("a") == (10.0, 1.0)
    assert counters.grown("a") == (50, 5)


def test_what_was_seen_once_has_grown_by_nothing():
    counters = Counters(span_s=5)
    assert counters.grown("a") == counters.per_second("a") == ()
    counters.note("a", 7, [100])
    assert counters.per_second("a") == (0.0,)


def test_a_counter_that_falls_began_anew():
    counters = Counters(span_s=5)
    counters.note("a", 0, [1000, 7])
    counters.note("a", 1, [3, 8])
    assert counters.grown("a") == (0, 0)
    counters.note("a", 2, [5, 9])
    assert counters.per_second("a") == (2.0, 1.0)


def test_a_row_that_is_not_kept_is_forgotten():
    counters = Counters(span_s=5)
    for key in ("a", "b"):
        counters.note(key, 0, [0])
        counters.note(key, 1, [1])
    counters.keep({"b"})
    assert counters.grown("a") == ()
    assert counters.grown("b") == (1,)
