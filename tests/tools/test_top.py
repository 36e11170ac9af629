"""`tandem top`: its screen as text, and the command before a router's own `/overview`."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tandem.tools.top import number, page_bar, picture, seconds
from tests.browser import scenes
from tests.browser.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 600  # a guard against a hang
NUM_TRIES = 5


def top(*argv: str) -> subprocess.CompletedProcess:
    """Run it; repeat it if the machine paused for longer than the answer's timeout."""
    command = [sys.executable, "-P", "-m", "tandem", "top", *argv]
    for _ in range(NUM_TRIES):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if "does not answer within" not in done.stderr:
            break
    return done


def test_once_prints_the_screen_and_a_wrong_key_ends_it():
    with Stage(scenes.cluster(1, 2), api_keys=("k",)).open() as stage:
        shown = top(stage.url, "--once", "--api-key", "k")
        assert shown.returncode == 0, shown.stderr
        assert "10.0.1.2:7001" in shown.stdout
        refused = top(stage.url, "--api-key", "wrong")
        assert refused.returncode == 1
        assert "refuses the API key" in refused.stderr
        assert "pass a valid key with --api-key" in refused.stderr


def test_an_absent_router_is_an_error_with_once_and_polled_otherwise():
    stage = Stage(scenes.cluster(1, 1))
    away = top(stage.url, "--once")
    assert away.returncode == 1
    assert (
        "cannot be reached (Connection refused): check the URL and whether the router is up"
        in away.stderr
    )
    command = [sys.executable, "-u", "-P", "-m", "tandem", "top", stage.url]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "COLUMNS": "200"},
    ) as process:  # fmt: skip
        try:
            assert any("cannot be reached" in line for line in iter(process.stdout.readline, ""))
            with stage.open():
                assert any("10.0.1.1:7001" in line for line in iter(process.stdout.readline, ""))
            assert any("cannot be reached" in line for line in iter(process.stdout.readline, ""))
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=TIMEOUT_S)[0]
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in rest


def drawn(overview, width=120, num_lines=None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(picture(overview, width, num_lines))
    return console.file.getvalue().splitlines()


def line_with(lines, word) -> str:
    [line] = [line for line in lines if word in line]
    return line


def test_headline_nodes_and_tiers_are_drawn():
    lines = drawn(scenes.cluster(2, 3))
    text = " ".join("\n".join(lines).split())
    for fact in ("requests/s 7.3", "in flight 42", "1,932 (+5,210 of prompts)", "replays 2"):
        assert fact in text
    assert "prefill" in line_with(lines, "10.0.0.2:7000  up")
    tiered = drawn(scenes.tiered(2, 1), width=100)
    assert "up, redis backing off" in line_with(tiered, "10.0.0.1:7000  up")


@pytest.mark.parametrize(("width", "num_lines"), [(80, 24), (80, 40), (200, 60)])
def test_a_large_cluster_fits_the_terminal(width, num_lines):
    assert max(map(len, drawn(scenes.tiered(3, 3), width=40))) <= 40
    lines = drawn(scenes.cluster(32, 32), width=width, num_lines=num_lines)
    assert len(lines) <= num_lines
    assert " more" in line_with(lines, "nodes, and")


@pytest.mark.parametrize("width", [60, 80])
def test_narrow_terminal_shortens_states_and_cuts_no_number(width):
    down = scenes.node(
        "decode", 9, state="down", reason="a reason that fills more than one line " * 3
    )
    overview = scenes.tiered(2, 2)
    lines = drawn(scenes.overview([*overview.nodes, down]), width=width)
    assert max(map(len, lines)) <= width
    header = next(number for number, line in enumerate(lines) if line.startswith("role"))
    names = lines[header].split()
    assert [name for name in names if name != "pages"] == [
        *("role", "node", "state", "run", "wait", "tok/s", "KV")
    ]
    rows = lines[header + 1 : header + 6]
    assert [row.split()[0] for row in rows] == ["prefill"] * 2 + ["decode"] * 3
    assert all(row.rstrip().endswith("B/s") for row in rows)
    assert all(node.id in row for node, row in zip(overview.nodes, rows, strict=False))


def test_remote_text_cannot_control_the_terminal():
    hostile = "\x1b]0;mine\x07[red]x\x1b[2J\n"
    overview = scenes.overview(
        [scenes.node("decode", 1, id=hostile, zone=hostile, state="down", reason=hostile)],
        model=hostile,
    )
    text = "\n".join(drawn(overview, width=200))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert text.count("[red]x") >= 3


def test_every_page_state_has_a_character_and_the_bar_the_requested_width():
    counts = {"held": 500, "granted": 1, "quarantined": 1, "cached": 200, "free": 298}
    node = scenes.node("decode", 1)
    pages = {f"pages_{state}": count for state, count in counts.items()}
    load = type(node.load)(num_pages=1000, **pages)
    bar = page_bar(scenes.node("decode", 1, load=load), 20)
    assert bar.plain == "█" * 10 + "▓!" + "▒" * 4 + "░" * 4
    assert page_bar(scenes.node("decode", 1, state="down"), 5).plain == "·····"


def test_numbers_are_short():
    times = [seconds(value) for value in (None, 0.00012, 0.0123, 1.5, 250)]
    assert times == ["-", "0.12 ms", "12.3 ms", "1.50 s", "250.00 s"]
    counts = [number(value) for value in (0, 0.42, 7, 1024, 12345, 4.56e6, 2e12)]
    assert counts == ["0", "0.4", "7", "1,024", "12.3k", "4.56M", "2e+03G"]
