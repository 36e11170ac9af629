import gc
import subprocess
import sys

import pytest

from tandem.node.quick_process import uncollected

ENDS = """
import atexit, sys
from tandem.node.quick_process import end_process
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


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
