"""The picture of `tandem top`, as text."""

import io

import pytest
from rich.console import Console

from tandem.asking import plain
from tandem.top.picture import number, page_bar, picture, seconds
from tests.browser import scenes


def drawn(overview, width=120, num_lines=None, problem="") -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture(overview, width, num_lines, problem))
    return console.file.getvalue().splitlines()


def line_with(lines, word) -> str:
    [line] = [line for line in lines if word in line]
    return line


def test_headline_nodes_and_pairs_are_drawn():
    overview = scenes.cluster(2, 3)
    lines = drawn(overview)
    text = " ".join("\n".join(lines).split())
    facts = ("requests/s 7.3", "in flight 42", "tokens/s 1,932 (+5,210 of prompts)", "replays 2")
    for fact in (*facts, "prefill decode requests prompt tokens"):
        assert fact in text
    assert "prefill" in line_with(lines, "10.0.0.2:7000  up")


def test_a_tier_that_is_not_up_is_named_beside_its_node():
    lines = drawn(scenes.tiered(2, 1), width=100)
    assert "up, redis backing off" in line_with(lines, "10.0.0.1:7000  up")
    assert "redis" not in line_with(lines, "10.0.0.2:7000  up")


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    overview = scenes.tiered(3, 3)
    assert max(map(len, drawn(overview, width=width))) <= width


@pytest.mark.parametrize("num_lines", [24, 40, 60])
def test_a_large_cluster_fits_the_terminal_and_what_is_left_out_is_counted(num_lines):
    overview = scenes.cluster(32, 32)
    lines = drawn(overview, num_lines=num_lines)
    assert len(lines) <= num_lines
    assert " more" in line_with(lines, "nodes, and")


def test_foreign_text_gives_the_terminal_no_orders():
    hostile = "\x1b]0;mine\x07[red]x\x1b[2J\n"
    overview = scenes.overview(
        [scenes.node("decode", 1, id=hostile, zone=hostile, state="down", reason=hostile)],
        model=hostile,
    )
    text = "\n".join(drawn(overview, width=200))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("[red]x") >= 3
    assert plain("a\x1b[2Jb\r\nü") == "a·[2Jb··ü"


def test_every_page_state_has_a_character_and_the_bar_is_as_wide_as_asked():
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


def test_numbers_are_short():
    times = [seconds(value) for value in (None, 0.00012, 0.0123, 0.5, 1.5, 250)]
    assert times == ["-", "0.12 ms", "12.3 ms", "500 ms", "1.50 s", "250.00 s"]
    counts = [number(value) for value in (0, 0.42, 7, 12.4, 1024, 12345, 4.56e6, 2e12)]
    assert counts == ["0", "0.4", "7", "12", "1,024", "12.3k", "4.56M", "2e+03G"]


def test_running_requests_are_listed_with_their_phase_where_there_is_room():
    live = [scenes.running("waits"), scenes.timings("writes", outcome="running")]
    overview = scenes.cluster(1, 1, live=live)
    lines = drawn(overview)
    assert "to the first token" in line_with(lines, "waits")
    assert "answering" in line_with(lines, "writes")
    assert "10.0.1.1:7001" in line_with(lines, "writes")
    assert len(drawn(scenes.cluster(9, 9, live=live * 40), num_lines=24)) <= 24
