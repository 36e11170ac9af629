import os
import pty
import subprocess
import sys

import pytest

import tandem.router.command
from tandem.manual.command import main


def test_without_a_topic_all_are_listed(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "\nmembership             Which nodes a router knows\n" in said
    assert "tandem docs TOPIC" in said


def test_where_no_terminal_reads_it_a_topic_is_the_markdown_as_written(capsys):
    assert main(["membership#dns"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("## DNS\n\n`--discover-dns prefill=prefill.tandem.svc:7000` takes")


def test_an_unknown_topic_suggests_those_that_are_like_it(capsys):
    assert main(["membershp"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no one topic 'membershp'; did you mean\n  tandem docs membership\n" in captured.err


def test_on_a_terminal_a_topic_is_set_and_given_to_the_pager():
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "tandem", "docs", "membership#dns"]
    env = os.environ | {"PAGER": "sed s/^/paged:/", "TERM": "xterm", "COLUMNS": "70"}
    with subprocess.Popen(command, stdout=theirs, stdin=theirs, env=env) as process:
        os.close(theirs)
        said = b""
        while chunk := _read(ours):
            said += chunk
    os.close(ours)
    assert process.returncode == 0
    assert b"paged:" in said
    assert b"DNS" in said
    assert b"\x1b[" in said  # set, with colours
    assert b"## DNS" not in said


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the far end of a terminal is gone
        return b""


def test_a_reader_that_has_seen_enough_ends_it_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem", "docs", "cli"],
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "topic"),
    [
        (["prefill", "--host", "0.0.0.0"], "troubleshooting#no-cluster-key"),
        (["decode", "--model", "/nowhere"], "troubleshooting#no-such-model"),
    ],
)
def test_a_node_that_refuses_to_start_ends_with_where_to_read_on(argv, topic):
    env = {name: value for name, value in os.environ.items() if name != "TANDEM_CLUSTER_KEY"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tandem", *argv],
        capture_output=True,
        check=False,
        text=True,
        env=env,
    )
    assert done.returncode == 2
    assert done.stderr.endswith(f"\nsee: tandem docs {topic}\n")


@pytest.mark.parametrize(
    ("argv", "topic"),
    [([], "membership"), (["--discover-dns", "x"], "membership#dns")],
)
def test_a_router_that_refuses_its_flags_ends_with_where_to_read_on(argv, topic, capsys):
    assert tandem.router.command.main(argv) == 2
    assert capsys.readouterr().err.endswith(f"\nsee: tandem docs {topic}\n")
