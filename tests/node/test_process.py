"""How engine processes end, also those whose loop hangs, and import."""

import faulthandler
import gc
import subprocess
import sys

import pytest

from tandem.engine.step import StepCounts
from tandem.node.process import FIRST_FORWARDS, StepWatch, uncollected
from tests.patience import PATIENCE_S

HANGS = """
import ctypes, threading
from tandem.engine.step import StepCounts
from tandem.node.process import FIRST_FORWARDS, StepWatch

def step():
    {hang}

steps = StepCounts()
steps.num_collected = FIRST_FORWARDS
StepWatch(0.1, steps).turned()
step()
"""


@pytest.mark.parametrize(
    "hang",
    ["threading.Event().wait()", "ctypes.PyDLL(None).sleep(1000)"],
    ids=["waits", "keeps the interpreter's lock"],
)
def test_a_step_that_hangs_ends_the_process_and_tells_where(hang):
    done = subprocess.run(
        [sys.executable, "-c", HANGS.format(hang=hang)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "in step" in done.stderr


@pytest.fixture
def armed(monkeypatch):
    """The limits that the watchdog was wound up with."""
    limits = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda timeout, **_: limits.append(timeout)
    )
    return limits


def test_a_pass_has_its_whole_limit_though_the_watchdog_is_wound_up_once_a_second(armed):
    now = 0.0
    steps = StepCounts()
    watch, ends = StepWatch(300.0, steps, lambda: now), 0.0
    steps.num_collected = FIRST_FORWARDS - 1
    watch.turned()
    assert armed == [], "the first forwards may compile"
    steps.num_collected = FIRST_FORWARDS
    for _ in range(100):
        num_before = len(armed)
        watch.turned()
        if len(armed) > num_before:
            ends = now + armed[-1]
        assert ends - now >= 300
        now += 0.15
    assert len(armed) <= 16


ENDS = """
import atexit, sys
from tandem.node.process import end_process
atexit.register(print, "taken apart")
sys.stdout.write("said")
end_process(3)
"""


def test_a_process_that_ends_at_once_has_said_what_it_had_to_say():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("said", "", 3)


def test_the_collector_rests_inside_and_goes_on_whatever_happens():
    with pytest.raises(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
