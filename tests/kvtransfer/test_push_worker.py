"""The thread that writes for one link, over links whose library breaks."""

import queue
import threading

import pytest

from tandem.kvtransfer.push_worker import PushWorker
from tandem.kvtransfer.transports.base import Connection
from tandem.wire.errors import TandemError, TransferFailed
from tandem.wire.ids import Room
from tests.patience import PATIENCE_S


class Silent(Connection):
    """Writes nothing."""

    def write(self, room, plan):
        raise AssertionError("no job of these tests writes")

    def close(self):
        pass


def refuse():
    raise RuntimeError("Input/output error")


@pytest.fixture
def told():
    return queue.SimpleQueue[TandemError | None]()


def test_a_library_that_raises_while_it_connects_fails_the_link_by_name(told):
    worker = PushWorker(refuse, told.put)
    error = told.get(timeout=PATIENCE_S)
    worker.join()
    assert isinstance(error, TransferFailed)
    assert "Input/output error" in error.message
    assert error.is_retryable


def test_a_library_that_raises_in_one_job_does_not_end_the_next(told):
    worker = PushWorker(Silent, told.put)
    assert told.get(timeout=PATIENCE_S) is None
    worker.submit(Room(1), lambda _connection: refuse(), told.put)
    worker.submit(Room(2), lambda _connection: None, told.put)
    assert isinstance(told.get(timeout=PATIENCE_S), TransferFailed)
    assert told.get(timeout=PATIENCE_S) is None
    worker.close()
    worker.join()


def test_a_room_is_stopped_only_after_the_outcome_of_its_job_is_told(told):
    worker = PushWorker(Silent, told.put)
    assert told.get(timeout=PATIENCE_S) is None
    words = queue.SimpleQueue[str]()

    def done(_error):
        worker.stop(Room(1), lambda: words.put("stopped"))
        words.put("done")

    worker.submit(Room(1), lambda _connection: refuse(), done)
    assert [words.get(timeout=PATIENCE_S) for _ in range(2)] == ["done", "stopped"]
    worker.close()
    worker.join()


def test_a_write_is_ended_also_where_there_is_no_thread_to_hang_up(told, monkeypatch):
    class Waiting(Silent):
        def __init__(self):
            self.begun, self.closed = threading.Event(), threading.Event()

        def close(self):
            self.closed.set()

    def wait(connection):
        connection.begun.set()
        assert connection.closed.wait(PATIENCE_S)

    def no_thread(_thread):
        raise RuntimeError("can't start new thread")

    connection = Waiting()
    worker = PushWorker(lambda: connection, told.put)
    assert told.get(timeout=PATIENCE_S) is None
    worker.submit(Room(1), wait, told.put)
    assert connection.begun.wait(PATIENCE_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        worker.close()
    assert told.get(timeout=PATIENCE_S) is None
    worker.join()


def test_a_library_that_raises_while_it_hangs_up_ends_the_thread_all_the_same(told):
    class Broken(Silent):
        def close(self):
            refuse()

    worker = PushWorker(Broken, told.put)
    assert told.get(timeout=PATIENCE_S) is None
    worker.close()
    worker.join()
