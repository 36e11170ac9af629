"""Exit, watchdog and imports of engine processes."""

import asyncio
import faulthandler
import gc
import os
import subprocess
import sys

import msgspec
import pytest
import uvloop

from tandem.engine.config import EngineConfig
from tandem.engine.scheduling.step import StepCounts
from tandem.node.config import NodeConfig
from tandem.node.life.ending import FIRST_FORWARDS, StepWatch, without_gc
from tandem.node.life.engine_process import EngineProcess
from tests.node.test_local_backend import READY
from tests.patience import PATIENCE_S, Clock

HANGS = """
import ctypes, threading
from tandem.engine.scheduling.step import StepCounts
from tandem.node.life.ending import FIRST_FORWARDS, StepWatch

def step():
    {hang}

steps = StepCounts()
steps.num_collected = FIRST_FORWARDS
StepWatch(0.1, steps).on_pass()
step()
"""


@pytest.mark.parametrize(
    "hang",
    ["threading.Event().wait()", "ctypes.PyDLL(None).sleep(1000)"],
    ids=["waits", "keeps the interpreter's lock"],
)
def test_hanging_step_ends_the_process_with_its_stack(hang):
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
    """The timeouts with which the watchdog was started."""
    limits = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda timeout, **_: limits.append(timeout)
    )
    return limits


def test_pass_has_its_full_limit_though_the_watchdog_restarts_once_a_second(armed):
    clock = Clock()
    steps = StepCounts()
    watch, ends = StepWatch(300.0, steps, clock), 0.0
    steps.num_collected = FIRST_FORWARDS - 1
    watch.on_pass()
    assert armed == [], "the first forwards may compile"
    steps.num_collected = FIRST_FORWARDS
    for _ in range(100):
        num_before = len(armed)
        watch.on_pass()
        if len(armed) > num_before:
            ends = clock.now_s + armed[-1]
        assert ends - clock.now_s >= 300
        clock.now_s += 0.15
    assert len(armed) <= 16


def test_engine_killed_at_its_spawn_fails_the_start_with_its_status(monkeypatch):
    spawn = asyncio.create_subprocess_exec

    async def spawn_killed(*command, **options):
        process = await spawn(*command, **options)
        process.kill()
        await process.wait()
        while not process.stdin.is_closing():  # noqa: ASYNC110 - a transport has no event
            await asyncio.sleep(0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_killed)
    config = NodeConfig(role="decode", engine=EngineConfig(model_dir="m"))
    engine = EngineProcess("tandem", config, lambda: None)
    failure = uvloop.run(engine.start())
    assert failure.message == "the engine process exited with status -9 during start-up"
    engine.drain(1.0)  # an order to a process that has exited


# The engine exits, but its child keeps both pipes open until the end of file.
LEAVES_A_CHILD = """
import subprocess, sys
config = sys.stdin.readline()
subprocess.Popen(["sh", "-c", "cat > /dev/null; :"])
if config.startswith('{"role":"prefill"'):
    print(REPORT, flush=True)
sys.exit(3)
"""
STARTS_IT = """
import asyncio, sys, uvloop
from tandem.engine.config import EngineConfig
from tandem.node.config import NodeConfig
from tandem.node.life.engine_process import EngineProcess, Ready

async def run():
    config = NodeConfig(role=sys.argv[1], engine=EngineConfig(model_dir="m"))
    engine = EngineProcess("leaves_a_child", config, lambda: None)
    started = await engine.start()
    print(await engine.wait() if isinstance(started, Ready) else started.message)
    await engine.stop()

uvloop.run(run())
"""


@pytest.mark.parametrize(
    ("role", "outcome"),
    [
        ("prefill", "3"),
        ("decode", "the engine process exited with status 3 during start-up"),
    ],
)
def test_exit_of_an_engine_is_noticed_while_its_child_lives(tmp_path, role, outcome):
    report = msgspec.json.encode(READY).decode()
    (tmp_path / "leaves_a_child.py").write_text(LEAVES_A_CHILD.replace("REPORT", repr(report)))
    done = subprocess.run(
        [sys.executable, "-c", STARTS_IT, role],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.stdout, done.returncode) == (f"{outcome}\n", 0), done.stderr


ENDS = """
import atexit, sys
from tandem.node.life.ending import end_process
atexit.register(print, "taken apart")
sys.stdout.write("said")
end_process(3)
"""


def test_end_process_flushes_output():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("said", "", 3)


def test_without_gc_restores_the_collector_after_an_exception():
    with pytest.raises(ImportError), without_gc():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
