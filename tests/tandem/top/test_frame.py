"""The picture of `tandem top`, as text."""

import io

import pytest
from rich.console import Console

from tandem.top import tables
from tandem.top.frame import Look, frame
from tandem.top.tables import page_bar, phase_bar
from tandem.top.words import bytes_rate, number, plain, rate, seconds
from tests.browser import scenes


def drawn(overview, width=120, num_lines=None, **fields) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    look = Look(width, num_lines, slo_ttft_s=1.0, slo_itl_s=0.1, url="http://r:1", **fields)
    console.print(frame(overview, look))
    return console.file.getvalue().splitlines()


def line_with(lines, word) -> str:
    [line] = [line for line in lines if word in line]
    return line


def test_headline_nodes_pairs_and_requests_are_drawn():
    overview = scenes.cluster(2, 3, recent=[scenes.timings()])
    lines = drawn(overview)
    text = "\n".join(lines)
    for fact in ("requests/s 7.3", "in flight 42", "tokens/s 1,932", "goodput 100 %", "replays 2"):
        assert fact in text
    assert "prefill" in line_with(lines, "10.0.0.2:7000  up")
    assert "prefill 110 ms" in line_with(lines, "r-1 ")
    assert " →  10.0.1." in text


def test_tiers_are_drawn_where_there_is_room_and_what_ails_them_everywhere():
    overview = scenes.tiered(2, 1)
    wide, narrow = drawn(overview, width=160), drawn(overview, width=100)
    assert "tiers: full, hits" in line_with(wide, "role ")
    assert "host 50 %, 12 %   redis backing off" in line_with(wide, "10.0.0.1:7000  up")
    assert "host 50 %, 12 %   redis 4 %" in line_with(wide, "10.0.0.2:7000  up")
    assert "10.0.0.1:7000  up, redis!" in line_with(narrow, "10.0.0.1:7000  up")
    assert not any("tiers" in line for line in [*narrow, *drawn(scenes.cluster(2, 1), width=160)])


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    overview = scenes.tiered(3, 3, recent=[scenes.timings("r" * 100)])
    assert max(map(len, drawn(overview, width=width))) <= width


@pytest.mark.parametrize("width", range(80, 161, 4))
def test_every_column_has_a_head(width):
    lists = (
        tables.nodes(scenes.tiered(2, 2).nodes, width),
        tables.requests([scenes.timings()], width),
    )
    for table in lists:
        assert all(column.header for column in table.columns)


@pytest.mark.parametrize("num_lines", [24, 40, 60])
def test_a_large_cluster_fits_the_terminal_and_says_what_is_left_out(num_lines):
    overview = scenes.cluster(32, 32, recent=[scenes.timings(f"r-{n}") for n in range(50)])
    lines = drawn(overview, num_lines=num_lines)
    assert len(lines) <= num_lines
    assert " more" in line_with(lines, "nodes  and")
    assert any("r-49" in line for line in lines)


def test_a_router_that_is_away_is_said_above_what_was_seen_last():
    lines = drawn(scenes.cluster(1, 1), problem="http://r:1 cannot be reached")
    assert lines[0] == "http://r:1 cannot be reached"
    assert any("10.0.1.1:7001" in line for line in lines)
    assert drawn(None) == ["asking http://r:1 …"]
    assert drawn(None, problem="away") == ["away"]


def test_foreign_text_gives_the_terminal_no_orders():
    hostile = "\x1b]0;mine\x07[red]x\x1b[2J\n"
    overview = scenes.overview(
        [scenes.node("decode", 1, id=hostile, zone=hostile, state="down", reason=hostile)],
        recent=[scenes.timings(hostile)],
        model=hostile,
    )
    text = "\n".join(drawn(overview, width=200))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x" in text
    assert plain("a\x1b[2Jb\r\nü") == "a·[2Jb··ü"


def test_every_page_state_is_seen_and_the_bar_is_as_wide_as_asked():
    made = scenes.node("decode", 1)
    load = type(made.load)(
        num_pages=1000,
        pages_held=500,
        pages_granted=1,
        pages_quarantined=1,
        pages_cached=200,
        pages_free=298,
    )
    bar = page_bar(scenes.node("decode", 1, load=load), 20)
    assert bar.plain == "█" * 10 + "▓!" + "▒" * 4 + "░" * 4
    assert page_bar(scenes.node("decode", 1, state="down"), 5).plain == "·····"


def test_phases_up_to_the_first_token_fill_their_share_of_the_longest():
    assert phase_bar(scenes.timings(), longest_s=0.4, width=40).plain == "qqqrwwwwPPPPPPPPPPPl"


def test_numbers_are_short():
    assert [seconds(value) for value in (None, 0.00012, 0.0123, 0.5, 1.5, 250)] == [
        "-",
        "120 µs",
        "12.3 ms",
        "500 ms",
        "1.50 s",
        "250 s",
    ]
    assert [number(value) for value in (7, 1024, 12345, 4.56e6)] == ["7", "1,024", "12.3k", "4.56M"]
    assert [rate(value) for value in (0.01, 0.42, 12.4)] == ["0", "0.4", "12"]
    assert [bytes_rate(value) for value in (12, 1.5e6, 2e12)] == ["12 B/s", "1.5 MB/s", "2 TB/s"]
