"""What becomes of a worker's jobs."""

import queue
import threading

import pytest

from tandem.kvtransfer.control import ControlThread, Worker
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
    made = Worker("kv-link", control)
    yield made
    made.end()
    made.join()
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


@pytest.mark.parametrize("error", [OSError("broken"), Panic("broken"), PeerLost("broken")])
def test_a_job_that_raises_whatever_is_answered_and_the_next_is_done(worker, told, error):
    worker.submit(lambda: fail(error), told.put, told.put)
    worker.submit(lambda: 7, told.put, told.put)
    answer = told.get(timeout=PATIENCE_S)
    assert isinstance(answer, PeerLost if isinstance(error, PeerLost) else TransferFailed)
    assert "broken" in answer.message
    assert told.get(timeout=PATIENCE_S) == 7


def test_a_result_that_nobody_can_take_is_a_failure(worker, told):
    worker.submit(lambda: OSError("broken"), fail, told.put)
    assert isinstance(told.get(timeout=PATIENCE_S), TransferFailed)


def test_a_room_is_stopped_behind_the_outcome_of_its_job_and_loses_those_that_wait(worker, told):
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
def test_closing_ends_a_write_under_way_and_still_answers_a_stop(
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
    worker.join()
    assert told.empty()


def test_a_library_that_raises_while_it_hangs_up_ends_the_thread_all_the_same(worker):
    worker.close(lambda: fail(Panic("broken")))
    worker.join()
    assert not worker.is_running
