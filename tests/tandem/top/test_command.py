"""`tandem top` as a process, before a router's own `/overview`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.browser import scenes
from tests.browser.stage import Stage

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 600  # a guard against one that hangs
NUM_TRIES = 5


def top(*argv: str) -> subprocess.CompletedProcess:
    """Run it, again where the machine stood still for longer than it waits for an answer."""
    command = [sys.executable, "-P", "-m", "tandem", "top", *argv]
    for _ in range(NUM_TRIES):
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if "does not answer within" not in done.stderr:
            break
    return done


def test_once_prints_a_picture_and_json_the_state_itself():
    with Stage(scenes.cluster(1, 2), api_keys=("k",)).open() as stage:
        shown = top(stage.url, "--once", "--api-key", "k")
        assert shown.returncode == 0, shown.stderr
        assert "10.0.1.2:7001" in shown.stdout
        data = top(stage.url, "--once", "--json", "--api-key", "k")
        assert [node["id"] for node in json.loads(data.stdout)["nodes"]] == [
            "10.0.0.1:7000",
            "10.0.1.1:7001",
            "10.0.1.2:7001",
        ]
        refused = top(stage.url, "--api-key", "wrong")
        assert refused.returncode == 1
        assert "asks for an API key: give one that it takes with --api-key" in refused.stderr


def test_a_router_that_is_not_there_is_an_error_at_once_and_waited_for_otherwise():
    stage = Stage(scenes.cluster(1, 1))
    away = top(stage.url, "--once")
    assert away.returncode == 1
    assert "cannot be reached (Connection refused): is it the router's URL" in away.stderr
    command = [sys.executable, "-u", "-P", "-m", "tandem", "top", stage.url, "--interval", "0.1"]
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


def test_what_cannot_be_is_refused_with_what_can():
    assert "--interval is 0: give at least 0.1" in top("--interval", "0").stderr
    wrong = top("10.0.0.1:8000")
    assert wrong.returncode == 2
    assert "URL" in wrong.stderr
