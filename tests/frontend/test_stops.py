import itertools

from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.stops import StopStrings

SMALL = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


def reference(text: str, stops: list[str], keep: bool) -> tuple[str, str | None]:
    """The stop that is complete first; of two that end together, the longer."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place for place in places if place < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(SMALL, STOPS, st.booleans(), st.lists(st.integers(0, 30)))
def test_the_result_does_not_depend_on_how_the_text_was_cut(text, stops, keep, places):
    watch = StopStrings(stops, keep)
    shown = "".join([watch.push(piece) for piece in cut(text, places)]) + watch.finish()
    assert (shown, watch.matched) == reference(text, stops, keep)


@given(SMALL, STOPS)
def test_only_what_may_become_a_stop_is_held_back(text, stops):
    watch = StopStrings(stops)
    shown = watch.push(text)
    held = text[len(shown) :]
    if watch.matched is None:
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_across_pieces_is_never_shown_in_part():
    watch = StopStrings(["\nUser:"])
    assert [watch.push(piece) for piece in ("Hi", "\n", "Use", "r: more")] == ["Hi", "", "", ""]
    assert watch.matched == "\nUser:"


def test_a_false_beginning_is_shown_once_it_is_known():
    watch = StopStrings(["###"])
    assert [watch.push(piece) for piece in ("a#", "#", "b")] == ["a", "", "##b"]


def test_nothing_comes_after_the_match():
    watch = StopStrings(["x"], keep_match=True)
    assert [watch.push("axb"), watch.push("more"), watch.finish()] == ["ax", "", ""]
