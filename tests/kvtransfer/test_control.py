"""Order, overlap and outcomes of the jobs of a link worker."""

import contextlib
import queue
import threading

import pytest

from tandem.kvtransfer.agents.control import MAX_WRITES_IN_FLIGHT, ControlThread, LinkWorker
from tandem.wire.channel import wait
from tandem.wire.errors import PeerLost, TransferFailed
from tandem.wire.generation import Room
from tests.patience import PATIENCE_S

A, B = Room(1), Room(2)


class Panic(BaseException):
    """What a library in Rust raises."""


def fail(error):
    raise error


@pytest.fixture
def told():
    return queue.SimpleQueue()


@pytest.fixture
def worker():
    control = ControlThread("kv-test", lambda waker: wait([], 1.0, waker))
    control.start()
    made = LinkWorker("kv-link", control)
    yield made
    made.end()
    made.join(PATIENCE_S)
    control.stop()


class Write:
    """A job that is under way until it is hung up on."""

    def __init__(self):
        self.begun, self._ended = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self._ended.wait(PATIENCE_S)
        raise OSError("hung up")

    def hang_up(self):
        self._ended.set()


@contextlib.contextmanager
def held(worker):
    """Keep a worker from its jobs while more are queued in the block."""
    go_on = threading.Event()
    worker.submit(lambda: go_on.wait(PATIENCE_S), lambda _none: None, fail)
    yield
    go_on.set()


class Posted:
    """Writes that are under way until they are told to end."""

    def __init__(self, told):
        self._told = told
        self._ended = threading.Semaphore(0)

    def begin(self):
        self._told.put("begun")
        return self._end

    def _end(self):
        assert self._ended.acquire(timeout=PATIENCE_S)
        self._told.put("ended")

    def end(self, count):
        self._ended.release(count)


@pytest.mark.parametrize("error", [OSError("broken"), Panic("broken"), PeerLost("broken")])
def test_job_that_raises_any_exception_is_reported_and_the_next_runs(worker, told, error):
    worker.submit(lambda: fail(error), told.put, told.put)
    worker.submit(lambda: 7, told.put, told.put)
    answer = told.get(timeout=PATIENCE_S)
    assert isinstance(answer, PeerLost if isinstance(error, PeerLost) else TransferFailed)
    assert "broken" in answer.message
    assert told.get(timeout=PATIENCE_S) == 7


def test_exception_in_the_result_handler_is_a_failure(worker, told):
    worker.submit(lambda: OSError("broken"), fail, told.put)
    assert isinstance(told.get(timeout=PATIENCE_S), TransferFailed)


def test_stop_discards_queued_jobs_and_follows_the_outcome_of_the_running_one(worker, told):
    write = Write()
    worker.submit(write, told.put, lambda error: told.put(error.message), room=A)
    worker.submit(lambda: "never", told.put, told.put, room=A)
    worker.submit(lambda: "of another room", told.put, told.put, room=B)
    assert write.begun.wait(PATIENCE_S)
    worker.stop(A, lambda: told.put("stopped"))
    assert told.empty()
    write.hang_up()
    assert "hung up" in told.get(timeout=PATIENCE_S)
    assert {told.get(timeout=PATIENCE_S) for _ in range(2)} == {"stopped", "of another room"}
    worker.stop(B, lambda: told.put("stopped at once"))
    assert told.get(timeout=PATIENCE_S) == "stopped at once"
    assert told.empty()


@pytest.mark.parametrize("has_threads", [True, False])
def test_closing_ends_a_write_in_flight_and_still_answers_a_stop(
    worker, told, has_threads, monkeypatch
):
    write = Write()
    worker.submit(write, told.put, lambda error: told.put(error.message), room=A)
    worker.submit(lambda: "never", told.put, told.put, room=B)
    assert write.begun.wait(PATIENCE_S)
    worker.stop(A, lambda: told.put("stopped"))
    with monkeypatch.context() as patch:
        if not has_threads:
            patch.setattr(threading.Thread, "start", lambda _: fail(RuntimeError("no thread")))
        worker.close(write.hang_up)
    assert "hung up" in told.get(timeout=PATIENCE_S)
    assert told.get(timeout=PATIENCE_S) == "stopped"
    assert worker.join(PATIENCE_S)
    assert told.empty()


def test_thread_ends_even_if_closing_the_connection_raises(worker):
    worker.close(lambda: fail(Panic("broken")))
    assert worker.join(PATIENCE_S)


def test_writes_overlap_up_to_a_limit_and_other_jobs_wait_for_all(worker, told):
    posted = Posted(told)
    with held(worker):
        for _ in range(MAX_WRITES_IN_FLIGHT + 1):
            worker.write(posted.begin, told.put, A)
        worker.submit(lambda: "checked", told.put, told.put)
        worker.write(posted.begin, told.put, B)
    posted.end(MAX_WRITES_IN_FLIGHT + 2)
    words = [told.get(timeout=PATIENCE_S) for _ in range(2 * MAX_WRITES_IN_FLIGHT + 5)]
    first = ["begun"] * MAX_WRITES_IN_FLIGHT + ["ended", "begun"] + ["ended"] * MAX_WRITES_IN_FLIGHT
    assert words[: len(first)] == first
    # Its outcome goes through the control thread.
    assert sorted(words[len(first) :]) == ["begun", "checked", "ended"]


def test_write_starts_between_two_polls_of_another(worker, told):
    looked, is_over = threading.Event(), threading.Event()

    def look():
        looked.set()
        return None if is_over.is_set() else PATIENCE_S

    def begin():
        is_over.set()
        told.put("begun")

    worker.write(lambda: look, told.put, A)
    assert looked.wait(PATIENCE_S)
    worker.write(begin, told.put, A)
    assert told.get(timeout=PATIENCE_S / 2) == "begun"


def test_room_is_stopped_once_all_its_writes_are_complete(worker, told):
    posted = Posted(told)
    with held(worker):
        worker.write(posted.begin, told.put, A)
        worker.write(posted.begin, told.put, B)
    assert [told.get(timeout=PATIENCE_S) for _ in range(2)] == ["begun", "begun"]
    worker.write(lambda: told.put("never"), told.put, A)
    worker.stop(A, lambda: told.put("stopped"))
    assert told.empty()
    posted.end(2)
    assert [told.get(timeout=PATIENCE_S) for _ in range(3)] == ["ended", "ended", "stopped"]
    assert told.empty()


@pytest.mark.parametrize("is_begun", [False, True])
def test_failed_write_is_reported_and_the_next_starts(worker, told, is_begun):
    broken = lambda: fail(OSError("broken"))  # noqa: E731
    worker.write((lambda: broken) if is_begun else broken, told.put, A)
    assert isinstance(told.get(timeout=PATIENCE_S), TransferFailed)
    worker.write(lambda: told.put("begun"), told.put, A)
    worker.after(lambda: told.put("after"))
    assert [told.get(timeout=PATIENCE_S) for _ in range(2)] == ["begun", "after"]


def test_closing_ends_the_writes_in_flight(worker, told):
    write = Write()
    with held(worker):
        for _ in range(2):
            worker.write(lambda: write, lambda error: told.put(error.message), A)
    assert write.begun.wait(PATIENCE_S)
    worker.close(write.hang_up)
    assert all("hung up" in told.get(timeout=PATIENCE_S) for _ in range(2))
    assert worker.join(PATIENCE_S)
