"""Exit, watchdog and imports of engine processes."""

import asyncio
import faulthandler
import gc
import subprocess
import sys

import msgspec
import pytest
import uvloop

from tandem.engine.config import EngineConfig
from tandem.engine.scheduling.step import StepCounts
from tandem.node.config import NodeConfig
from tandem.node.life.ending import FIRST_FORWARDS, StepWatch, without_gc
from tandem.node.life.engine_process import EngineProcess, Ready
from tandem.wire.messages import ModelInfo
from tests.patience import PATIENCE_S, Clock

READY = Ready(
    epoch=1,
    engine_port=1,
    bootstrap_port=None,
    max_prompt_tokens=127,
    model=ModelInfo(
        name="m", fingerprint="llama", context_length=128, vocab_size=10, eos_token_ids=[]
    ),
)
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


# The child inherits both pipes and ends at the end of file.
LEAVES_A_CHILD = """
import os, subprocess, sys
subprocess.Popen(["sh", "-c", "cat > /dev/null; :"], stdout=1)
sys.stdout.write(os.environ.get("REPORT", ""))
sys.exit(3)
"""


@pytest.fixture
def engine_that_leaves_a_child(tmp_path, monkeypatch):
    """An engine process that exits with status 3, but whose child keeps its pipes open."""
    (tmp_path / "leaves_a_child.py").write_text(LEAVES_A_CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = NodeConfig(role="decode", engine=EngineConfig(model_dir="m"))
    return EngineProcess("leaves_a_child", config, lambda: None)


def test_exit_of_an_engine_is_noticed_while_its_child_lives(
    engine_that_leaves_a_child, monkeypatch
):
    monkeypatch.setenv("REPORT", msgspec.json.encode(READY).decode() + "\n")

    async def serve(engine):
        async with asyncio.timeout(PATIENCE_S):
            try:
                assert await engine.start() == READY
                return await engine.wait()
            finally:
                await engine.stop()

    assert uvloop.run(serve(engine_that_leaves_a_child)) == 3


def test_engine_that_exits_during_its_start_is_noticed_while_its_child_lives(
    engine_that_leaves_a_child,
):
    async def start(engine):
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await engine.start()
            finally:
                await engine.stop()

    failure = uvloop.run(start(engine_that_leaves_a_child))
    assert failure.message == "the engine process exited with status 3 during start-up"


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
