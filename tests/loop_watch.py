"""Fails a test in which a loop stood for too long: an event loop in one callback, or an engine's in one pass.

The limit of a callback applies to the CPU time of the loop's thread without garbage collection, so that a busy
machine fails no test. Tasks of the tests themselves are exempt. The limit of a pass is a number of bytecodes.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

# A tenth of the silence after which an engine considers its edge worker lost.
MAX_CALLBACK_S = 0.2
# About 2 ms of Python, and 24 bytecodes for each page of a prompt of 128k tokens.
MAX_BYTECODES = 200_000
TESTS = str(Path(__file__).parent)


class _Collector:
    """Measures the CPU time of this thread's garbage collection."""

    def __init__(self) -> None:
        self.seconds = self._started = 0.0

    def __call__(self, phase: str, _info: dict) -> None:
        if phase == "start":
            self._started = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._started


def _is_of_a_test(handle: asyncio.Handle) -> bool:
    task = getattr(handle._callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return False
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and code.co_filename.startswith(TESTS)


@pytest.fixture(autouse=True)
def no_callback_holds_up_the_loop(monkeypatch) -> Iterator[list[str]]:
    """Fail at the end of a test if a callback took too long; yields the list of slow callbacks."""
    collector, slow = _Collector(), list[str]()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        collected_s, started_s = collector.seconds, time.thread_time()
        callback, is_of_a_test = handle._callback, _is_of_a_test(handle)
        run(handle)
        took_s = time.thread_time() - started_s - (collector.seconds - collected_s)
        if took_s > MAX_CALLBACK_S and not is_of_a_test:
            slow.append(f"{took_s:.2f} s: {callback!r}")

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    gc.callbacks.append(collector)
    yield slow
    gc.callbacks.remove(collector)
    assert not slow, f"the loop was held up: {slow}"


@contextmanager
def few_bytecodes() -> Iterator[None]:
    """Fail if the block runs so much Python code that the loop stands, such as one operation per page."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, _argument):
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
    assert count < MAX_BYTECODES
