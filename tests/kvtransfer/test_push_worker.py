"""The thread that writes for one link, over links whose library breaks."""

import queue

import pytest

from kvtransfer.push_worker import PushWorker
from kvtransfer.transports.base import Connection
from tests.patience import PATIENCE_S
from wire.errors import TandemError, TransferFailed
from wire.ids import Room


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
